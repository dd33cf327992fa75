"""Decoding against the cache: equal to a forward pass without one, for every position scheme and norm, on any mesh."""

from __future__ import annotations

import jax
import numpy as np
import plain_model
import pytest
from conftest import network_of, tokens_of
from decoding_tools import GREEDY, SEQ, compilations, generate, network
from test_golden import GOLDEN
from test_golden import network as golden_network

from mesh_transformer import decoder_shard, decoding, generation
from mesh_transformer.config_groups import NORMS, POSITIONS
from mesh_transformer.sampler import Mode, sampler_of

# Each of the short pairs is on a mesh of its own kind; the reference knows no mesh.
SHORT = {
    ("rotary", "layernorm"): (2, 4), ("t5", "layernorm"): (2, 2), ("fixed", "layernorm"): (1, 8),
    ("rotary", "layernorm-desync"): (1, 4), ("rotary", "rmsnorm-bias"): (1, 2), ("rotary", "scalenorm"): (1, 1),
}  # fmt: skip
LONG = [(pe, norm) for pe in POSITIONS for norm in NORMS if (pe, norm) not in SHORT]


def check_every_position(net, prompts, count, window=None):
    """Generates greedily and compares all logits and tokens with the plain model on the whole texts."""
    out = generate(net, prompts, count, GREEDY, width=net.model.seq, return_logits=True)
    for prompt, tokens, logits in zip(prompts, out["tokens"], out["logits"], strict=True):
        text = np.concatenate([prompt, tokens])[:-1]
        wanted = plain_model.logits(net.state.params, net.model, text, window)[len(prompt) - 1 :]
        assert wanted.std() > 0.1
        np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=0)
        assert (tokens == wanted.argmax(-1)).all()


@pytest.mark.parametrize(("pe", "norm"), [*SHORT, *(pytest.param(*pair, marks=pytest.mark.long) for pair in LONG)])
def test_cached_logits_equal_a_forward_pass_at_every_position(pe, norm):
    net = network(*SHORT.get((pe, norm), (1, 1)), pe=pe, norm=norm)
    # The longest row fills the context, and fixed still predicts the token behind it.
    check_every_position(net, [tokens_of(n, seed=n) for n in (1, 3, 7)], SEQ + 1 - 7)


@pytest.mark.parametrize("pe", ["rotary", "t5"])
def test_past_the_context_the_window_slides(pe):
    """Each token attends to the newest seq positions; what left the window left traces in deeper layers' keys, as in
    one pass over the whole text with that band as its mask."""
    net = network(*SHORT[pe, "layernorm"], pe=pe, norm="layernorm")
    check_every_position(net, [tokens_of(n, seed=n) for n in (2, 16, 9)], 40, window=SEQ)


def test_the_network_itself_agrees():
    net = network(2, 4, pe="rotary", norm="layernorm")
    prompts = [tokens_of(n, seed=n) for n in (6, 6, 6)]
    out = generate(net, prompts, SEQ - 6, GREEDY, return_logits=True)
    full = np.asarray(net.logits(np.pad(np.concatenate([prompts, out["tokens"]], 1), ((0, 1), (0, 0)))))
    np.testing.assert_allclose(out["logits"], full[:3, 5:-1], atol=1e-4, rtol=0)


def test_the_mesh_does_not_change_what_is_drawn():
    texts = []
    for dp, mp, norm in ((1, 1, "layernorm"), (2, 4, "layernorm")):
        prompts = [tokens_of(n) for n in (4, 2, 5)]
        net = network(dp, mp, pe="rotary", norm=norm)
        texts.append(generate(net, prompts, 10, {"top_p": 0.9}, seed=3, return_logits=True)["tokens"].tolist())
    assert texts[0] == texts[1]
    assert len({token for row in texts[0] for token in row}) > 5


def test_bfloat16_stays_close():
    net = network(1, 1, pe="rotary", norm="layernorm")
    half = network_of(1, 1, pe="rotary", norm="layernorm", compute_dtype="bfloat16")
    half.state = net.state
    prompts = [tokens_of(7), [3], [4]]
    wide, narrow = (generate(n, prompts, 1, GREEDY, return_logits=True)["logits"] for n in (net, half))
    # bfloat16 has 8 bits: errors of some per mille, summed through two layers.
    assert 0 < np.abs(wide - narrow).max() < 0.05 * np.abs(wide).max()


def test_angles_are_right_to_float32_at_any_position():
    position = np.array([0, 1, 511, 512, 1857, 70_000, decoder_shard.MAX_POSITIONS - 1], np.int32)
    sin, cos = (np.asarray(x)[:, 0] for x in jax.jit(decoder_shard.angles, static_argnums=1)(position, 64))
    angle = position[:, None] / 10000.0 ** (np.arange(0, 64, 2) / 64)[None]
    assert max(abs(sin - np.sin(angle)).max(), abs(cos - np.cos(angle)).max()) < 1e-6


def test_lengths_share_compilations():
    """Prompts and outputs of any length in the same buckets, and any sampler options, run what is compiled."""
    net = network(2, 4, pe="rotary", norm="layernorm")
    width = {"width": 32}
    generate(net, [tokens_of(5)] * 3, 5, **width, return_logits=True)
    with compilations() as seen:
        for prompt, count in ((5, 6), (4, 7), (9, 5), (2, 1), (30, 40)):
            options = {"top_p": 0.5, "top_k": count}
            generate(net, [tokens_of(prompt)] * 4, count, options, **width, return_logits=True, seed=count)
    assert not seen


def test_a_short_prompt_costs_nothing_of_a_long_context():
    net = network_of(1, 1, seq=2048)
    for length, count, bucket, slots in ((4, 8, 16, 16), (40, 100, 64, 192), (40, 200, 64, 256)):
        batch = generation.Batch(net.model, net.mesh, [[1] * length], [count], sampler_of(GREEDY, 1), [()])
        assert batch.place(Mode()).tokens.shape == (1, bucket) and batch.slots == slots


def test_buckets():
    assert [decoding.bucket(n, 2048) for n in (1, 16, 17, 33, 2048, 9999)] == [16, 16, 32, 64, 2048, 2048]
    assert [decoding.bucket(n, 100) for n in (64, 65, 100)] == [64, 100, 100]
    assert [decoding.bucket(n, 8, 1) for n in (1, 2, 3, 5)] == [1, 2, 4, 8]


# By the mesh that the checkpoint was trained on, and others.
GOLDEN_CASES = [
    ("v1_rotary_mp4_f32", 2, 4),
    ("v1_t5_mp2_f32", 1, 2),
    *(
        pytest.param(case, dp, mp, marks=pytest.mark.long)
        for case in (
            "v1_rotary_mp1_f32",
            "v1_rotary_mp4_f32",
            "v1_rotary_mp4_bf16",
            "v1_rotary_mp8_f32",
            "v1_t5_mp2_f32",
        )
        for dp, mp in ((1, 1), (4, 2), (1, 8))
    ),
]


@pytest.mark.parametrize(("case", "dp", "mp"), GOLDEN_CASES)
def test_the_2021_library_generates_the_same(case, dp, mp):
    """Its greedy tokens, from its checkpoint and its right-aligned contexts, and the logits they come from."""
    golden = np.load(GOLDEN / case / "generate.npz")
    net = golden_network(case, dp, mp)
    net.load_ckpt(next((GOLDEN / case).glob("slim_step_[1-9]*")), optimizer=False)
    out = net.generate(
        golden["context"], golden["ctx_length"], golden["tokens"].shape[1], GREEDY, return_logits=True
    )  # fmt: skip
    assert (out["tokens"] == golden["tokens"]).all()
    np.testing.assert_allclose(out["logits"], golden["logits"], atol=1e-3, rtol=0)
