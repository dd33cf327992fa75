"""The commands of docs/weights.md and docs/finetune.md, run as they are written, on a tiny model under GPT-J's names.

The working directory holds tiny things of the names that the pages use; records are 16 tokens long instead of 2048.
"""

import importlib
import json
import re
import runpy
import shlex
import shutil
import sys
import tarfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zstandard
from bucket_tools import free_port, run_server
from checkpoint_tools import without_fsync, write_2021
from conftest import tiny
from weights_tools import ROOT, state_of

from mesh_transformer import load_config, storage
from mesh_transformer.checkpoint import streaming
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.data.tokenizer import train_tokenizer

SHARDS = 8
TINY = {"2048": "16", "--max-tokens 64": "--max-tokens 3"}
MODEL = {
    "d_model": 32, "n_heads": 8, "n_vocab": 320, "tokenizer": "tokenizer.json", "cores_per_replica": SHARDS,
    "gradient_accumulation_steps": 2, "warmup_steps": 1, "anneal_steps": 2, "total_steps": 2,
}  # fmt: skip
TUNED = {"model_dir": "your-finetuned-model", "train_set": "my_data.train.index"}
TUNED |= {"val_set": {"my_data": "my_data.val.index"}, "val_batches": 1}


def commands(page):
    """The shell commands of a page, in order, made tiny."""
    text = (ROOT / "docs" / page).read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    for old, new in TINY.items():
        lines = [line.replace(old, new) for line in lines]
    return [shlex.split(line) for line in lines]


def run(words, monkeypatch):
    """One command, in this process; its exit code."""
    if words[0] == "cp":
        shutil.copy(*words[1:])
        return 0
    assert words[0] == "python", words
    target = words[2] if words[1] == "-m" else str(ROOT / words[1])
    monkeypatch.setattr(sys, "argv", [target, *words[3 if words[1] == "-m" else 2 :]])
    with pytest.raises(SystemExit) as end:
        (runpy.run_module if words[1] == "-m" else runpy.run_path)(target, run_name="__main__")
    return end.value.code or 0


def pack(step, path):
    """A published archive."""
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
        with tarfile.open(fileobj=packed, mode="w|") as tar:
            tar.add(step, step.name)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with what the pages begin with, as the working directory."""
    monkeypatch.chdir(tmp_path)
    without_fsync(monkeypatch)
    texts = [f"Once upon a time there were {n} sheep, and the sea. " * 8 for n in range(40)]
    (tmp_path / "my_texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "my_texts" / f"{number}.txt").write_text(text)
    train_tokenizer(texts, 300, "tokenizer.json")
    (tmp_path / "configs").mkdir()
    Path("configs/6B_roto_256.json").write_text(json.dumps(tiny(**MODEL)))
    Path("configs/example_config.json").write_text(json.dumps(tiny(**MODEL, **TUNED)))
    model = load_config("configs/6B_roto_256.json").model
    state = state_of(model, "fresh")
    write_2021("full/step_383500", model, state, SHARDS)
    pack(Path("full/step_383500"), tmp_path / "step_383500.tar.zstd")
    write_2021("slim/step_383500", model, state._replace(opt_state=None), SHARDS, ml_dtypes.bfloat16)
    pack(Path("slim/step_383500"), tmp_path / "step_383500_slim.tar.zstd")
    shutil.rmtree("slim")
    return tmp_path


def make_records():
    """What docs/weights.md takes for granted, since docs/finetune.md makes it."""
    import create_finetune_tfrecords

    arguments = ["my_texts", "my_data", "--output-dir", "data", "--seq", "16", "--tokenizer", "tokenizer.json"]
    assert create_finetune_tfrecords.main([*arguments, "--val-fraction", "0.1", "--index"]) in (0, None)


def values(path):
    with streaming.open_weights(path) as weights:
        return {tensor.leaf.label: tensor.value for tensor in weights.tensors(optimizer=False)}, weights


@pytest.mark.slow
def test_every_command_of_weights_md(workplace, monkeypatch):
    make_records()
    for words in commands("weights.md"):
        if words[1] != "benchmarks/rehearsal.py":
            assert run(words, monkeypatch) == 0, words
    before, slim = values("gptj")
    full = values("gptj_full")[1]
    assert (slim.step, slim.shards, slim.full, full.full) == (383500, SHARDS, False, True)
    # Every form that came of the same archive holds the same values, but for the embedding's bias on its way back.
    for path in ("gptj_bf16", "gptj_1", "gptj_f32", "gptj_again"):
        after, weights = values(path)
        assert weights.shards == (1 if path == "gptj_1" else SHARDS), path
        for label, value in before.items():
            if path != "gptj_again" or "embedding_shard/~/linear" not in label:
                np.testing.assert_array_equal(after[label].astype(np.float32), value.astype(np.float32), label)
    assert values("your-finetuned-model_slim")[1].step == CheckpointStore("your-finetuned-model").latest() == 2
    assert values("slim/f16")[1].step == 2
    page = (ROOT / "docs" / "weights.md").read_text()
    exec(compile(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], "docs/weights.md", "exec"), {})
    assert values("gptj_2")[1].shards == 2


@pytest.mark.slow
def test_every_command_of_finetune_md(workplace, monkeypatch):
    pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage (pip install mesh-transformer[gcs])")
    from google.cloud import storage as cloud

    port = free_port()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    bucket = {"bucket": "your-bucket", "data_dir": "gs://your-bucket/data"}
    with run_server(port):
        cloud.Client.create_anonymous_client().create_bucket("your-bucket")
        archive = "step_383500_slim.tar.zstd"
        storage.write_atomic(f"gs://your-bucket/{archive}", Path(archive).read_bytes())
        config = json.dumps(tiny(**MODEL, **TUNED, **bucket)).encode()
        storage.write_atomic("gs://your-bucket/my_config.json", config)
        for words in commands("finetune.md"):
            assert run(words, monkeypatch) == 0, words
        hf = storage.listdir("gs://your-bucket/hf")
        there, weights = values("gs://your-bucket/your-finetuned-model_slim")
    assert hf == storage.listdir("hf/my_model") and "model.safetensors" in hf and "tokenizer.json" in hf
    # On the disk and in the bucket: the same data, seed and model, so the same weights.
    here, _ = values("your-finetuned-model_slim")
    assert weights.step == 2 and here.keys() == there.keys()
    assert all(np.array_equal(here[label], there[label]) for label in here)
    start, _ = values("gptj")
    assert not all(np.array_equal(here[label], start[label]) for label in here)


def test_names_of_migrating_md_exist():
    page = (ROOT / "docs" / "migrating.md").read_text()
    names = re.findall(r"`(mesh_transformer(?:\.\w+)+)`", page)
    assert len(names) > 20
    for name in names:
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            break
        for part in parts[cut:]:
            found = getattr(found, part)


def test_keys_of_migrating_md_exist():
    from mesh_transformer.config import SPECS

    page = (ROOT / "docs" / "migrating.md").read_text()
    table = page.split("## Config keys")[1].split("## ")[0]
    keys = [key for line in table.splitlines() if line.startswith("|") for key in re.findall(r"`(\w+)`", line)]
    assert len(keys) > 15 and not set(keys) - set(SPECS)
