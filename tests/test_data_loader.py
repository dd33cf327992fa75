"""The loader: batches, order, exact resume from any record, what it refuses, and how fast it is."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time

import numpy as np
import pytest
from conftest import tiny
from data_tools import number_files, numbered, read_numbers, write_index, write_records

from mesh_transformer.config import load_config, resolve_epochs
from mesh_transformer.data import sidecar
from mesh_transformer.data.loader import RecordLoader
from mesh_transformer.data.permutation import Permutation
from mesh_transformer.errors import DataError


def open_loader(index, batch=(2,), **options):
    return RecordLoader(index, batch, 4, 1000, **options)


def saved(loader):
    """The position as a checkpoint's JSON brings it back."""
    return json.loads(json.dumps(loader.position))


def test_obs_and_target_are_the_record_shifted_by_one(tmp_path):
    rows = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15], [16, 17, 18, 19, 20]]
    write_records(tmp_path / "a", rows)
    with open_loader(write_index(tmp_path, ["a"]), (2, 2)) as loader:
        batch = next(loader)
    assert set(batch) == {"obs", "target"} and batch["obs"].dtype == batch["target"].dtype == np.int32
    assert batch["obs"].tolist() == [[[1, 2, 3, 4], [6, 7, 8, 9]], [[11, 12, 13, 14], [16, 17, 18, 19]]]
    assert batch["target"].tolist() == [[[2, 3, 4, 5], [7, 8, 9, 10]], [[12, 13, 14, 15], [17, 18, 19, 20]]]


def test_batches_span_files_and_epochs_and_only_the_very_end_is_dropped(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    index = number_files(tmp_path, [3, 3])
    with open_loader(index, epochs=1) as loader:
        assert [batch["obs"][:, 0].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    index = number_files(tmp_path, [3, 4])
    with open_loader(index, epochs=2) as loader:
        assert read_numbers(loader) == [0, 1, 2, 3, 4, 5, 6] * 2
        assert loader.records_consumed == 14
    assert "left out" not in caplog.text
    with open_loader(index, epochs=1) as loader:
        assert read_numbers(loader) == [0, 1, 2, 3, 4, 5]
    assert "end of epoch 0: 1 records did not fill a batch and were left out" in caplog.text


def test_epochs_become_as_many_steps_as_they_fill(tmp_path):
    """What `resolve_epochs` promises of the loader: all passes, and the last step alone may begin another."""
    config = load_config(tiny(seq=4, per_replica_batch=2, epochs=3, total_steps=None))
    index = number_files(tmp_path, [3, 4])
    steps = resolve_epochs(config, 7, dp=2).run.total_steps
    assert steps == 6
    with open_loader(index, (1, 4), shuffle=True) as loader:
        before = read_numbers(loader, steps - 1)
        assert loader.position["epoch"] == 2
        counts = np.bincount(before + read_numbers(loader, 1)[:1])
    assert counts.tolist() == [3] * 7


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_inside_a_batch_that_spans_epochs(tmp_path, shuffle):
    """With another batch size, so that the new run's batches lie across the epoch's end in another way."""
    index = number_files(tmp_path, [3, 4])
    with open_loader(index, (1,), shuffle=shuffle, epochs=3) as loader:
        order = read_numbers(loader)
    with open_loader(index, (4,), shuffle=shuffle) as loader:
        first = read_numbers(loader, 2)
        assert (loader.position["epoch"], loader.position["epoch_records"]) == (1, 1)
        with open_loader(index, (5,), shuffle=shuffle, position=saved(loader)) as resumed:
            assert first + read_numbers(resumed, 2) == order[:18]


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_at_every_batch_equals_the_unbroken_run(tmp_path, shuffle):
    """K is at file boundaries, inside files, at the end of an epoch and in the second one."""
    index = number_files(tmp_path, [3, 4, 0, 2, 1])
    with open_loader(index, shuffle=shuffle) as loader:
        unbroken = read_numbers(loader, 12)
    with open_loader(index, shuffle=shuffle) as loader:
        for taken in range(12):
            with open_loader(index, shuffle=shuffle, position=saved(loader)) as resumed:
                assert read_numbers(resumed, 12 - taken) == unbroken[2 * taken :]
                assert resumed.records_consumed == 24
            next(loader)


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_with_another_batch_size_repeats_and_skips_nothing(tmp_path, shuffle):
    index = number_files(tmp_path, [5, 7, 4])
    with open_loader(index, (1,), shuffle=shuffle, epochs=1) as loader:
        order = read_numbers(loader)
    assert sorted(order) == list(range(16))
    with open_loader(index, (4,), shuffle=shuffle, epochs=1) as loader:
        first = read_numbers(loader, 2)
        with open_loader(index, (1, 2), shuffle=shuffle, epochs=1, position=saved(loader)) as resumed:
            assert first + read_numbers(resumed) == order
            assert resumed.records_consumed == 16


def test_what_was_read_ahead_does_not_count(tmp_path):
    index = number_files(tmp_path, [50])
    with open_loader(index, prefetch=8) as loader:
        next(loader)
        deadline = time.monotonic() + 10
        while loader.records.records_read < 1 + 18 and time.monotonic() < deadline:  # 1 at opening
            time.sleep(0.01)
        assert loader.records.records_read >= 19
        assert loader.position["records"] == 2 and loader.position["offset"] == loader.records.files[0].offsets[2]


@pytest.mark.parametrize("shuffle", [False, True])
def test_restart_reads_no_more_records_however_far_it_is(tmp_path, shuffle):
    count = 100_000
    body = write_records(tmp_path / "body", numbered(0, 100, seq=1)).read_bytes()
    (tmp_path / "big").write_bytes(body * (count // 100))
    index = write_index(tmp_path, ["big"])
    with RecordLoader(index, (1,), 1, 1000, shuffle=shuffle) as loader:
        start = saved(loader)
    at = {"records": count - 7, "epoch_records": count - 7}
    position = {key: value for key, value in start.items() if key not in ("offset", "file", "file_records")} | at
    with RecordLoader(index, (1,), 1, 1000, position=position, shuffle=shuffle, prefetch=1, epochs=1) as loader:
        order = Permutation(count, 42, 0)(np.arange(count - 7, count)) if shuffle else np.arange(count - 7, count)
        assert read_numbers(loader) == (order % 100).tolist()
        # One at opening, seven handed out.
        assert loader.records.records_read == 8


def test_position_has_the_keys_of_the_2021_library(tmp_path):
    index = number_files(tmp_path, [4, 8])
    with open_loader(index) as loader:
        assert (loader.position["used"], loader.position["file_idx"]) == ([], 0)
        read_numbers(loader, 5)
        assert loader.position["used"] == [str(tmp_path / "f0.tfrecords")]
        assert loader.position["file_idx"] == 2  # three batches of the second file were read


def test_position_of_the_2021_library_is_understood(tmp_path):
    index = number_files(tmp_path, [4, 8])
    old = {"used": ["gs://elsewhere/f0.tfrecords"], "file_idx": 1}
    with open_loader(index, position=old, epochs=1) as loader:
        assert read_numbers(loader) == [8, 9, 10, 11]
    with pytest.raises(DataError, match="which the run has read, is not in it"):
        open_loader(index, position={"used": ["other.tfrecords"], "file_idx": 1})


def test_other_data_is_refused_unless_reset(tmp_path):
    index = number_files(tmp_path, [4, 4])
    with open_loader(index) as loader:
        read_numbers(loader, 3)
        position = saved(loader)
    moved = tmp_path / "moved"
    moved.mkdir()
    assert read_numbers(open_loader(number_files(moved, [4, 4]), position=position, epochs=1)) == [6, 7]
    changes = {
        "order": ["f1.tfrecords", "f0.tfrecords"],
        "fewer": ["f0.tfrecords"],
        "more": ["f0.tfrecords", "f1.tfrecords", "f0.tfrecords"],
    }
    for name, files in changes.items():
        changed = write_index(tmp_path, files, f"{name}.index")
        with pytest.raises(DataError, match=r"its files are not those that the run was reading.*--reset-data"):
            open_loader(changed, position=position)
        with open_loader(changed, position=position, reset_data=True) as loader:
            assert (loader.position["epoch_records"], loader.records_consumed) == (0, 6)
            assert read_numbers(loader, 1)[0] == (4 if name == "order" else 0)
    write_records(tmp_path / "f1.tfrecords", numbered(5, 4))  # same name, same size
    with pytest.raises(DataError, match="fingerprint"):
        open_loader(index, position=position)


def test_another_order_is_refused_on_resume(tmp_path):
    index = number_files(tmp_path, [8])
    with open_loader(index, shuffle=True, seed=1) as loader:
        next(loader)
        position = saved(loader)
    for options in ({"shuffle": True, "seed": 2}, {"shuffle": False}):
        with pytest.raises(DataError, match="data order: .*the run was reading shuffled by seed 1"):
            open_loader(index, position=position, **options)


def test_shuffle_is_by_seed_and_epoch_and_complete(tmp_path):
    index = number_files(tmp_path, [30, 34])
    with open_loader(index, shuffle=True, seed=3, epochs=2) as loader:
        both = read_numbers(loader)
    first, second = both[:64], both[64:]
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second and first != sorted(first)
    with open_loader(index, shuffle=True, seed=3, epochs=1) as loader:
        assert read_numbers(loader) == first
    with open_loader(index, shuffle=True, seed=4, epochs=1) as loader:
        assert read_numbers(loader) != first


def test_permutation_large_and_small_are_permutations():
    for n in (1, 2, 3, 5, 1000, 4097):
        for limit in (0, 10_000):
            order = Permutation(n, 7, 1, table_limit=limit)(np.arange(n))
            assert sorted(order.tolist()) == list(range(n))
    order = Permutation(100_003, 7, table_limit=0)
    values = order(np.arange(100_003))
    assert len(set(values.tolist())) == 100_003
    # Neighbours end up far apart: for a random order the mean distance is n / 3.
    assert abs(np.abs(np.diff(values)).mean() / 100_003 - 1 / 3) < 0.01
    assert abs(np.corrcoef(values, np.arange(100_003))[0, 1]) < 0.02
    # Pinned, since a resumed run depends on it.
    assert Permutation(10, 42, 0)(np.arange(10)).tolist() == [0, 5, 9, 8, 4, 3, 1, 2, 6, 7]
    assert values[:4].tolist() == [40660, 90563, 44875, 45273]


def test_record_of_another_length_is_refused_before_the_first_step(tmp_path):
    write_records(tmp_path / "a", numbered(0, 2, seq=8))
    write_records(tmp_path / "b", numbered(0, 2, seq=16))
    index = write_index(tmp_path, ["a", "b"])
    with pytest.raises(DataError, match=r"/b: record 0 at byte offset 0 holds 17 tokens, expected 9 \(seq 8 \+ 1\)"):
        RecordLoader(index, (1,), 8, 100)
    write_records(tmp_path / "b", [*numbered(0, 2, seq=8), [1] * 17])
    with RecordLoader(index, (1,), 8, 100) as loader:
        read_numbers(loader, 4)
        with pytest.raises(DataError, match="/b: record 2 at byte offset .* holds 17 tokens, expected 9"):
            next(loader)


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    write_records(tmp_path / "a", [[0, 1, 99, 3, 4]])
    index = write_index(tmp_path, ["a"])
    with RecordLoader(index, (1,), 4, 100) as loader:  # n_vocab - 1 is fine
        next(loader)
    with pytest.raises(DataError, match=r"/a: record 0 .* token id 99 at position 2, expected 0 to 98 \(n_vocab 99\)"):
        RecordLoader(index, (1,), 4, 99)
    write_records(tmp_path / "a", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 100]])
    with RecordLoader(index, (1,), 4, 100) as loader:
        next(loader)
        with pytest.raises(DataError, match="/a: record 1 at byte offset .* token id 100 at position 4"):
            next(loader)


def test_description_beside_the_file_is_checked_before_the_first_step(tmp_path):
    path = write_records(tmp_path / "a", numbered(0, 3))
    index = write_index(tmp_path, ["a"])
    facts = {"bytes": path.stat().st_size, "records": 3, "seq": 4, "max_id": 2}
    for wrong, message in (
        ({"seq": 9}, r"its records hold 10 tokens \(made with seq 9\), expected 5"),
        ({"max_id": 1000}, "its largest token id is 1000, but n_vocab is 1000"),
    ):
        sidecar.write(str(path), facts | wrong)
        with pytest.raises(DataError, match=message):
            open_loader(index)
    sidecar.write(str(path), facts | {"seq": 9, "bytes": 1})  # of another version of the file: not believed
    assert read_numbers(open_loader(index, (3,), epochs=1)) == [0, 1, 2]
    sidecar.write(str(path), facts)
    with pytest.raises(DataError, match=r"3 records do not fill one batch of 4 \(2 x 2\)"):
        open_loader(index, (2, 2))


def test_too_few_records_for_a_batch_without_a_description(tmp_path):
    index = number_files(tmp_path, [2, 1])
    with open_loader(index, (4,)) as loader, pytest.raises(DataError, match="3 records do not fill one batch of 4"):
        next(loader)


def test_record_without_the_feature(tmp_path):
    from mesh_transformer.data.records import RecordWriter

    for features, found in (
        ({"tokens": np.arange(5)}, "tokens int64"),
        ({"text": np.arange(5) / 2}, "text float32"),
    ):
        with (tmp_path / "a").open("wb") as file:
            RecordWriter(file).write(features)
        with pytest.raises(DataError, match=rf"no integer feature `text` \(features: {found}\)"):
            open_loader(write_index(tmp_path, ["a"]))


def test_mask_belongs_to_the_targets(tmp_path):
    rows, masks = numbered(0, 2), [[1, 0, 1, 0, 1], [0, 0, 0, 1, 1]]
    write_records(tmp_path / "a", rows, masks)
    with open_loader(write_index(tmp_path, ["a"])) as loader:
        assert loader.records.has_mask
        batch = next(loader)
    assert batch["mask"].dtype == np.float32
    assert batch["mask"].tolist() == [[0, 1, 0, 1], [0, 0, 1, 1]]


def test_mask_of_ones_stands_in_where_a_file_has_none(tmp_path):
    write_records(tmp_path / "a", numbered(0, 1))
    write_records(tmp_path / "b", numbered(1, 1), [[0] * 5])
    with open_loader(write_index(tmp_path, ["a", "b"])) as loader:
        assert next(loader)["mask"].tolist() == [[1] * 4, [0] * 4]


def test_masks_that_come_and_go_or_do_not_fit_are_refused(tmp_path):
    from mesh_transformer.data.records import RecordWriter

    def write(*masks):
        with (tmp_path / "a").open("wb") as file:
            writer = RecordWriter(file)
            for mask in masks:
                writer.write({"text": np.arange(5)} | ({} if mask is None else {"mask": np.array(mask)}))
        return write_index(tmp_path, ["a"])

    with pytest.raises(DataError, match="record 0 .* a mask of 4 numbers for 5 tokens"):
        open_loader(write([1] * 4))
    for second, message in (([1] * 5, "has a mask, but the first"), (None, "has no mask")):
        first = None if second else [1] * 5
        with open_loader(write(first, second)) as loader, pytest.raises(DataError, match=f"record 1 .* {message}"):
            next(loader)


def test_empty_files_are_passed_over_but_not_an_empty_set(tmp_path):
    index = number_files(tmp_path, [0, 2, 0, 2, 0])
    assert read_numbers(open_loader(index, epochs=1)) == [0, 1, 2, 3]
    with pytest.raises(DataError, match="none of its 2 files has a record"):
        open_loader(number_files(tmp_path, [0, 0]))


def test_rewind_starts_again_where_it_started(tmp_path):
    index = number_files(tmp_path, [6])
    with open_loader(index, epochs=1) as loader:
        assert read_numbers(loader, 2) == [0, 1, 2, 3]
        loader.rewind()
        assert read_numbers(loader) == [0, 1, 2, 3, 4, 5]
        loader.rewind()
        assert read_numbers(loader) == [0, 1, 2, 3, 4, 5]


def test_thread_ends_with_its_loader(tmp_path):
    index = number_files(tmp_path, [6])
    before = threading.active_count()
    loader = open_loader(index)
    next(loader)
    loader.close()
    forgotten = open_loader(index)
    next(forgotten)
    assert threading.active_count() == before + 1
    del forgotten
    gc.collect()
    deadline = time.monotonic() + 3
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() == before


def test_reads_urls_through_smart_open(tmp_path, monkeypatch):
    """The records come over http, from a server that this test runs."""
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    number_files(tmp_path, [3, 3])
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        index = tmp_path / "remote.index"
        index.write_text(f"http://127.0.0.1:{server.server_port}/f0.tfrecords\nf1.tfrecords\n")
        for shuffle in (False, True):
            with open_loader(str(index), shuffle=shuffle, epochs=1) as loader:
                assert sorted(read_numbers(loader)) == [0, 1, 2, 3, 4, 5]
    finally:
        server.shutdown()
        server.server_close()


def test_fast_enough_by_a_wide_margin(tmp_path):
    """The quickstart trains at about 5,000 tokens/s: the loader must feed 20 times that; measured: 50 times this."""
    rng = np.random.default_rng(0)
    write_records(tmp_path / "a", rng.integers(0, 4096, (500, 129)).tolist())
    index = write_index(tmp_path, ["a"])
    with RecordLoader(index, (1, 16), 128, 4096, epochs=4) as loader:
        start = time.process_time()
        tokens = sum(batch["obs"].size for batch in loader)
        assert tokens / (time.process_time() - start) > 100_000


def test_many_files_read_at_random_are_not_all_open(tmp_path, monkeypatch):
    monkeypatch.setattr("mesh_transformer.data.record_set._OPEN_FILES", 3)
    index = number_files(tmp_path, [2] * 10)
    with open_loader(index, (1,), shuffle=True, epochs=2, prefetch=1) as loader:
        numbers = []
        for batch in loader:
            numbers.append(int(batch["obs"][0, 0]))
            assert sum(file._file is not None for file in loader.records.files) <= 4  # one is being opened, perhaps
    assert sorted(numbers) == sorted(2 * list(range(20)))
