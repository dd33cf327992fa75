"""create_finetune_tfrecords.py: the same output everywhere, nothing lost silently, every flag, clear refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_tools import make, outputs, prose, read_numbers, run_script, tokenizer, tokenizer_path, tokens_of

from mesh_transformer.data.loader import RecordLoader
from mesh_transformer.data.packing import Packed, PackingOptions, pack
from mesh_transformer.data.records import RecordFile
from mesh_transformer.data.spool import Spool

ROOT = Path(__file__).resolve().parent.parent
EOT = "<|endoftext|>"


def texts(folder: Path, count: int, words: int = 60) -> Path:
    """A folder of so many small text files, all different."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"t{number:02}.txt").write_text(f"{number}: " + prose(words + number, number))
    return folder


def run_on_a(folder: Path, *flags: str | int) -> int:
    """The script on a.txt of a folder, into out; its exit code."""
    command = (folder / "a.txt", "set", "--output-dir", folder / "out", "--tokenizer", tokenizer_path(), "--seq", 16)
    return run_script(*command, *flags)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def corpus_of(folder: Path) -> list[int]:
    return [token for path in sorted(folder.iterdir()) for token in [*ids(path.read_text()), tokenizer().eot_id]]


def test_order_preserved_is_the_corpus_cut_in_pieces(tmp_path):
    text = texts(tmp_path / "text", 7)
    made = make(text, tmp_path / "out", "--preserve-data-order")
    corpus = corpus_of(text)
    written = tokens_of(made["path"])
    assert written.shape == (made["records"], 17) and made["path"].name == f"set_{made['records']}.tfrecords"
    assert written.ravel().tolist() == corpus[: written.size]
    assert len(corpus) - written.size == made["dropped_tail_tokens"] < 17
    assert made["tokens"] == written.size and made["corpus_tokens"] == len(corpus) and made["max_id"] == max(corpus)


def test_sidecar_tells_what_is_in_the_file(tmp_path):
    made = make(texts(tmp_path / "text", 5), tmp_path / "out", "--seed", 3)
    assert made["records"] == len(tokens_of(made["path"])) == RecordFile(str(made["path"])).count
    assert made["bytes"] == made["path"].stat().st_size
    expected = {
        "seq": 16,
        "record_tokens": 17,
        "seed": 3,
        "tokenizer_hash": tokenizer().hash,
        "documents": 5,
        "eot_id": 0,
    }
    assert {key: made[key] for key in expected} == expected
    cached = RecordFile(str(made["path"])).offsets.tolist()
    (tmp_path / "out" / f"{made['path'].name}.offsets").unlink()
    assert RecordFile(str(made["path"])).offsets.tolist() == cached


def test_shuffling_moves_documents_and_records_but_keeps_every_token(tmp_path):
    text = texts(tmp_path / "text", 20)
    kept = make(text, tmp_path / "a", "--preserve-data-order")
    shuffled = make(text, tmp_path / "b")
    other = make(text, tmp_path / "c", "--seed", 11)
    first, second, third = (tokens_of(made["path"]) for made in (kept, shuffled, other))
    assert first.tolist() != second.tolist() != third.tolist()
    counts = [np.bincount(tokens.ravel(), minlength=300) for tokens in (first, second)]
    assert np.abs(counts[0] - counts[1]).sum() <= 2 * 17  # but for the different tails
    assert kept["dropped_tail_tokens"] == shuffled["dropped_tail_tokens"]


def test_bytes_do_not_depend_on_directory_order_or_workers(tmp_path, monkeypatch):
    text = texts(tmp_path / "text", 12)
    again = tmp_path / "again"
    again.mkdir()
    for path in sorted(text.iterdir(), reverse=True):
        shutil.copy(path, again)
    made = make(text, tmp_path / "a", "--workers", 1, "--val-fraction", 0.25)
    monkeypatch.setattr("mesh_transformer.data.prepare._WORTH_WORKERS", 0)
    monkeypatch.setattr("mesh_transformer.data.encoding._JOB_CHARS", 200)
    real = os.walk
    monkeypatch.setattr(os, "walk", lambda top, **options: ((a, b, c[::-1]) for a, b, c in real(top, **options)))
    make(again, tmp_path / "b", "--workers", 3, "--val-fraction", 0.25)
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / out).iterdir()} for out in "ab")
    assert first == second and len(first) == 6
    monkeypatch.undo()
    text.joinpath("t00.txt").write_text("something else, of another length")
    assert make(text, tmp_path / "c")["path"].read_bytes() != made["path"].read_bytes()


def test_one_document_and_many_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("mesh_transformer.data.prepare._WORTH_WORKERS", 0)
    (tmp_path / "one.txt").write_text(prose(100, 0))
    single = make(tmp_path / "one.txt", tmp_path / "a", "--workers", 1)
    many = make(tmp_path / "one.txt", tmp_path / "b", "--workers", 8)
    assert single["path"].read_bytes() == many["path"].read_bytes()


def test_written_and_dropped_add_up_over_all_epochs(tmp_path, capsys):
    text = texts(tmp_path / "text", 6)
    (text / "dull.txt").write_text("the " * 400)
    made = make(text, tmp_path / "out", "--n-repack-epochs", 3, "--min-unique-tokens", 5)
    dropped = made["dropped_tail_tokens"] + made["dropped_repetitive_tokens"]
    assert made["tokens"] + dropped == 3 * made["corpus_tokens"] == 3 * len(corpus_of(text))
    assert (
        0 < made["dropped_tail_tokens"]
        and made["dropped_repetitive_tokens"] == 17 * made["dropped_repetitive_records"] > 0
    )
    assert made["records_per_epoch"][0] > 0 and sum(made["records_per_epoch"]) == made["records"]
    printed = capsys.readouterr().out
    assert (
        f"{made['tokens']} written + {dropped} dropped" in printed and f"3 x {made['corpus_tokens']} tokens" in printed
    )
    assert all(len(set(row)) >= 5 for row in tokens_of(made["path"]).tolist())


def test_each_repack_epoch_has_its_own_order(tmp_path):
    made = make(texts(tmp_path / "text", 20), tmp_path / "out", "--n-repack-epochs", 2)
    rows = tokens_of(made["path"]).tolist()
    first, second = rows[: made["records_per_epoch"][0]], rows[made["records_per_epoch"][0] :]
    assert len(first) == len(second) and first != second
    assert sorted(first) != sorted(second)  # cut anew, not only reordered


def test_blocks_bound_the_memory_and_lose_nothing(tmp_path):
    """A block of 4 documents at a time: all tokens still come, each document whole and in one run."""
    rng = np.random.default_rng(0)
    with Spool(str(tmp_path), 1 << 20) as spool:
        documents = [np.r_[1000 + k, rng.integers(1, 9, rng.integers(0, 30))] for k in range(30)]
        for document in documents:
            spool.add(document, prompt=False)
            spool.end_document(0)
        spool.end_document(0)  # an empty one
        spool.finish()
        assert (spool.documents, spool.empty_documents) == (30, 1)
        for preserve in (True, False):
            account = Packed()
            options = PackingOptions(7, preserve_order=preserve, block_documents=4)
            records = [row for row, _ in pack(spool, options, account)]
            assert account.written_tokens + account.dropped_tail_tokens == spool.tokens
            starts = sorted(token for token in np.concatenate(records).tolist() if token >= 1000)
            assert len(starts) >= 30 - 7 and len(set(starts)) == len(starts)
            whole = np.concatenate([np.r_[document, 0] for document in documents])
            assert (np.concatenate(records).tolist() == whole[: 7 * len(records)].tolist()) == preserve


def test_end_of_text_in_the_input_separates_documents(tmp_path):
    (tmp_path / "a.txt").write_text(f"the cat{EOT}{EOT}the mat{EOT}")
    made = make(tmp_path / "a.txt", tmp_path / "out", "--preserve-data-order", seq=1)
    assert (made["documents"], made["empty_documents"]) == (2, 2)
    expected = [*ids("the cat"), 0, *ids("the mat"), 0]
    assert tokens_of(made["path"]).ravel().tolist() == expected[: made["tokens"]]


def test_end_of_text_as_text(tmp_path):
    text = f"the cat{EOT}the mat " + prose(30, 0)
    (tmp_path / "a.txt").write_text(text)
    made = make(tmp_path / "a.txt", tmp_path / "out", "--treat-eot-as-text", "--preserve-data-order", seq=1)
    written = tokens_of(made["path"]).ravel().tolist()
    assert made["documents"] == 1 and 0 not in written[:-1]
    assert tokenizer().decode([token for token in written if token]) in text and EOT in tokenizer().decode(written)


def test_prompts_are_masked(tmp_path):
    rows = [{"q": f"the cat {k} ", "a": f"sat on {k} mats"} for k in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    flags = ("--prompt-key", "q", "--completion-key", "a", "--index", "--preserve-data-order")
    made = make(tmp_path / "a.jsonl", tmp_path / "out", *flags, seq=8)
    tokens, masks = [], []
    for row in rows:
        tokens += [*ids(row["q"]), *ids(row["a"]), 0]
        masks += [0] * len(ids(row["q"])) + [1] * (len(ids(row["a"])) + 1)
    with RecordLoader(str(tmp_path / "out" / "set.train.index"), (made["records"],), 8, 300, epochs=1) as loader:
        batch = next(loader)
    size = made["tokens"]
    assert made["mask"] and batch["obs"][:, 0].tolist() == tokens[:size:9]
    assert batch["target"].tolist() == np.reshape(tokens[:size], (-1, 9))[:, 1:].tolist()
    assert batch["mask"].tolist() == np.reshape(masks[:size], (-1, 9))[:, 1:].tolist()
    shuffled = make(tmp_path / "a.jsonl", tmp_path / "shuffled", *flags[:4], seq=8)
    for _, features in RecordFile(str(shuffled["path"])).records_from(0, 0):
        assert features["mask"][features["text"] == 0].all()  # the end of text is always learned


@pytest.mark.parametrize("by", ["document", "file"])
def test_validation_split_is_apart_and_reproducible(tmp_path, by):
    text = texts(tmp_path / "text", 20)
    flags = ("--val-fraction", 0.2, "--split-by", by, "--index", "--preserve-data-order")
    train = make(text, tmp_path / "out", *flags)
    val = outputs(tmp_path / "out", "set_val")
    assert (train["documents"], val["documents"], train["split"], val["split"]) == (16, 4, "train", "val")
    corpus = [[*ids(path.read_text()), 0] for path in sorted(text.iterdir())]
    held_out = tokens_of(val["path"]).ravel().tolist()
    chosen = [document for document in corpus if set(map(tuple, [document[:8]])) <= windows(held_out, 8)]
    assert [token for document in chosen for token in document][: len(held_out)] == held_out and 3 <= len(chosen) <= 4
    learned = windows(tokens_of(train["path"]).ravel().tolist(), 8)
    assert not any(tuple(document[:8]) in learned for document in chosen)
    for split, facts in (("train", train), ("val", val)):
        with RecordLoader(str(tmp_path / "out" / f"set.{split}.index"), (1,), 16, 300, epochs=1) as loader:
            assert len(read_numbers(loader)) == facts["records"]
    again = make(text, tmp_path / "again", *flags)
    assert again["path"].read_bytes() == train["path"].read_bytes()


def windows(tokens: list[int], size: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}


def test_position_tells_the_tokenizer(tmp_path, caplog):
    from mesh_transformer.data.tokenizer import is_other, train_tokenizer

    make(texts(tmp_path / "text", 5), tmp_path / "out", "--index")
    with RecordLoader(str(tmp_path / "out" / "set.train.index"), (1,), 16, 300) as loader:
        position = loader.position
    assert position["tokenizer_hash"] == tokenizer().hash
    assert not is_other(tokenizer(), position) and not is_other(tokenizer(), {"tokenizer_hash": None})
    assert caplog.text == ""
    assert is_other(train_tokenizer(["another text"], 260, str(tmp_path / "t.json")), position)
    assert "is not the one that the model was trained with" in caplog.text


def test_index_in_another_folder_names_the_file_absolutely(tmp_path, monkeypatch):
    texts(tmp_path / "text", 3)
    monkeypatch.chdir(tmp_path)
    command = ("text", "set", "--output-dir", "out", "--index", "data", "--tokenizer", tokenizer_path(), "--seq", 8)
    assert run_script(*command) == 0
    monkeypatch.chdir("/")
    with RecordLoader(str(tmp_path / "data" / "set.train.index"), (1,), 8, 300, epochs=1) as loader:
        assert read_numbers(loader)


def test_folder_of_code_and_what_is_left_out_is_listed(tmp_path, capsys):
    folder = texts(tmp_path / "text", 1)
    (folder / "sub").mkdir()
    (folder / "sub" / "code.PY").write_text(prose(50, 1))
    (folder / "image.png").write_bytes(b"\x89PNG")
    made = make(folder, tmp_path / "out", "--recursive", "--text-suffix", "py")
    assert made["documents"] == 2
    printed = capsys.readouterr().out
    assert "1 files or folders" in printed and "image.png" in printed
    for number in range(12):
        (folder / f"image{number}.png").write_bytes(b"")
    make(folder, folder, "--verbose")  # its own output does not become input
    assert make(folder, folder)["documents"] == 1
    printed = capsys.readouterr().out
    assert printed.count("  image9.png") == 1 and "and 7 more" in printed


def test_seq_and_tokenizer_from_a_config(tmp_path, capsys):
    from conftest import tiny

    text = texts(tmp_path / "text", 3)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny(seq=32, n_vocab=304, tokenizer=tokenizer_path())))
    assert run_script(text, "set", "--output-dir", tmp_path / "out", "--config", config) == 0
    assert outputs(tmp_path / "out", "set")["seq"] == 32
    config.write_text(json.dumps(tiny(seq=32, n_vocab=64, tokenizer=tokenizer_path())))
    assert run_script(text, "set", "--output-dir", tmp_path / "out", "--config", config) == 2
    assert "has 300 tokens, but the model's n_vocab is 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq", "0"], "--seq 0: expected at least 1"),
        (["--workers", "0"], "--workers 0: expected at least 1"),
        (["--n-repack-epochs", "0"], "--n-repack-epochs 0"),
        (["--val-fraction", "0.9"], "--val-fraction 0.9: expected 0 to 0.5"),
        (["--val-fraction", "0.1"], "none of the 1 documents fell to validation"),
        (["--val-fraction", "0.1", "--split-by", "file"], "1 file is too few"),
        (["--seq", "100000"], "train split: 1 documents .* a record takes 100001 tokens .*give more text"),
        (
            ["--min-unique-tokens", "16"],
            r"train split: .* [1-9]\d* repetitive records left out, and no record to write",
        ),
        (["--min-unique-tokens", "18"], "--min-unique-tokens 18: expected at most 17"),
        (["--prompt-key", "q"], "--prompt-key and --completion-key: expected both or neither"),
        (["--tokenizer", "/no/such.json"], "tokenizer /no/such.json: no such file"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing_behind(tmp_path, capsys, flags, message):
    (tmp_path / "a.txt").write_text("the cat " * 50)
    assert run_on_a(tmp_path, *flags) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert re.search(message, error)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_an_error_of_a_worker_reaches_the_user(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mesh_transformer.data.prepare._WORTH_WORKERS", 0)
    (tmp_path / "a.txt").write_bytes(prose(100, 0).encode() + b"\xff")
    assert run_on_a(tmp_path, "--workers", 2) == 2
    assert "is not UTF-8" in capsys.readouterr().err


def test_locale_and_missing_packages_do_not_matter(tmp_path):
    """A C locale, no UTF-8 mode, and neither transformers nor a network: the command as a user runs it."""
    text = "naïve café 日本語 🦆 " * 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    blocked = tmp_path / "blocked" / "transformers"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('not here')")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON"))},
        "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(tmp_path / "blocked"),
    }  # fmt: skip
    command = [
        sys.executable, str(ROOT / "create_finetune_tfrecords.py"), str(tmp_path / "a.txt"), "set",
        "--output-dir", str(tmp_path / "out"), "--tokenizer", tokenizer_path(), "--seq", "4", "--preserve-data-order",
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = tokens_of(outputs(tmp_path / "out", "set")["path"]).ravel().tolist()
    assert text.startswith(tokenizer().decode(written).removesuffix(EOT)[:-4]) and len(written) > 100
    assert "\r" not in done.stderr and "tokenizing 0.0/0.0 MB  100%" in done.stderr


def memory_run(tmp_path: Path, megabytes: int, limit_kb: int) -> tuple[dict, int]:
    """The script on so much text, its address space limited: the sidecar, and the most memory it held, in kB."""
    line = prose(12, 5).replace("\n", " ") + "\n"
    with (tmp_path / "big.txt").open("w") as file:
        block = line * (1_000_000 // len(line))
        for number in range(megabytes):
            file.write(f"block {number}{EOT if number % 3 == 0 else ' '}{block}")
    # Not resource's ru_maxrss: across exec, that keeps what the parent had.
    program = (
        "import re, sys, create_finetune_tfrecords\n"
        "status = create_finetune_tfrecords.main(sys.argv[1:])\n"
        'print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]); sys.exit(status)'
    )
    command = (
        f"ulimit -v {limit_kb}; exec {sys.executable} -c '{program}' {tmp_path / 'big.txt'} set "
        f"--output-dir {tmp_path / str(megabytes)} --tokenizer {tokenizer_path()} --seq 512 --workers 1"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return outputs(tmp_path / str(megabytes), "set"), int(done.stdout.split()[-1])


def test_memory_does_not_grow_with_the_input(tmp_path):
    """Six more megabytes of text, in documents of 3 MB, take not even four more of memory."""
    _, little = memory_run(tmp_path, 2, 1_500_000)
    made, much = memory_run(tmp_path, 8, 1_500_000)
    assert made["tokens"] + made["dropped_tail_tokens"] == made["corpus_tokens"] > 2_000_000
    assert much - little < 4_000, (little, much)


@pytest.mark.long
def test_memory_stays_bounded_at_full_size(tmp_path):
    made, _ = memory_run(tmp_path, 200, 1_500_000)
    assert made["tokens"] + made["dropped_tail_tokens"] == made["corpus_tokens"] > 50_000_000
