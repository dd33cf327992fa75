"""create_finetune_tfrecords.py puts a data set where it belongs: as a whole, and only where that is possible."""

import contextlib
import shutil

import numpy as np
import pytest
from data_tools import WORDS, run_script, tokenizer_path

from mesh_transformer import storage
from mesh_transformer.errors import StorageError


def documents(folder, seed, count=20):
    """Text files of the same words in an order of their own, so that they make equally many records."""
    folder.mkdir()
    for number in range(count):
        words = np.random.default_rng(count * seed + number).permutation(WORDS * 3)
        (folder / f"t{number:02}.txt").write_text(" ".join(["the", *words]))
    return folder


class Killed(BaseException):
    """Stands for kill -9: nothing is cleaned up after it."""


@pytest.mark.parametrize("error", [Killed, StorageError])
def test_splits_of_two_runs_never_lie_together(tmp_path, monkeypatch, error):
    """Publishing is cut short at every change of a file in turn, over an earlier set of the same names."""
    old, new = (documents(tmp_path / name, seed) for seed, name in enumerate(("old", "new")))
    flags = ("--val-fraction", 0.2, "--index", "--tokenizer", tokenizer_path(), "--seq", 16)
    assert run_script(old, "set", "--output-dir", tmp_path / "base", *flags) == 0
    assert run_script(new, "set", "--output-dir", tmp_path / "other", *flags) == 0
    names = sorted(path.name for path in (tmp_path / "base").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "other").iterdir()), "equal names are the hard case"
    left = [0]

    def counted(original):
        def call(*arguments):
            if left[0] == 0 and error is not Killed:
                left[0] = -1
                raise error("the disk is gone")
            if left[0] == 0:
                raise error
            left[0] -= 1
            return original(*arguments)

        return call

    for name in ("remove", "write_atomic", "rename"):
        monkeypatch.setattr(storage, name, counted(getattr(storage, name)))
    content = {name: {(tmp_path / folder / name).read_bytes() for folder in ("base", "other")} for name in names}
    for instant in range(100):
        out = tmp_path / f"out{instant}"
        shutil.copytree(tmp_path / "base", out)
        left[0] = instant
        with contextlib.suppress(Killed):
            if run_script(new, "set", "--output-dir", out, *flags) == 0:
                break
        left[0] = -1
        found = {path.name: path.read_bytes() for path in out.iterdir() if path.name in names}
        if set(found) >= {name for name in names if not name.endswith((".json", ".offsets"))}:
            runs = [folder for folder in ("base", "other") if found == files_of(tmp_path / folder)]
            assert len(runs) == 1, f"after {instant} changes the files are of two runs"
        assert all(found[name] in content[name] for name in found), "nothing is half written"
    assert instant > 8
    assert files_of(out) == files_of(tmp_path / "other")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mesh_transformer.data.prepare._fill", lambda *_: pytest.fail("text was read"))
    (tmp_path / "file").write_text("x")
    text = documents(tmp_path / "text", 0)
    flags = ("--tokenizer", tokenizer_path(), "--seq", 8)
    for more in (("--output-dir", "s3://bucket/x"), ("--output-dir", tmp_path, "--index", tmp_path / "file")):
        assert run_script(text, "set", *more, *flags) == 2
        said = capsys.readouterr().err
        assert "only local and gs:// paths can be written" in said or "a file stands where a folder is needed" in said
