"""transformers' own GPT-J, loaded from an export, computes what this project's network computes."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from conftest import network_of, tokens_of
from data_tools import tokenizer_path
from decoding_tools import GREEDY, right_aligned
from hf_tools import write_step

from mesh_transformer.checkpoint.huggingface import convert

torch = pytest.importorskip("torch", reason="torch is not installed (the extra 'peers')")
pytest.importorskip("transformers", reason="transformers is not installed (the extra 'peers')")
torch.set_num_threads(1)  # its threads wait for each other in loops, which costs minutes where cores are few or busy

SEQ, PROMPT, NEW = 32, 9, 20
# d_model, heads, layers, rotary dimensions, shards. Heads are of 8 to 48 dimensions; rotary turns all of them, half,
# or an odd fraction. 8 shards need 8 heads, since a shard holds whole heads.
SHORT = [
    (32, 2, 1, 16, 1),
    (48, 3, 3, 10, 1),
    (96, 6, 12, 6, 2),
    (64, 4, 3, 14, 4),
    (64, 8, 1, 8, 8),
]
SHAPES = [(32, 2), (32, 4), (48, 3), (60, 5), (64, 4), (72, 6), (96, 2), (96, 6), (64, 8), (96, 8)]


def full_grid():
    """Every shape, with every depth and every share of rotary; each number of shards that the heads allow in turn."""
    for number, ((d_model, heads), layers) in enumerate(itertools.product(SHAPES, (1, 3, 12))):
        size = d_model // heads
        odd = 2 * ((3 * size // 7) // 2) or 2  # neither the whole head nor a half or a quarter of it
        shards = [m for m in (1, 2, 4, 8) if heads % m == 0]
        for k, rotary in enumerate(sorted({size - size % 2, max(2, size // 4 * 2), odd})):
            yield d_model, heads, layers, rotary, shards[(number + k) % len(shards)]


LONG = [case for case in full_grid() if case not in SHORT]


def peer_of(folder, **options):
    """(GPTJForCausalLM, what loading it had to say)."""
    from transformers import GPTJForCausalLM

    peer, report = GPTJForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    return peer.eval(), report


def logits_of(peer, tokens):
    with torch.no_grad():
        return peer(input_ids=torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()


def continued(peer, tokens, count):
    out = peer.generate(
        torch.from_numpy(tokens.astype(np.int64)), attention_mask=torch.ones(tokens.shape, dtype=torch.int64),
        max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[:, tokens.shape[1] :].numpy()


def sizes_of(case):
    d_model, heads, layers, rotary, shards = case
    return shards, {
        "d_model": d_model, "n_heads": heads, "layers": layers, "pe_rotary_dims": rotary, "seq": SEQ, "n_vocab": 64
    }  # fmt: skip


@pytest.fixture
def quickly_compiled():
    """Every case is a program of its own, run once: making its machine code fast would take most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("case", [*SHORT, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids=str)
def test_logits_and_greedy_tokens(tmp_path, case):
    shards, sizes = sizes_of(case)
    config, _ = write_step(tmp_path / "step_7", shards, **sizes)
    convert(tmp_path / "step_7", config, tmp_path / "out", dtype="fp32", max_shard_size="200KB")
    peer, report = peer_of(tmp_path / "out")
    assert not any(report.values()), report  # no key is missing, unexpected or of another shape
    net = network_of(1, shards, **sizes)
    net.load_ckpt(tmp_path / "step_7", optimizer=False)
    tokens = tokens_of(2, SEQ)
    wanted = logits_of(peer, tokens)
    assert wanted.std() > 0.5
    np.testing.assert_allclose(np.asarray(net.logits(tokens)), wanted, atol=1e-4, rtol=0)
    prompts = tokens[:, :PROMPT]
    found = net.generate(*right_aligned(prompts, SEQ), NEW, GREEDY)["tokens"]
    assert len(set(found.ravel().tolist())) > 2, "an answer of few tokens would be no test"
    np.testing.assert_array_equal(found, continued(peer, prompts, NEW))


def test_the_keys_are_those_of_the_current_class(tmp_path):
    """X04: buffers, such as the causal mask, are not weights."""
    from hf_tools import read_folder
    from transformers import GPTJConfig, GPTJForCausalLM

    config, _ = write_step(tmp_path / "step_7", 2)
    convert(tmp_path / "step_7", config, tmp_path / "out")
    fresh = GPTJForCausalLM(GPTJConfig.from_pretrained(tmp_path / "out"))
    wanted = {name: tuple(tensor.shape) for name, tensor in fresh.state_dict().items()}
    assert {name: array.shape for name, array in read_folder(tmp_path / "out").items()} == wanted


@pytest.mark.parametrize(("dtype", "name"), [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_it_loads_in_its_own_type(tmp_path, dtype, name):
    from safetensors.torch import load_file

    config, _ = write_step(tmp_path / "step_7", 2)
    convert(tmp_path / "step_7", config, tmp_path / "out", dtype=dtype)
    peer, _ = peer_of(tmp_path / "out", dtype="auto")
    assert peer.dtype == getattr(torch, name)
    for key, tensor in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(tensor, peer.state_dict()[key]), key


def test_a_trimmed_vocabulary_gives_the_first_logits(tmp_path):
    """X03."""
    config, _ = write_step(tmp_path / "step_7", 4, n_vocab=320)
    convert(tmp_path / "step_7", config, tmp_path / "whole", "fp32", tokenizer=tokenizer_path())
    convert(tmp_path / "step_7", config, tmp_path / "cut", "fp32", trim_vocab=True, tokenizer=tokenizer_path())
    tokens = tokens_of(2, 16, vocab=300)
    whole, cut = (logits_of(peer_of(tmp_path / name)[0], tokens) for name in ("whole", "cut"))
    assert cut.shape[-1] == 300
    np.testing.assert_allclose(cut, whole[..., :300], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("trim", "count"), [(False, 320), (True, 300)])
def test_the_tokenizer_has_a_token_for_every_row(tmp_path, trim, count):
    """X03: len(tokenizer) == vocab_size, and text is cut into the same tokens as before."""
    from data_tools import prose, tokenizer
    from transformers import AutoTokenizer

    config, _ = write_step(tmp_path / "step_7", n_vocab=320, tokenizer=tokenizer_path())
    convert(tmp_path / "step_7", config, tmp_path / "out", trim_vocab=trim)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(loaded) == count
    for text in (prose(200, 5), "naïve 日本語 🦆\n\n  two", "a<|endoftext|>b"):
        ids = loaded(text).input_ids
        assert ids == tokenizer().encode(text)
        assert loaded.decode(ids) == text
    assert loaded.eos_token_id == loaded.bos_token_id == tokenizer().eot_id
    assert all(loaded.convert_ids_to_tokens(i) == f"<|extratoken_{i - 299}|>" for i in range(300, count))
