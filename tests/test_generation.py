"""`generate` and `stream`: rows that do not influence each other, lengths at their limits, stopping, refusals."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest
from conftest import tokens_of
from decoding_tools import GREEDY, generate, network

from mesh_transformer import generation
from mesh_transformer.errors import ConfigError, DataError
from mesh_transformer.sampler import Mode, sampler_of

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
