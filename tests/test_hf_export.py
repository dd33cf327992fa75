"""to_hf_weights.py: which tensors, of which values, in which files; every check here needs no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_tools import config_of
from data_tools import tokenizer, tokenizer_path
from hf_tools import EMBEDDING, hf_tensors, read_file, read_folder, write_step

import to_hf_weights
from mesh_transformer.checkpoint.huggingface import convert, parse_size
from mesh_transformer.errors import CheckpointError, ConfigError, DataError, StorageError

ROOT = Path(__file__).resolve().parent.parent


def shard_files(folder):
    return sorted(Path(folder).glob("shard_*/*.npz"))


def rewrite(folder, shard, change):
    """Change arrays of a shard in place: `change(number, array)` gives the new one; numbers count the leaves."""
    number = 0
    for file in range(16):
        path = Path(folder) / f"shard_{shard}/{file}.npz"
        with np.load(path) as npz:
            arrays = [npz[f"arr_{i}"] for i in range(len(npz.files))]
        np.savez(path, *[change(number + i, array) for i, array in enumerate(arrays)])
        number += len(arrays)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("full", [False, True])
def test_every_tensor_by_hand(tmp_path, shards, full):
    """R06: biases and norms are not zero, and every shard beyond the first has norms that nobody reads."""
    config, tree = write_step(tmp_path / "step_7", shards, full=full, layers=3)
    out = convert(tmp_path / "step_7", config, tmp_path / "out", dtype="fp32")
    found, wanted = read_folder(tmp_path / "out"), hf_tensors(tree)
    assert found.keys() == wanted.keys()
    assert (out.tensors, out.bytes) == (len(wanted), sum(array.nbytes for array in wanted.values()))
    for name, value in wanted.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_norms_are_those_of_shard_0(tmp_path):
    config, tree = write_step(tmp_path / "step_7", 2)
    offsets = {2 + 10 * i + k for i in range(2) for k in (8, 9)} | {24, 25}  # of the leaves, in the published order
    rewrite(tmp_path / "step_7", 1, lambda number, array: array + 1 if number in offsets else array)
    convert(tmp_path / "step_7", config, tmp_path / "out", dtype="fp32")
    for name, value in hf_tensors(tree).items():
        np.testing.assert_array_equal(read_folder(tmp_path / "out")[name], value, err_msg=name)


def test_sums_of_16_bit_shards_are_rounded_once(tmp_path):
    """X02: eight different bf16 copies; their exact sum, added to the embedding, then one cast."""
    config, tree = write_step(tmp_path / "step_7", 8, dtype=ml_dtypes.bfloat16)
    random = np.random.default_rng(3)
    embedding, out_bias = random.normal(size=(2, 8, 32)).astype(ml_dtypes.bfloat16)
    leaves = {0: embedding, 2 + 6: out_bias}  # the embedding's bias; layer 0's linear_5's
    for shard in range(8):
        rewrite(tmp_path / "step_7", shard, lambda n, array, m=shard: leaves[n][m] if n in leaves else array)
    convert(tmp_path / "step_7", config, tmp_path / "out", dtype="bf16")
    found = read_folder(tmp_path / "out")
    exact = out_bias.astype(np.float64).sum(0)
    wanted = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    naive = out_bias[0]
    for m in range(1, 8):
        naive = naive + out_bias[m]
    assert (naive != wanted).any(), "the test would not see sums in 16 bits"
    np.testing.assert_array_equal(found["transformer.h.0.mlp.fc_out.bias"], wanted)
    rows = tree[EMBEDDING]["w"].astype(ml_dtypes.bfloat16).astype(np.float32)
    wanted = (rows + embedding.astype(np.float64).sum(0).astype(np.float32)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found["transformer.wte.weight"], wanted)


def test_float32_stays_bit_for_bit_and_the_source_type_is_recorded(tmp_path):
    """X06. Negative zeros too, where there is no embedding bias to add."""
    config, tree = write_step(tmp_path / "step_7", bias=False)
    rewrite(tmp_path / "step_7", 0, lambda n, array: np.where(np.arange(array.size).reshape(array.shape) % 5, array,
                                                              np.float32(-0.0)) if n == 1 else array)  # fmt: skip
    found = convert(tmp_path / "step_7", config, tmp_path / "f32", dtype="fp32")
    assert (found.dtype, found.source_dtype) == ("float32", "float32")
    tree[EMBEDDING]["w"].reshape(-1)[::5] = -0.0
    for name, value in hf_tensors(tree).items():
        if name != "transformer.wte.weight":  # made by hand with an addition
            assert read_folder(tmp_path / "f32")[name].tobytes() == np.ascontiguousarray(value).tobytes(), name
    assert read_folder(tmp_path / "f32")["transformer.wte.weight"].tobytes() == tree[EMBEDDING]["w"].tobytes()
    write_step(tmp_path / "step_8", dtype=np.float16)
    found = convert(tmp_path / "step_8", config, tmp_path / "padded", dtype="fp32")
    assert (found.dtype, found.source_dtype) == ("float32", "float16")
    metadata = read_file(tmp_path / "padded/model.safetensors")[1]
    assert metadata == {"format": "pt", "dtype": "float32", "source_dtype": "float16", "source_step": "8"}
    assert json.loads((tmp_path / "padded/config.json").read_text())["source_dtype"] == "float16"


def test_fp16_is_the_default_and_is_checked(tmp_path):
    config, tree = write_step(tmp_path / "step_7", 2)
    assert to_hf_weights.main(["--input-ckpt", f"{tmp_path}/step_7", "--config", write_json(tmp_path, config),
                               "--output-path", f"{tmp_path}/out", "--cpu", "--debug"]) == 0  # fmt: skip
    found = read_folder(tmp_path / "out")
    for name, value in hf_tensors(tree).items():
        np.testing.assert_array_equal(found[name], value.astype(np.float16), err_msg=name)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float16"
    rewrite(tmp_path / "step_7", 1, lambda n, array: array * 1e6 if n == 2 + 4 else array)  # layer 0's w1's bias
    with pytest.raises(CheckpointError, match=r"h\.0\.mlp.*float16 ends at 65504.*use bf16"):
        convert(tmp_path / "step_7", config, tmp_path / "too_large")
    assert not os.listdir(tmp_path / "too_large"), "a failed export leaves no weights behind"
    convert(tmp_path / "step_7", config, tmp_path / "too_large", dtype="bf16")


def write_json(folder, config):
    path = Path(folder) / "config of it.json"
    path.write_text(json.dumps(config.to_dict()))
    return str(path)


def test_called_from_python_with_spaces_and_missing_parents(tmp_path):
    """X07: any kind of config, paths of any kind; nothing depends on the script or the working directory."""
    folder = tmp_path / "a folder"
    config, tree = write_step(folder / "my runs/step_7")
    for number, form in enumerate((config, config.to_dict(), write_json(folder, config))):
        out = folder / f"new {number}" / "and deeper" / "model"
        assert to_hf_weights.convert(folder / "my runs/step_7", form, out, dtype="fp32").path == str(out)
        np.testing.assert_array_equal(read_folder(out)["lm_head.weight"], hf_tensors(tree)["lm_head.weight"])


def test_files_by_size_with_an_index(tmp_path):
    """X05: 30 MB at 10 MB are 3 files, and the index names the file of every tensor."""
    sizes = {"d_model": 128, "n_heads": 8, "layers": 36, "n_vocab": 1000, "pe_rotary_dims": 16}
    config, tree = write_step(tmp_path / "step_7", **sizes)
    found = convert(tmp_path / "step_7", config, tmp_path / "out", dtype="fp32", max_shard_size="10MB")
    assert found.bytes == pytest.approx(30e6, rel=0.03)
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert list(found.files) == names
    assert all((tmp_path / "out" / name).stat().st_size <= 10e6 + 10_000 for name in names)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.bytes and index["metadata"]["source_dtype"] == "float32"
    placed = {tensor: name for name in names for tensor in read_file(tmp_path / "out" / name)[0]}
    assert index["weight_map"] == placed and placed.keys() == hf_tensors(tree).keys()


def test_memory_is_two_of_the_largest_tensors(tmp_path):
    """Traced by Python: all arrays of numpy count. The model has 11 times its largest tensor."""
    sizes = {"d_model": 256, "n_heads": 4, "layers": 8, "n_vocab": 8192, "pe_rotary_dims": 16}
    config, _ = write_step(tmp_path / "step_7", 2, **sizes)
    largest, total = 8192 * 256 * 4, 0
    tracemalloc.start()
    try:
        total = convert(tmp_path / "step_7", config, tmp_path / "out", dtype="fp32").bytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > 5 * largest
    assert peak < 2 * largest + 20e6, f"{peak / 1e6:.1f} MB"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pe": "t5"}, "pe is 't5', and GPT-J knows positions by rotary alone"),
        ({"pe": "fixed"}, "pe is 'fixed'"),
        *(({"norm": norm}, f"norm is '{norm}'") for norm in
          ("layernorm-nobias", "layernorm-desync", "rmsnorm", "rmsnorm-bias", "scalenorm", "scalenorm-bias")),
        ({"version": 2}, "version is 2"),
    ],
)  # fmt: skip
def test_what_gptj_cannot_express_is_refused_before_anything_is_read(tmp_path, changes, reason):
    """The checkpoint does not even exist."""
    with pytest.raises(CheckpointError, match=reason):
        convert(tmp_path / "nowhere", config_of(1, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_both_reasons_are_given(tmp_path):
    with pytest.raises(CheckpointError, match=r"pe is 't5'.*norm is 'rmsnorm'"):
        convert(tmp_path / "nowhere", config_of(1, pe="t5", norm="rmsnorm"), tmp_path / "out")


def test_wrong_inputs_say_what_was_expected(tmp_path):
    """X09."""
    config, _ = write_step(tmp_path / "runs/step_7")
    convert(tmp_path / "runs/step_7", config, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="expected a folder with shard_0"):
        convert(tmp_path / "missing", config, tmp_path / "out")
    for wrong in ("hf", "runs/step_7/shard_0"):
        with pytest.raises(CheckpointError, match="expected shard_0, shard_1"):
            convert(tmp_path / wrong, config, tmp_path / "out")
    with pytest.raises((CheckpointError, StorageError), match=r"shard_0/0\.npz"):
        convert(tmp_path / "runs/step_7/shard_0/0.npz", config, tmp_path / "out")
    with pytest.raises(CheckpointError, match="n_vocab 128 in the config, 64 in the checkpoint"):
        convert(tmp_path / "runs/step_7", config_of(n_vocab=128), tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds a model already"):
        convert(tmp_path / "runs/step_7", config, tmp_path / "hf")
    with pytest.raises(ConfigError, match="max_shard_size 'much'"):
        convert(tmp_path / "runs/step_7", config, tmp_path / "out", max_shard_size="much")
    with pytest.raises(ConfigError, match="fp8"):
        convert(tmp_path / "runs/step_7", config, tmp_path / "out", dtype="fp8")
    os.truncate(shard_files(tmp_path / "runs/step_7")[3], 100)
    with pytest.raises(CheckpointError, match=r"shard_0/\d+\.npz"):
        convert(tmp_path / "runs/step_7", config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_room(tmp_path, monkeypatch):
    config, _ = write_step(tmp_path / "step_7")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(StorageError, match="0.00 GB free"):
        convert(tmp_path / "step_7", config, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "count"), [("5GB", 5 * 10**9), ("200MiB", 200 * 2**20), ("1.5 kB", 1500), ("7", 7), (7, 7), ("3b", 3)]
)
def test_sizes(text, count):
    assert parse_size(text) == count


def test_config_json(tmp_path):
    """X10: what other converters read is all there."""
    config, _ = write_step(tmp_path / "step_7", tokenizer=tokenizer_path(), n_vocab=320, layers=3)
    convert(tmp_path / "step_7", config, tmp_path / "out", dtype="bf16")
    found = json.loads((tmp_path / "out/config.json").read_text())
    wanted = {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "vocab_size": 320, "n_positions": 16, "n_embd": 32,
        "n_layer": 3, "n_head": 8, "rotary_dim": 4, "n_inner": None, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "bos_token_id": tokenizer().eot_id,
        "eos_token_id": tokenizer().eot_id, "torch_dtype": "bfloat16", "dtype": "bfloat16",
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    ends = {"bos_token_id": tokenizer().eot_id, "eos_token_id": tokenizer().eot_id}
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == ends


def test_without_a_tokenizer_the_ends_are_not_invented(tmp_path, caplog):
    config, _ = write_step(tmp_path / "step_7", tokenizer=f"{tmp_path}/none.json")
    convert(tmp_path / "step_7", config, tmp_path / "out")
    assert "no tokenizer files are written" in caplog.text
    assert not list((tmp_path / "out").glob("tokenizer*"))
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] is None
    with pytest.raises(DataError, match="no such file"):
        convert(tmp_path / "step_7", config, tmp_path / "out2", tokenizer=f"{tmp_path}/none.json")
    with pytest.raises(DataError, match="has 300 tokens, but the model's n_vocab is 64"):
        convert(tmp_path / "step_7", config, tmp_path / "out2", tokenizer=tokenizer_path())


def test_trimmed_vocabulary(tmp_path):
    """X03: the rows that the tokenizer has no token for go, everywhere."""
    config, tree = write_step(tmp_path / "step_7", 4, n_vocab=320)
    found = convert(tmp_path / "step_7", config, tmp_path / "out", "fp32", trim_vocab=True, tokenizer=tokenizer_path())
    assert found.n_vocab == json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 300
    cut = {"transformer.wte.weight", "lm_head.weight", "lm_head.bias"}
    for name, value in hf_tensors(tree).items():
        np.testing.assert_array_equal(read_folder(tmp_path / "out")[name], value[:300] if name in cut else value)


def test_no_torch_is_needed(tmp_path):
    config, tree = write_step(tmp_path / "step_7", 2, tokenizer=tokenizer_path(), n_vocab=320)
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'safetensors', 'transformers', 'jax']))\n"
        "import to_hf_weights\n"
        "sys.exit(to_hf_weights.main())\n"
    )
    command = [sys.executable, "-c", program, "--input-ckpt", f"{tmp_path}/step_7", "--config",
               write_json(tmp_path, config), "--output-path", f"{tmp_path}/out"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(hf_tensors(tree))} tensors" in done.stdout and "float16 in 1 file" in done.stdout
