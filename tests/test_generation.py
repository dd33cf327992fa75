"""`generate` and `stream`: rows that do not influence each other, lengths at their limits, stopping, refusals."""

from __future__ import annotations

import logging

import jax
import numpy as np
import plain_model
import pytest
from conftest import network_of, tokens_of
from decoding_tools import GREEDY, compilations, generate, network

from mesh_transformer import generation, parameters
from mesh_transformer.errors import ConfigError, DataError
from mesh_transformer.sampler import Mode, mode_of, sampler_of

LOGITS = Mode(logits=True)


@pytest.fixture
def net():
    """One network, and always three or four rows with logits, so that all of these tests compile once."""
    return network(2, 4, pe="rotary", norm="layernorm")


def pieces(net, prompts, limits, stop_ids=(), **more):
    return list(
        generation.Stream(
            net.model, net.mesh, net.state.params, prompts, limits, sampler_of(GREEDY, len(prompts)),
            [stop_ids] * len(prompts), mode=LOGITS, **more,
        )
    )  # fmt: skip


def test_rows_do_not_influence_each_other(net):
    """Each of three prompts among filler rows gives what it gives in any order and company."""
    prompts = [tokens_of(n, seed=n) for n in (3, 7, 12)]
    options = {"temp": [0, 0.8, 1.0], "top_p": [1, 0.9, 1], "top_k": [None, None, 20]}

    def run(order, seeds):
        mine = {name: [values[i] for i in order] for name, values in options.items()}
        return generate(net, [prompts[i] for i in order], 8, mine, return_logits=True, seed=seeds)

    alone = [run((i, i, i), [i, 50, 60]) for i in range(3)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0, 0)):
        out = run(order, order)
        assert out["tokens"].shape == (len(order), 8)
        for place, i in enumerate(order):
            assert (out["tokens"][place] == alone[i]["tokens"][0]).all()
            np.testing.assert_allclose(out["logits"][place], alone[i]["logits"][0], atol=1e-5, rtol=0)
    # The same prompt by another seed is another text, unless it is greedy.
    assert [(run["tokens"][0] == run["tokens"][1]).all() for run in alone] == [True, False, False]


@pytest.mark.slow
def test_a_row_alone_in_its_batch_gives_the_same(net):
    """A batch of one is another shape, so products may be summed in another order: tokens agree, bits need not."""
    prompts = [tokens_of(n, seed=n) for n in (3, 7, 12)]
    together = generate(net, prompts, 8, {"top_p": 0.9}, return_logits=True, seed=[1, 2, 3])
    for i, prompt in enumerate(prompts):
        alone = generate(net, [prompt], 8, {"top_p": 0.9}, return_logits=True, seed=[i + 1])
        assert (alone["tokens"][0] == together["tokens"][i]).all()


def test_an_empty_prompt_is_one_end_of_text_token(net):
    out = generate(net, [[], [5], [1]], 6, GREEDY, return_logits=True, eot_id=5)
    assert (out["tokens"][0] == out["tokens"][1]).all() and (out["logits"][0] == out["logits"][1]).all()
    assert np.isfinite(out["logits"]).all()
    with pytest.raises(DataError, match="tokenizer"):
        generate(net, [[], [5], [1]], 6)


def test_of_a_long_prompt_the_last_tokens_are_used(net, caplog):
    prompt = tokens_of(40)
    with caplog.at_level(logging.WARNING):
        long = generate(net, [prompt, [1], [2]], 6, GREEDY, width=40, return_logits=True)
    assert "the prompt has 40 tokens, the context 16: only the last 16 are used" in caplog.text
    caplog.clear()
    short = generate(net, [prompt[-16:], [1], [2]], 6, GREEDY, return_logits=True)
    assert (short["logits"] == long["logits"]).all() and not caplog.records


def test_a_fixed_table_ends_the_row(caplog):
    net = network(1, 8, pe="fixed", norm="layernorm")
    prompts = [tokens_of(14), tokens_of(4), tokens_of(2)]
    out = generate(net, prompts, 6, GREEDY, return_logits=True)
    # Position 15, the last, still predicts the token behind it.
    assert out["lengths"].tolist() == [3, 6, 6]
    assert not out["tokens"][0, 3:].any() and not out["logits"][0, 3:].any()
    assert "ends with its table of seq (16) positions" in caplog.text
    assert pieces(net, prompts, [6, 6, 6])[-1].finish_reasons == ["length"] * 3


def test_a_stop_id_ends_the_row_and_the_loop(net):
    prompts = [tokens_of(n, seed=n).tolist() for n in (3, 5, 6)]
    tokens = generate(net, prompts, 12, GREEDY, return_logits=True)["tokens"]
    stop = int(tokens[0, 5])
    until = [next((n for n, token in enumerate(row) if token == stop), 12) for row in tokens]
    found = pieces(net, prompts, [12, 12, 2], [stop], chunk=5)
    rows = [sum((piece.tokens[i] for piece in found), []) for i in range(3)]
    # The stop id is not part of the text.
    assert rows == [row[:n].tolist() for row, n in zip(tokens, [*until[:2], min(2, until[2])], strict=True)]
    reasons = ["stop" if n < limit else "length" for n, limit in zip(until, (12, 12, 2), strict=True)]
    assert found[-1].finish_reasons == reasons and reasons[0] == "stop"
    assert [len(x) for x in found[0].logits] == [1, 1, 1]

    work = generation.Stream(
        net.model, net.mesh, net.state.params, prompts, [12, 2, 2], sampler_of(GREEDY, 3), [[stop]] * 3, mode=LOGITS
    )
    assert len(list(work)) == 2
    assert work.steps == max(until[0], 1), "the loop ends with its last row, not at its full count"


def test_logits_can_be_left_out(net):
    assert set(generate(net, [[1]] * 3, 3)) == {"tokens", "lengths"}
    assert generate(net, [[1]] * 3, 3, return_logits=True)["logits"].shape == (3, 3, 64)


def test_parameters_survive(net):
    """The rows are donated to the loop; parameters must not be."""
    before = jax.tree.map(np.array, net.state.params)
    generate(net, [[1]] * 3, 3, return_logits=True)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(net.state.params), strict=True):
        assert (x == np.asarray(y)).all()


@pytest.mark.parametrize(
    ("context", "lengths", "count", "message"),
    [
        (np.zeros((2, 4), int), [1, 5], 3, r"ctx_length must be from 0 to 4, the width of context, found \[1, 5\]"),
        (np.zeros((2, 4), int), [1], 3, "one for each row"),
        (np.zeros((2, 4), int), [1, 0.5], 3, "integers"),
        (np.zeros((2, 4)), [1, 1], 3, "token ids"),
        (np.zeros(4, int), [1], 3, "token ids"),
        (np.full((1, 4), 64), [2], 3, "the prompt has the id 64, expected 0 to 63"),
        (np.zeros((1, 4), int), [2], 0, r"gen_length \(0\) must be an integer from 1 to"),
        (np.zeros((1, 4), int), [2], 2.5, r"gen_length \(2.5\)"),
    ],
)
def test_what_does_not_fit_is_refused(net, context, lengths, count, message):
    with pytest.raises((DataError, ConfigError), match=message):
        net.generate(context, lengths, count)


def test_logits_that_are_not_finite_are_refused(net):
    """In whatever row, at the first token or later."""
    params = jax.tree.map(lambda x: x, net.state.params)
    layers = dict(params[parameters.LAYERS])
    layers["b2"] = layers["b2"] * np.float32(np.nan)
    with pytest.raises(DataError, match="logits are not finite.*compute_dtype"):
        list(
            generation.Stream(
                net.model, net.mesh, {**params, parameters.LAYERS: layers}, [[1], [2], [3]], [3] * 3,
                sampler_of(GREEDY, 3), [()] * 3, mode=LOGITS,
            )
        )  # fmt: skip


WINDOWED = {"full": 16, "reference": 15}


@pytest.mark.parametrize("window", WINDOWED)
def test_long_prompts_are_read_in_parts(window, monkeypatch):
    """Parts of 6 tokens, rows that end in different parts, past the context: each as one pass with the band as mask."""
    monkeypatch.setattr(generation, "PREFILL", 6)
    net = network(2, 2, pe="t5", norm="layernorm")
    prompts = [tokens_of(n, seed=n) for n in (16, 7, 3)]
    options = GREEDY | {"window": window}
    with compilations() as seen:
        out = generate(net, prompts, 12, options, return_logits=True)
    for prompt, tokens, logits in zip(prompts, out["tokens"], out["logits"], strict=True):
        text = np.concatenate([prompt, tokens])[:-1]
        wanted = plain_model.logits(net.state.params, net.model, text, WINDOWED[window])[len(prompt) - 1 :]
        np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=0)
        assert (tokens == wanted.argmax(-1)).all()
    assert 0 < len(seen) < 12
    with compilations() as seen:
        generate(net, prompts[::-1], 10, options, return_logits=True)
    assert not seen, "prompts of the same buckets share what is compiled"


@pytest.mark.parametrize("pe", ["rotary", "t5"])
def test_the_reference_window_has_one_position_less(pe):
    """The prompt alone fills the context, so that the window matters from its last token on."""
    net = network(1, 2, pe=pe, norm="layernorm")
    prompts = [tokens_of(16, seed=5), tokens_of(2, seed=6), tokens_of(9, seed=7)]
    texts = {}
    for window, width in WINDOWED.items():
        out = generate(net, prompts, 20, GREEDY | {"window": window}, return_logits=True)
        for prompt, tokens, logits in zip(prompts, out["tokens"], out["logits"], strict=True):
            text = np.concatenate([prompt, tokens])[:-1]
            wanted = plain_model.logits(net.state.params, net.model, text, width)[len(prompt) - 1 :]
            np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=0)
        texts[window] = out["logits"]
    assert np.abs(texts["full"] - texts["reference"]).max() > 1e-3
    with pytest.raises(ConfigError, match="window 'half' is unknown: choose one of full, reference"):
        generate(net, prompts, 2, {"window": "half"})


def test_penalties_and_log_probabilities_along_a_text(net):
    """Drawn greedily by the plain model with the penalties spelled out, token by token."""
    prompts = [tokens_of(n, seed=n).tolist() for n in (5, 9, 3)]
    options = {"temp": 0, "repetition_penalty": [1.0, 1.4, 1.0], "frequency_penalty": [0.0, 0.0, 0.5]}
    options |= {"presence_penalty": [0.0, 0.2, 0.0], "logit_bias": [None, {7: 1.5}, None], "logprobs": [None, 0, 3]}
    sampler = sampler_of(options, 3)
    work = generation.Stream(
        net.model, net.mesh, net.weights, prompts, [10] * 3, sampler, [()] * 3, mode=mode_of(sampler), chunk=4
    )
    pieces = list(work)
    plain = generate(net, prompts, 10, GREEDY, return_logits=True)["tokens"]
    for i, prompt in enumerate(prompts):
        tokens = sum((piece.tokens[i] for piece in pieces), [])
        drawn = []
        rep, freq, pres = (options[f"{name}_penalty"][i] for name in ("repetition", "frequency", "presence"))
        for n, token in enumerate(tokens):
            logits = plain_model.logits(net.state.params, net.model, np.array(prompt + drawn), 16)[-1]
            adjusted = logits.copy()
            for v, value in (options["logit_bias"][i] or {}).items():
                adjusted[v] += value
            for v in set(prompt + drawn):
                adjusted[v] = adjusted[v] / rep if adjusted[v] > 0 else adjusted[v] * rep
            for v in set(drawn):
                adjusted[v] -= freq * drawn.count(v) + pres
            assert token == adjusted.argmax()
            log_z = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
            if (options["logprobs"][i] or 0) > 0 or i == 1:
                found = [np.concatenate([piece.logprobs[i][part] for piece in pieces])[n] for part in range(3)]
                assert abs(found[0] - (logits[token] - log_z)) < 1e-5
                if i == 2:
                    best = np.argsort(-logits)[:3]
                    assert found[1].tolist() == best.tolist()
                    np.testing.assert_allclose(found[2], logits[best] - log_z, atol=1e-5)
            drawn.append(token)
        assert (tokens == plain[i].tolist()) == (i == 0), "penalties change the texts of the rows that have them"


def test_generation_follows_training():
    """What decoding reads are views of the parameters, which the next update gives away."""
    net = network_of(2, 4)
    batch = {name: np.stack([tokens_of(2, 16, seed=seed)]) for seed, name in enumerate(("obs", "target"))}
    logits = []
    for _ in range(2):
        net.train(batch)
        logits.append(generate(net, [tokens_of(5)] * 3, 2, GREEDY, return_logits=True)["logits"])
    text = np.pad(tokens_of(5), (0, 11))
    np.testing.assert_allclose(logits[-1][0, 0], np.asarray(net.logits(np.stack([text] * 2)))[0, 4], atol=1e-5, rtol=0)
    assert np.abs(logits[0] - logits[1]).max() > 1e-3
