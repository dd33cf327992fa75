"""scripts/from_hf.py: the way back, what it refuses, and training from what it wrote."""

from __future__ import annotations

import json
import pickle
import shutil

import ml_dtypes
import numpy as np
import pytest
from checkpoint_tools import config_of
from conftest import batch_of, network_of
from data_tools import prose, tokenizer, tokenizer_path
from hf_tools import EMBEDDING, hf_tensors, random_tree, read_folder, write_file, write_step

from mesh_transformer.checkpoint.huggingface import convert
from mesh_transformer.checkpoint.huggingface_import import from_hf
from mesh_transformer.checkpoint.streaming import open_weights
from mesh_transformer.config import load_config
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.errors import CheckpointError, ConfigError
from scripts import from_hf as script


def values_of(path):
    with open_weights(path) as weights:
        return {tensor.leaf.label: tensor for tensor in weights.tensors()}


@pytest.fixture
def model(tmp_path):
    """A folder with an exported model, f32, its embedding bias zero, and the config and step that it came from."""
    config, tree = write_step(tmp_path / "step_7", 2, bias=False, n_vocab=320, tokenizer=tokenizer_path())
    convert(tmp_path / "step_7", config, tmp_path / "hf", dtype="fp32")
    return tmp_path / "hf", config, tree


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("shards", "back"), [(1, 4), (4, 1), (2, 2)])
def test_there_and_back_is_the_same(tmp_path, dtype, shards, back):
    """X08: bit for bit, types included, where there is no embedding bias; with other numbers of shards."""
    config, _ = write_step(tmp_path / "step_7", shards, dtype=dtype, bias=False)
    name = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[np.dtype(dtype).name]
    convert(tmp_path / "step_7", config, tmp_path / "hf", dtype=name, max_shard_size="20KB")
    done = from_hf(tmp_path / "hf", tmp_path / "back", back)
    assert done.path == f"{tmp_path}/back/step_7"
    before, after = values_of(tmp_path / "step_7"), values_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for label, tensor in before.items():
        assert (after[label].dtype, after[label].value.shape) == (dtype, tensor.value.shape), label
        np.testing.assert_array_equal(after[label].value.astype(np.float32), tensor.value.astype(np.float32), label)


def test_there_and_back_merges_the_embedding_bias(tmp_path):
    config, tree = write_step(tmp_path / "step_7")
    convert(tmp_path / "step_7", config, tmp_path / "hf", dtype="fp32")
    from_hf(tmp_path / "hf", tmp_path / "back")
    before, after = values_of(tmp_path / "step_7"), values_of(tmp_path / "back")
    merged = {f"params/{EMBEDDING}/~/linear/w": tree[EMBEDDING]["w"] + tree[EMBEDDING]["b"][None, :],
              f"params/{EMBEDDING}/~/linear/b": np.zeros(32)}  # fmt: skip
    for label, tensor in before.items():
        np.testing.assert_array_equal(after[label].value, merged.get(label, tensor.value), label)


def test_config_and_tokenizer_come_along(tmp_path, model):
    folder, config, _ = model
    done = from_hf(folder, tmp_path / "back", 4, dtype="bf16")
    found = load_config(done.config)
    for key in ("layers", "d_model", "n_heads", "n_vocab", "seq", "pe_rotary_dims", "norm", "pe"):
        assert getattr(found.model, key) == getattr(config.model, key)
    assert found.mesh.cores_per_replica == 4
    assert found.run.directory != str(tmp_path / "back"), "a run of this config must not land in its own source"
    assert found.data.tokenizer == done.tokenizer == f"{tmp_path}/back/tokenizer.json"
    text = prose(50, 3)
    assert load_tokenizer(done.tokenizer).encode(text) == tokenizer().encode(text)
    # S14: without fillers its size tells sampling which rows of the vocabulary never to draw.
    assert load_tokenizer(done.tokenizer).vocab_size == 300
    assert load_tokenizer(done.tokenizer).hash == tokenizer().hash, "training's check of the tokenizer would warn"
    assert {tensor.dtype.name for tensor in values_of(tmp_path / "back").values()} == {"bfloat16"}


@pytest.mark.parametrize("mp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_from_it(tmp_path, model, mp):
    """X08: at mp 1 and 2, from 2 and from 1 shards: the first loss is that of the source, and it falls."""
    folder, _, tree = model
    done = from_hf(folder, tmp_path / "back", 3 - mp)
    net = network_of(1, mp, n_vocab=320)
    net.load_ckpt(done.path)
    batch = batch_of(1, 1, 16, vocab=320)
    losses = [float(net.train(batch)["cross_entropy"]) for _ in range(6)]
    source = network_of(1, mp, n_vocab=320)
    source.load_ckpt(tmp_path / "step_7")
    np.testing.assert_allclose(losses[0], float(source.train(batch)["cross_entropy"]), rtol=1e-6)
    assert losses[-1] < losses[0] - 0.5


def test_more_rows_so_that_shards_divide_them(tmp_path, model):
    """After --trim-vocab a vocabulary can hardly be cut; rows that are never chosen make it fit again."""
    folder, config, tree = model
    convert(tmp_path / "step_7", config, tmp_path / "cut", "fp32", trim_vocab=True, tokenizer=tokenizer_path())
    with pytest.raises((CheckpointError, ConfigError), match=r"(?s)300.*8"):
        from_hf(tmp_path / "cut", tmp_path / "back", 8)
    assert not (tmp_path / "back").exists()
    from_hf(tmp_path / "cut", tmp_path / "back", 8, n_vocab=304)
    net = network_of(1, 1, n_vocab=304)
    net.load_ckpt(tmp_path / "back/step_7", optimizer=False)
    tokens = batch_of(2, 16, vocab=300)["obs"]
    logits = np.asarray(net.logits(tokens))
    assert (logits[..., 300:] == -1e4).all()
    whole = network_of(1, 1, n_vocab=320)
    whole.load_ckpt(tmp_path / "step_7", optimizer=False)
    np.testing.assert_allclose(logits[..., :300], np.asarray(whole.logits(tokens))[..., :300], atol=1e-5)
    with pytest.raises(ConfigError, match="rows are only added"):
        from_hf(folder, tmp_path / "other", n_vocab=300)


def test_the_script(tmp_path, model, capsys):
    folder, _, _ = model
    assert script.main([str(folder), f"{tmp_path}/back", "--shards", "2", "--dtype", "f16"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/back/step_7: 2 shards; its config is {tmp_path}/back/config.json\n"
    assert script.main([str(folder), f"{tmp_path}/back"]) == 2
    assert "already there" in capsys.readouterr().err
    assert script.main([f"{tmp_path}/step_7", f"{tmp_path}/other"]) == 2
    assert "not a Hugging Face model: it has no config.json" in capsys.readouterr().err


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', expected 'gptj'"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ({"n_inner": 100}, "n_inner is 100"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"rotary_dim": None, "n_layer": "3"}, "n_layer is '3', expected an integer; rotary_dim is None"),
        ({"n_embd": 64}, r"transformer\.\S+ is \[.*\], expected \[.*64"),
        ({"n_layer": 3}, r"transformer\.h\.2\.\S+ is missing"),
        ({"n_layer": 1}, r"transformer\.h\.1\.\S+ is not a tensor of GPT-J"),
        ({"n_head": 5}, "divisible"),
    ],
)
def test_what_is_no_gptj_of_ours_is_refused(tmp_path, model, changes, reason):
    folder, _, _ = model
    edit_config(folder, **changes)
    with pytest.raises((CheckpointError, ConfigError), match=reason):
        from_hf(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_old_buffers_are_no_weights(tmp_path, model):
    """Files of older releases hold the causal mask; other tensors would be lost without notice, so they are refused."""
    folder, _, _ = model
    tensors = read_folder(folder)
    mask = {f"transformer.h.{i}.attn.bias": np.ones((1, 1, 16, 16), np.uint8) for i in range(2)}
    mask |= {f"transformer.h.{i}.attn.masked_bias": np.float32(-1e9).reshape(()) for i in range(2)}
    write_file(folder / "model.safetensors", tensors | mask)
    from_hf(folder, tmp_path / "back")
    assert values_of(tmp_path / "back").keys() == values_of(tmp_path / "step_7").keys()
    write_file(folder / "model.safetensors", tensors | {"transformer.h.0.attn.extra": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match="attn.extra is not a tensor of GPT-J"):
        from_hf(folder, tmp_path / "other")
    write_file(folder / "model.safetensors", tensors | {"lm_head.bias": np.ones(320, np.uint8)})
    with pytest.raises(CheckpointError, match="lm_head.bias is not of a float type"):
        from_hf(folder, tmp_path / "other")


def test_damaged_files_are_named(tmp_path, model):
    folder, _, _ = model
    whole = (folder / "model.safetensors").read_bytes()
    for content, reason in (
        (whole[:-1], "model.safetensors is truncated"),
        (whole[:100], "truncated|header"),
        (b"", "truncated"),
        (b"\xff" * 200, "not a safetensors file"),
        (whole[:8] + b"[" + whole[9:], "header is corrupt"),
        (whole.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1), "has .* bytes, expected"),
    ):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=reason):
            from_hf(folder, tmp_path / "back")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights that can be read"):
        from_hf(folder, tmp_path / "back")
    index = {"weight_map": {"lm_head.bias": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is not complete: model-00001-of-00002\.safetensors missing"):
        from_hf(folder, tmp_path / "back")
    index["weight_map"]["lm_head.bias"] = "../secret"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        from_hf(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


class Bomb:
    """What a harmful file would hold: unpickling it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


class TestBin:
    """.bin files, which are pickles."""

    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch", reason="torch is not installed (requirements-peers.txt)")

    def write(self, torch, folder, sharded, dtype="float32", old=False):
        tensors = {n: torch.from_numpy(a.copy()).to(getattr(torch, dtype)) for n, a in read_folder(folder).items()}
        tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e9)
        names = sorted(tensors)
        files = {"pytorch_model.bin": names}
        if sharded:
            files = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
            weight_map = {name: file for file, of_file in files.items() for name in of_file}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for file, of_file in files.items():
            torch.save({n: tensors[n] for n in of_file}, folder / file, _use_new_zipfile_serialization=not old)
        (folder / "model.safetensors").unlink()

    @pytest.mark.parametrize(
        ("sharded", "dtype", "old"), [(False, "float32", False), (True, "bfloat16", False), (False, "float16", True)]
    )
    def test_is_read(self, tmp_path, model, torch, sharded, dtype, old):
        folder, _, _ = model
        self.write(torch, folder, sharded, dtype, old)
        from_hf(folder, tmp_path / "back", 2)
        after, wanted = values_of(tmp_path / "back"), values_of(tmp_path / "step_7")
        target = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        for label, tensor in wanted.items():
            assert after[label].dtype == target
            np.testing.assert_array_equal(
                after[label].value.astype(np.float32), tensor.value.astype(target).astype(np.float32)
            )

    @pytest.mark.parametrize("form", ["torch", "pickle"])
    def test_code_in_it_is_never_run(self, tmp_path, model, torch, form):
        folder, _, _ = model
        (folder / "model.safetensors").unlink()
        content = {"lm_head.bias": torch.zeros(3), "bomb": Bomb(tmp_path / "exploded")}
        if form == "torch":
            torch.save(content, folder / "pytorch_model.bin")
        else:
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin was not loaded: it holds more than weights"):
            from_hf(folder, tmp_path / "back")
        assert not (tmp_path / "exploded").exists() and not (tmp_path / "back").exists()
        pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded"))).close()
        assert (tmp_path / "exploded").exists(), "the bomb would go off"

    def test_damage_is_named(self, tmp_path, model, torch):
        folder, _, _ = model
        self.write(torch, folder, False)
        content = (folder / "pytorch_model.bin").read_bytes()
        (folder / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            from_hf(folder, tmp_path / "back")
        torch.save([1, 2], folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="holds a list, expected a state dict"):
            from_hf(folder, tmp_path / "back")

    def test_safetensors_come_first(self, tmp_path, model, torch):
        folder, _, _ = model
        shutil.copy(folder / "model.safetensors", tmp_path / "kept")
        self.write(torch, folder, False, "float16")
        shutil.copy(tmp_path / "kept", folder / "model.safetensors")
        from_hf(folder, tmp_path / "back")
        assert {tensor.dtype.name for tensor in values_of(tmp_path / "back").values()} == {"float32"}

    def test_a_model_that_transformers_saved(self, tmp_path, torch):
        """One that never was ours: its logits are the same here."""
        pytest.importorskip("transformers", reason="transformers is not installed (requirements-peers.txt)")
        from test_hf_parity import logits_of
        from transformers import GPTJConfig, GPTJForCausalLM

        torch.manual_seed(0)
        peer = GPTJForCausalLM(GPTJConfig(vocab_size=320, n_positions=16, n_embd=32, n_layer=2, n_head=8, rotary_dim=4))
        for name, weight in peer.named_parameters():
            torch.nn.init.normal_(weight, mean=1.0 if "ln" in name and "weight" in name else 0.0, std=0.2)
        peer.eval().save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
        net = network_of(1, 1, n_vocab=320)
        net.load_ckpt(from_hf(tmp_path / "theirs", tmp_path / "back", 2).path, optimizer=False)
        tokens = batch_of(2, 16, vocab=320)["obs"]
        np.testing.assert_allclose(np.asarray(net.logits(tokens)), logits_of(peer, tokens), atol=1e-4, rtol=0)


def test_the_tensors_made_by_hand_depend_on_every_parameter():
    model = config_of(1).model
    one, two = hf_tensors(random_tree(model, 0)), hf_tensors(random_tree(model, 1))
    assert all((one[name] != two[name]).any() for name in one)
