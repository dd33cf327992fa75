"""Penalties, bias, min_p and log-probabilities against plain numpy, and the filters against transformers' own."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from test_sampling import choose, keep_probable

from mesh_transformer import sampling
from mesh_transformer.errors import ConfigError
from mesh_transformer.sampler import NO_TOP_K, Mode, mode_of, sampler_of

V, ROWS = 64, 300
N_TOKENS = np.int32(V)


@pytest.fixture(scope="module")
def logits():
    return (np.random.default_rng(0).normal(size=(ROWS, V)) * 3).astype(np.float32)


@pytest.fixture(scope="module")
def history():
    """What each row has read and drawn, some tokens never, some several times."""
    random = np.random.default_rng(1)
    return sampling.History(random.random((ROWS, V)) < 0.2, random.poisson(0.4, (ROWS, V)).astype(np.int32))


_adjust = jax.jit(sampling.adjust)


def adjust(logits, options, history=None):
    sampler = sampler_of(options, len(logits), mode=Mode(penalties=history is not None, bias=4))
    return np.asarray(_adjust(logits, sampler, history))


def spread(random, *values):
    return random.choice(values, ROWS)


def test_penalties_are_what_numpy_says(logits, history):
    random = np.random.default_rng(2)
    options = {
        "repetition_penalty": spread(random, 1.0, 1.3, 0.7), "presence_penalty": spread(random, 0.0, 1.5, -0.5),
        "frequency_penalty": spread(random, 0.0, 0.8, -1.0),
    }  # fmt: skip
    out = adjust(logits, options, history)
    for i in range(ROWS):
        r, p, f = (np.float32(options[name][i]) for name in options)
        for v in range(V):
            wanted, count = logits[i, v], history.drawn[i, v]
            if history.prompt[i, v] or count:
                wanted = wanted / r if wanted > 0 else wanted * r
            wanted = wanted - f * np.float32(count) - p * np.float32(count > 0)
            assert abs(out[i, v] - wanted) <= 1e-5


def test_penalties_that_are_off_change_nothing(logits, history):
    same = adjust(logits, {"repetition_penalty": [1.0] * (ROWS - 1) + [2.0]}, history)
    assert (same[:-1] == logits[:-1]).all() and (same[-1] != logits[-1]).any()


def test_a_repetition_penalty_lowers_what_was_seen_and_nothing_else(logits, history):
    out = adjust(logits, {"repetition_penalty": 1.3}, history)
    seen = history.prompt | (history.drawn > 0)
    assert (out[seen & (logits != 0)] < logits[seen & (logits != 0)]).all() and (out[~seen] == logits[~seen]).all()
    # Greedy rows too: the most probable token, seen, gives way to the next.
    two = np.zeros((1, V), np.float32)
    two[0, 3], two[0, 5] = 2.0, 1.9
    seen = sampling.History(np.arange(V)[None] == 3, np.zeros((1, V), np.int32))
    assert adjust(two, {"repetition_penalty": 1.3}, seen)[0].argmax() == 5


def test_bias_is_added_to_its_tokens(logits):
    bias = [{3: 2.5, 7: -100.0} if i % 2 else None for i in range(ROWS)]
    bias[0] = {V + 5: 10.0, 0: 1.0}  # an id beyond the vocabulary is nobody's
    out = adjust(logits, {"logit_bias": bias})
    wanted = logits.copy()
    for i, each in enumerate(bias):
        for token, value in (each or {}).items():
            if token < V:
                wanted[i, token] += np.float32(value)
    assert (out == wanted).all() and (out != logits).any()


@pytest.mark.parametrize("order", ["reference", "huggingface"])
def test_filters_keep_what_the_plain_oracle_keeps_at_every_edge(order):
    random = np.random.default_rng(3)
    rows = (random.normal(size=(300, 16)) * 3).astype(np.float32)
    rows[60:120] = np.round(rows[60:120])  # ties
    rows[120:150, 2:9] = -np.inf
    rows[150:160, 1:] = -np.inf
    top_k = random.choice([1, 2, 5, 15, 16, 19, NO_TOP_K], 300).astype(np.int32)
    top_p = random.choice([0.0, 0.1, 0.5, 0.9, 0.999, 1.0], 300).astype(np.float32)
    min_p = random.choice([0.0, 0.02, 0.3, 1.0], 300).astype(np.float32)
    out = keep_probable(rows, top_k, top_p, min_p, order)
    for i, row in enumerate(rows):
        kept = plainly_kept(row.astype(np.float64), top_k[i], float(top_p[i]), float(min_p[i]), order)
        found = np.isfinite(out[i])
        assert (found == kept).all(), (i, top_k[i], top_p[i], min_p[i])
        assert (out[i][kept] == row[kept]).all()


def plainly_kept(row, top_k, top_p, min_p, order):
    """Bool [V], each filter spelled out; float64."""
    ranked = np.sort(row)[::-1]
    kept = row >= ranked[min(top_k, len(row)) - 1]
    weights = np.exp(row - row.max())
    pool = weights if order == "reference" else np.where(kept, weights, 0)
    probability = pool / pool.sum()
    if top_p < 1:
        for v in np.flatnonzero(kept):
            more = probability[row > row[v]].sum()  # of equals the first decides
            in_nucleus = more <= top_p if order == "reference" else more < top_p
            kept[v] = in_nucleus or row[v] == row.max()
    return kept & (weights >= min_p * (1 - 1e-12)) & np.isfinite(row)


@pytest.mark.parametrize("name", ["temp", "top_k", "top_p", "min_p", "repetition_penalty", "all"])
def test_transformers_own_processors_agree_on_random_rows(logits, history, name):
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    random = np.random.default_rng(4)
    given = {
        "repetition_penalty": spread(random, 1.2, 0.8), "temp": spread(random, 0.3, 0.7, 1.4),
        "top_k": random.integers(1, V + 1, ROWS), "top_p": random.uniform(0.05, 0.99, ROWS),
        "min_p": random.uniform(0.001, 0.4, ROWS),
    }  # fmt: skip
    made = {
        "repetition_penalty": processors.RepetitionPenaltyLogitsProcessor,
        "temp": processors.TemperatureLogitsWarper, "top_k": processors.TopKLogitsWarper,
        "top_p": processors.TopPLogitsWarper, "min_p": processors.MinPLogitsWarper,
    }  # fmt: skip
    names = list(given) if name == "all" else [name]
    options = {each: given[each] for each in names}
    sampler = sampler_of(options, ROWS, mode=Mode(penalties=True))
    ours = np.asarray(_processed(logits, sampler, history))
    for i in range(ROWS):
        ids = np.flatnonzero(history.prompt[i] | (history.drawn[i] > 0))
        scores, seen = torch.from_numpy(logits[i : i + 1].copy()), torch.from_numpy(ids[None])
        for each in names:
            value = given[each][i]
            scores = made[each](int(value) if each == "top_k" else float(np.float32(value)))(seen, scores)
        theirs = scores[0].numpy()
        assert (np.isfinite(ours[i]) == np.isfinite(theirs)).all(), (i, {n: given[n][i] for n in names})
        kept = np.isfinite(theirs)
        np.testing.assert_allclose(ours[i][kept], theirs[kept], rtol=1e-5, atol=1e-5)


@jax.jit
def _processed(logits, sampler, history):
    return sampling.filtered(sampling.adjust(logits, sampler, history), sampler, "huggingface")


def test_the_orders_differ_where_temperature_sharpens():
    """With a temperature below 1 the same top_p keeps fewer tokens when temperature comes first."""
    logits = np.full((400, 16), -np.inf)
    logits[:, :5] = np.log([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])
    options = {"top_p": 0.7, "temp": 0.25}
    assert set(choose(logits, options)) == {0, 1}
    assert set(choose(logits, options, order="huggingface")) == {0}


def test_infinities_and_nothing_left():
    rows = np.zeros((200, 16), np.float32)
    rows[:, 4] = rows[:, 6] = np.inf
    assert set(choose(rows, {"temp": 1.0, "top_p": 0.9})) == {4, 6}
    assert (choose(rows, {"temp": 0}) == 4).all()
    nothing = np.full((200, 16), -np.inf)
    assert choose(nothing, {"temp": 1.0, "min_p": 0.5, "top_k": 3}).max() < 16
    rows[0, 3] = np.nan  # a broken row does not touch the others
    assert (choose(rows, {"temp": 0})[1:] == 4).all()


def test_log_probs_are_the_models_own(logits):
    token = np.random.default_rng(5).integers(0, V, ROWS).astype(np.int32)
    asked = np.where(np.arange(ROWS) % 3 == 0, -1, 4).astype(np.int32)
    found = jax.jit(sampling.log_probs, static_argnums=3)(logits, token, asked, 4, np.int32(V - 3))
    wide = logits.astype(np.float64)
    wanted = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    for i in range(ROWS):
        if asked[i] < 0:
            assert not any(np.asarray(x)[i].any() for x in found)
            continue
        assert abs(found.drawn[i] - wanted[i, token[i]]) < 1e-5
        best = np.argsort(-logits[i, : V - 3])[:4]
        assert found.top_ids[i].tolist() == best.tolist(), "in order, and no padding id"
        np.testing.assert_allclose(found.top[i], wanted[i, best], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": 1.5}, r"min_p \(1.5\) must be a number from 0 to 1"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty .* must be above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, r"presence_penalty \(2.1\) must be a number from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": [3, 4]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias has the key 'x'"),
        ({"logit_bias": {-1: 1}}, "no token id"),
        ({"logit_bias": {3: 101}}, "logit_bias of 3"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias of 3"),
        ({"logprobs": 21}, r"logprobs \(21\) must be an integer from 0 to 20"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        sampler_of(options, 2)


def test_a_batch_says_what_it_was_made_without():
    for options, message in (
        ({"presence_penalty": 1}, "penalties were asked for"),
        ({"logit_bias": {1: 1, 2: 1, 3: 1}}, "logit_bias has 3 entries, expected at most 2"),
        ({"logprobs": 3}, r"logprobs \(3\) must be at most 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            sampler_of(options, 1, mode=Mode(bias=2, logprobs=1))
    with pytest.raises(ConfigError, match="filter order 'random' is unknown: choose one of reference, huggingface"):
        mode_of(sampler_of(None, 1), "random")


def test_what_nobody_asks_for_is_not_there():
    """No counts of a vocabulary's size, no lists: the compiled function is another one."""
    sampler = sampler_of({"top_p": 0.5, "min_p": 0.1}, 3)
    assert sampler.penalties is None and sampler.bias is None and sampler.logprobs is None
    assert mode_of(sampler) == Mode()
