"""CheckpointStore: what is kept, what a crash leaves, what a damaged file leads to, and who may resume what."""

import errno
import json
import logging
import os
import shutil
import threading

import jax
import numpy as np
import pytest
from checkpoint_tools import assert_states_equal, config_of, host, random_state, without_fsync, write_2021
from conftest import mesh_of

from mesh_transformer import storage
from mesh_transformer.checkpoint import formats, manifest, meta, npz, retention, shards
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.snapshot import snapshot
from mesh_transformer.checkpoint.store import CheckpointStore, find_step
from mesh_transformer.errors import CheckpointError, StorageError


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    without_fsync(monkeypatch)


CONFIG = config_of(2, layers=1)
MESH = mesh_of(1, 2)


def state_of(seed):
    return random_state(CONFIG.model, MESH, seed)


def save(store, step, **options):
    store.save(step, state_of(step), CONFIG, {"file_idx": step, "used": []}, **options)
    store.wait()


def flip(path, offset=-200):
    """Change one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[offset % len(content)] ^= 0x10
    path.write_bytes(content)


def test_saved_and_restored(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.steps() == []
    assert store.latest() is None
    state = state_of(1)
    store.save(5, state, CONFIG, {"used": ["a"], "file_idx": 3}, {"text": 2.5}, aux={"run": {"run_id": "x"}})
    store.wait()
    found = CheckpointStore(f"file://{tmp_path}/").restore(CONFIG, mesh_of(2, 4))
    assert_states_equal(found.state, state)
    assert found.step == 5
    expected = {"train_loader": {"used": ["a"], "file_idx": 3}, "val_loss": {"text": 2.5}, "run": {"run_id": "x"}}
    assert found.aux == expected
    body = json.loads((tmp_path / "meta.json").read_text())
    assert body == {"step": 5, "checkpoints": [5], "aux": {"5": expected}}
    assert sorted(os.listdir(tmp_path / "step_5")) == ["manifest.json", "shard_0", "shard_1"]


def test_training_may_overwrite_the_state_while_it_is_written(tmp_path, monkeypatch):
    gate = threading.Event()
    write_step = shards.write_step

    def slow(*arguments, **details):
        assert gate.wait(20)
        write_step(*arguments, **details)

    monkeypatch.setattr(shards, "write_step", slow)
    store, state = CheckpointStore(tmp_path), state_of(1)
    before = host(state)
    before = jax.tree.map(np.array, before)
    store.save(1, state, CONFIG)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    zeroed = step(state)
    gate.set()
    store.wait()
    assert not np.any(np.asarray(jax.tree.leaves(zeroed.params)[0]))
    assert_states_equal(store.restore(CONFIG, MESH).state, before)


@pytest.mark.parametrize(
    ("keep_n", "keep_every", "losses", "expected"),
    [
        (1, 0, {1: 3.0, 2: 1.0, 3: 2.0}, [2, 3]),  # the best stays
        (2, 0, {}, [5, 6]),
        (2, 2, {}, [2, 4, 5, 6]),
        (1, 3, {1: 1.0, 4: 1.0}, [3, 4, 6]),  # the newer of two equally good
        (9, 0, {}, [1, 2, 3, 4, 5, 6]),
        (1, 0, {2: float("nan"), 3: 2.0}, [3, 6]),
    ],
)
def test_retention(keep_n, keep_every, losses, expected):
    steps = list(range(1, 4 if 3 in losses and 1 in losses else 7))
    gone = retention.to_delete(steps, losses, keep_n, keep_every)
    assert [step for step in steps if step not in gone] == expected


def test_best_and_latest_are_addressable(tmp_path):
    store = CheckpointStore(tmp_path, keep_n=1, keep_best="val")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(store, step, val_loss={"val": loss, "other": -step})
    assert store.steps() == [2, 3]
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("step")) == ["step_2", "step_3"]
    assert (store.best(), store.latest()) == (2, 3)
    assert store.restore(CONFIG, MESH, "best").step == 2
    assert store.restore(CONFIG, MESH, 3).step == 3
    with pytest.raises(CheckpointError, match="has no step 1; it has 2, 3"):
        store.resolve(1)
    with pytest.raises(CheckpointError, match="no checkpoint was validated on 'nothing'.*use latest"):
        CheckpointStore(tmp_path, keep_best="nothing").resolve("best")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        CheckpointStore(tmp_path / "none").resolve("latest")


class Killed(BaseException):
    """Stands for kill -9: nothing catches it, nothing is cleaned up."""


ONE = config_of(1, layers=1, d_model=16, n_heads=4)
ONE_MESH = mesh_of(1, 1)


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_at_any_instant_leaves_a_loadable_step(tmp_path, monkeypatch, stride):
    """Every system call that changes a file is made the last one, in turn, of a save that also deletes an old step."""
    base, folder, left = tmp_path / "base", tmp_path / "run", [-1]
    states = {step: random_state(ONE.model, ONE_MESH, step) for step in (1, 2, 3)}
    store = CheckpointStore(base, keep_n=1)
    for step in (1, 2):
        store.save(step, states[step], ONE)
        store.wait()

    def counted(original):
        def call(*arguments, **options):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return original(*arguments, **options)

        return call

    for name in ("mkdir", "remove", "unlink", "rmdir", "replace", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(storage, "open", counted(open), raising=False)
    seen, kills, copied = [], 0, snapshot(states[3])
    for instant in range(0, 10**6, stride):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        store = CheckpointStore(folder, keep_n=1)
        left[0] = instant
        try:
            details = {
                "step": 3,
                "aux": {},
                "config": ONE.to_dict(),
                "agreement": ONE.agreement(),
                "mesh": {"dp": 1, "mp": 1},
            }
            store._write(3, lambda to, about: formats.write_snapshot(to, copied, ONE, about), {}, details)
        except Killed:
            kills += 1
        finished, left[0] = left[0] > 0, -1
        after = CheckpointStore(folder, keep_n=1)
        newest = after.latest()
        seen.append(newest)
        for step in after.steps():
            assert (folder / f"step_{step}").is_dir(), f"meta.json names step {step}, which is gone"
        with after.hold():
            expected = {"meta.json", "trainer.lock", *(f"step_{step}" for step in after.steps())}
            assert set(os.listdir(folder)) == expected, f"after a kill at call {instant}"
        assert_states_equal(after.restore(ONE, ONE_MESH, strict=True).state, states[newest])
        if finished:
            break
    assert sorted(seen) == seen, "a step that existed is gone"
    assert set(seen) == {2, 3}
    assert kills * stride > 60, "the test did not reach the instants it is about"
    after.save(4, states[1], ONE)
    after.wait()
    assert after.steps() == [4]


def test_old_steps_go_only_after_meta_json_is_replaced(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep_n=1)
    save(store, 1)
    write = meta.write
    monkeypatch.setattr(meta, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
    with pytest.raises(CheckpointError, match="saving failed.*last complete checkpoint is .*step_1"):
        save(store, 2)
    monkeypatch.setattr(meta, "write", write)
    assert store.restore(CONFIG, MESH, strict=True).step == 1


def test_a_full_disk_surfaces_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    add, calls = npz.NpzWriter.add, []

    def full(*arguments):
        calls.append(1)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(*arguments)

    monkeypatch.setattr(npz.NpzWriter, "add", full)
    store.save(2, state_of(2), CONFIG)
    with pytest.raises(
        StorageError, match=r"step_2.*No space left.*the last complete checkpoint is .*step_1"
    ) as caught:
        store.wait()
    assert isinstance(caught.value.__cause__, OSError)
    store.wait()  # told once
    assert not os.path.exists(tmp_path / "step_2"), "the half-written step still takes the space"
    monkeypatch.setattr(npz.NpzWriter, "add", add)
    save(store, 3)
    assert store.steps() == [1, 3]


def test_the_next_save_raises_what_the_last_one_met(tmp_path, monkeypatch):
    def denied(*_arguments, **_options):
        raise StorageError("x: cannot write") from PermissionError(errno.EACCES, "Permission denied")

    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(shards, "write_step", denied)
    store.save(1, state_of(1), CONFIG)
    with pytest.raises(StorageError, match="x: cannot write; no checkpoint is complete yet") as caught:
        store.save(2, state_of(2), CONFIG)
    assert isinstance(caught.value.__cause__, PermissionError)


def test_a_save_that_fails_is_logged_when_it_fails(tmp_path, monkeypatch, caplog):
    """The next save, where it is raised, may be hours away."""

    def denied(*_arguments, **_options):
        raise StorageError("x: cannot write")

    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(shards, "write_step", denied)
    store.save(1, state_of(1), CONFIG)
    store._thread.join()
    assert f"saving {tmp_path}/step_1 failed: x: cannot write; what was saved before stays" in caplog.text
    with pytest.raises(StorageError):
        store.wait()


def test_the_only_step_is_not_put_at_risk_by_saving_it_again(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    before = state_of(1)
    with pytest.raises(CheckpointError, match="step_1 is there already, and no other step: .*save into another"):
        store.save(1, state_of(2), CONFIG)
    assert_states_equal(store.restore(CONFIG, MESH, strict=True).state, before)


def test_keyboard_interrupt_passes_through_a_save(tmp_path, monkeypatch):
    def interrupted(_self):
        raise KeyboardInterrupt

    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(CheckpointStore, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(1, state_of(1), CONFIG)


def all_files(tmp_path):
    return [path for path in sorted((tmp_path / "step_2").rglob("*")) if path.is_file()]


def test_a_flipped_byte_in_any_file_leads_to_the_step_before(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    rng = np.random.default_rng(0)
    files = all_files(tmp_path)
    assert len(files) == 2 * 16 + 1
    for path in files:
        content = path.read_bytes()
        flip(path, int(rng.integers(len(content))))
        caplog.clear()
        found = store.restore(CONFIG, MESH)
        assert found.step == 1, path
        assert_states_equal(found.state, state_of(1))
        relative = str(path.relative_to(tmp_path / "step_2"))
        assert "passing over step 2" in caplog.text
        assert relative in caplog.text
        assert "step 1 is used instead" in caplog.text
        with pytest.raises(DamagedError, match=f"{relative}.*without --strict"):
            store.restore(CONFIG, MESH, strict=True)
        with pytest.raises(DamagedError, match=relative):
            store.restore(CONFIG, MESH, 2)
        path.write_bytes(content)
    assert store.restore(CONFIG, MESH).step == 2


def test_a_step_saved_again_after_a_fallback_is_good(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    flip(tmp_path / "step_2" / "shard_0" / "3.npz")
    assert store.restore(CONFIG, MESH).step == 1
    save(store, 2)
    assert store.steps() == [1, 2]
    assert store.restore(CONFIG, MESH, strict=True).step == 2


def test_a_missing_step_folder_leads_to_the_step_before(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    storage.remove_tree(tmp_path / "step_2")
    assert store.restore(CONFIG, MESH).step == 1


def test_damage_without_an_older_step_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    flip(tmp_path / "step_1" / "shard_0" / "3.npz")
    with pytest.raises(DamagedError, match=r"3\.npz.*no older checkpoint"):
        store.restore(CONFIG, MESH)


@pytest.mark.parametrize("content", [b"", b"{", b'{"step": 2}', b"[]"])
def test_a_lost_or_corrupt_meta_json_is_made_good_by_the_manifests(tmp_path, content, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    if content:
        (tmp_path / "meta.json").write_bytes(content)
    else:
        os.remove(tmp_path / "meta.json")
    found = store.restore(CONFIG, MESH)
    assert (found.step, found.aux["train_loader"]["file_idx"]) == (2, 2)
    assert "using the steps that have a manifest: [1, 2]" in caplog.text


def test_resuming_another_run_is_refused_with_the_keys_that_differ(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    other = config_of(2, layers=1, lr=5e-2, weight_decay=0.0)
    with pytest.raises(CheckpointError, match=r"another run: lr.*0\.01.*0\.05.*; weight_decay.*--tune-model"):
        store.restore(other, MESH)
    assert store.restore(other, MESH, agreement={}).step == 1
    same = config_of(2, layers=1, per_replica_batch=8, total_steps=99, name="other", model_dir="elsewhere")
    assert store.restore(same, MESH).step == 1
    data = {**CONFIG.agreement(), "data": "one"}
    save(store, 2, agreement=data)
    with pytest.raises(CheckpointError, match="another run: data.*'one'.*'two'"):
        store.restore(CONFIG, MESH, agreement={**data, "data": "two"})


def test_folders_of_the_2021_library_resume(tmp_path):
    state = state_of(1)
    write_2021(tmp_path / "step_7", CONFIG.model, host(state), 8)
    aux = {"train_loader": {"used": ["x"], "file_idx": 4}}
    (tmp_path / "meta.json").write_text(json.dumps({"step": 7, "checkpoints": [7], "aux": {"7": aux}}))
    store = CheckpointStore(tmp_path)
    found = store.restore(CONFIG, MESH)
    assert_states_equal(found.state, state)
    assert found.aux == aux
    save(store, 8)
    assert store.steps() == [7, 8]
    flip(tmp_path / "step_8" / "shard_0" / "3.npz")
    assert store.restore(CONFIG, MESH).step == 7


def test_find_step(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 3)
    for spelling in (tmp_path, f"{tmp_path}/", f"file://{tmp_path}", tmp_path / "step_3", f"{tmp_path}/step_3/"):
        assert find_step(spelling) == str(tmp_path / "step_3")


def test_space_is_checked_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "free_bytes", lambda _: 10_000_000_000)
    store = CheckpointStore(tmp_path, keep_n=3, keep_best="val")
    store.check_space(2_000_000_000)
    with pytest.raises(StorageError, match=r"10\.00 GB free.*up to 5 checkpoints of 3\.00 GB.*needs 15\.00 GB more"):
        store.check_space(3_000_000_000)
    monkeypatch.setattr(storage, "free_bytes", lambda _: None)
    store.check_space(10**18)


def test_saving_is_logged_with_size_and_time(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save(CheckpointStore(tmp_path), 1)
    assert "step_1 (" in caplog.text
    assert manifest.read(str(tmp_path / "step_1")).details["mesh"] == {"dp": 1, "mp": 2}
