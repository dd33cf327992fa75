"""docs/huggingface.md, run: every command and every Python block of the page, in order, at the size of a toy."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny
from data_tools import tokenizer_path, write_records
from hf_tools import hf_tensors, read_folder, write_step

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/huggingface.md").read_text(encoding="utf-8")
SIZES = {"n_vocab": 320, "seq": 32}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def run(words, monkeypatch):
    """One `python SCRIPT ...` line, in this process; devices are those that the tests have."""
    assert words[0] == "python"
    words = [word for word in words[1:] if word != "--platform"]
    words = [word for i, word in enumerate(words) if word != "cpu" and "--devices" not in (word, words[i - 1])]
    monkeypatch.setattr(sys, "argv", words)
    done = runpy.run_path(str(ROOT / words[0]), run_name="a script")["main"](words[1:])
    assert done == 0, words


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The folder that the page's paths are relative to, with small models under the names that it uses."""
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    trees = {}
    for name, step, shards in (("6B_roto_256", "step_383500_slim", 8), ("quickstart", "runs/quickstart/step_400", 4)):
        raw = tiny(cores_per_replica=shards, tokenizer=tokenizer_path(), **SIZES)
        Path(f"configs/{name}.json").write_text(json.dumps(raw))
        trees[step] = write_step(tmp_path / step, shards, step=400, **SIZES)[1]
    Path("runs/quickstart/meta.json").write_text(json.dumps({"step": 400, "checkpoints": [400], "aux": {}}))
    return trees


def test_every_command_of_the_page(toy, tmp_path, monkeypatch, capsys):
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert [words[1] for words in commands] == [
        "to_hf_weights.py", "to_hf_weights.py", "scripts/from_hf.py", "device_sample.py", "device_train.py"
    ]  # fmt: skip
    for words in commands[:4]:
        run(words, monkeypatch)
    assert "import " in capsys.readouterr().out
    assert {array.dtype for array in read_folder("gpt-j-6b").values()} == {np.dtype(np.float16)}
    for name, value in hf_tensors(toy["runs/quickstart/step_400"]).items():
        np.testing.assert_array_equal(read_folder("hf/quickstart")[name], value, err_msg=name)
    for block in blocks("python"):
        if "transformers" in block:
            pytest.importorskip("transformers", reason="transformers is not installed (requirements-peers.txt)")
        names: dict = {}
        exec(block, names)
        if "model" in names:
            assert len(names["tokenizer"]) == names["model"].config.vocab_size == 320
    assert len(list(Path("hf/quickstart_16").glob("model*"))) == 1


@pytest.mark.slow
def test_training_from_the_page(toy, tmp_path, monkeypatch):
    """The last command, after the user has put data into the config."""
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    for words in (*commands[1:3],):
        run(words, monkeypatch)
    records = write_records(tmp_path / "mine.tfrecords", np.random.default_rng(0).integers(0, 300, (8, 33)))
    Path("mine.index").write_text(f"{records}\n")
    path = Path("runs/from_hf/config.json")
    raw = json.loads(path.read_text()) | {"train_set": str(tmp_path / "mine.index"), "gradient_accumulation_steps": 1}
    path.write_text(json.dumps(raw))
    run(commands[4], monkeypatch)
    assert json.loads(Path(raw["model_dir"], "meta.json").read_text())["checkpoints"]
