"""Filters against plain numpy at every edge, options at the door, and that a row's draw is its own."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from mesh_transformer import sampling
from mesh_transformer.errors import ConfigError
from mesh_transformer.sampler import NO_TOP_K, Sampler, sampler_of

V = 16
ROWS = 4000  # of every compiled call, so that there is one


def kept_by_hand(logits, top_k, top_p):
    """The ids that stay of one row, spelled out; float64."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    weights = np.exp(np.array(logits, np.float64) - max(logits))
    probability = weights / weights.sum()
    kept, before = [], 0.0
    for rank, i in enumerate(order):
        if rank >= top_k or (before > top_p and top_p < 1):
            break
        kept.append(i)
        before += probability[i]
    least = logits[kept[-1]]
    return {i for i in range(len(logits)) if logits[i] >= least}


_compiled = {}


def compiled(function):
    """One compiled function for each function and its keywords."""
    key = (getattr(function, "func", function), *getattr(function, "keywords", {}).items())
    return _compiled.setdefault(key, jax.jit(function))


def padded(rows):
    return [np.pad(x, [(0, ROWS - len(x))] + [(0, 0)] * (x.ndim - 1), mode="edge") for x in rows]


def choose(logits, options=None, seed=0, drawn=0, n_tokens=V, order="reference"):
    """Tokens [B] of logits [B, V]."""
    rows = len(logits)
    logits, *sampler = padded([np.asarray(logits, np.float32), *sampler_of(options, rows, seed)[:5]])
    chosen = compiled(functools.partial(sampling.choose, order=order))(
        logits, Sampler(*sampler), np.full(ROWS, drawn, np.int32), np.int32(n_tokens)
    )
    return np.asarray(chosen)[:rows]


def keep_probable(logits, top_k, top_p, min_p=0.0, order="reference"):
    """Filtered logits [B, V]; the options are one number, or [B]."""
    rows = len(logits)
    given = ((top_k, np.int32), (top_p, np.float32), (min_p, np.float32))
    spread = [np.broadcast_to(np.asarray(x, t), rows) for x, t in given]
    keep = compiled(functools.partial(sampling.keep_probable, order=order))
    return np.asarray(keep(*padded([np.asarray(logits, np.float32), *spread])))[:rows]


def test_filters_keep_what_numpy_keeps():
    random = np.random.default_rng(0)
    logits = random.normal(size=(300, V)).astype(np.float32) * 3
    logits[100:200] = np.round(logits[100:200])  # ties
    logits[200:250, 3:9] = -np.inf
    top_k = random.choice([1, 2, 5, V, V + 3, NO_TOP_K], 300).astype(np.int32)
    top_p = random.choice([0.0, 0.1, 0.5, 0.9, 0.999, 1.0], 300).astype(np.float32)
    out = keep_probable(logits, top_k, top_p)
    for i in range(300):
        wanted = kept_by_hand(logits[i].tolist(), top_k[i], float(top_p[i]))
        finite = set(np.flatnonzero(np.isfinite(logits[i])))
        assert set(np.flatnonzero(np.isfinite(out[i]))) == wanted & finite, (i, top_k[i], top_p[i])
        assert (out[i][sorted(wanted)] == logits[i][sorted(wanted)]).all()


def test_nucleus_exceeds_top_p_before_temperature():
    """Halves, a quarter, ...: exact in float32, so that the boundary is the rule's and not rounding's."""
    logits = np.full((1, V), -np.inf)
    logits[0, :5] = np.log([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])
    for top_p, count in ((0.3, 1), (0.5 - 1e-3, 1), (0.5 + 1e-3, 2), (0.76, 3), (1.0, 5)):
        assert np.isfinite(keep_probable(logits, NO_TOP_K, top_p)).sum() == count, top_p
    # A high temperature spreads the draw inside the nucleus and does not widen it.
    assert set(choose(np.repeat(logits, 400, 0), {"top_p": 0.6, "temp": 100.0})) == {0, 1}


def test_greedy_is_the_first_largest():
    logits = np.zeros((4, V), np.float32)
    logits[:, 5] = logits[:, 9] = 2.0
    assert (choose(logits, {"temp": 0}) == 5).all()
    assert (choose(logits, {"top_p": 0, "temp": [0.5, 1, 2, 4]}) == 5).all()
    assert set(choose(np.repeat(logits, 50, 0), {"top_k": 1, "temp": 1.0})) == {5, 9}, "ties with the last one stay"
    assert set(choose(logits, {"temp": 1e-30})) <= {5, 9}
    assert set(choose(np.repeat(logits, 50, 0), {"temp": 1e300})) - {5, 9}


def test_draws_follow_the_distribution():
    logits = np.array([2.0, 1.0, 0.0, -1.0] + [-np.inf] * (V - 4), np.float32)
    for temp in (1.0, 0.5):
        tokens = choose(np.repeat(logits[None], ROWS, 0), {"temp": temp}, seed=11)
        wanted = np.exp(logits[:4] / temp) / np.exp(logits[:4] / temp).sum()
        found = np.bincount(tokens, minlength=4) / ROWS
        # Four standard deviations of a count; the seed is fixed.
        assert (np.abs(found - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / ROWS)).all()


def test_a_row_draws_by_its_own_seed_and_count():
    logits = np.random.default_rng(1).normal(size=(1, V)).astype(np.float32)
    alone = [int(choose(logits, seed=[7], drawn=n)[0]) for n in range(12)]
    others = np.random.default_rng(2).normal(size=(3, V)).astype(np.float32)
    batch = np.concatenate([others[:2], logits, others[2:]])
    options = {"temp": [0, 2.0, 1.0, 1.0], "top_k": [None, 3, None, None], "top_p": [1, 0.5, 1, 1]}
    assert [int(choose(batch, options, seed=[1, 2, 7, 9], drawn=n)[2]) for n in range(12)] == alone
    assert len(set(alone)) > 2, "the draws differ from token to token"
    assert [int(choose(logits, seed=[8], drawn=n)[0]) for n in range(12)] != alone
    many = np.repeat(logits, 12, 0)
    assert (choose(many, seed=5) == [choose(logits, seed=5 + i)[0] for i in range(12)]).all()


def test_padding_ids_are_never_drawn():
    logits = np.zeros((200, V), np.float32)
    logits[:, V - 2] = 50.0
    for options in ({"temp": 0}, {"temp": 1.0}, {"top_p": 0.9}, {"top_k": 3}):
        assert choose(logits, options, n_tokens=10).max() < 10
    assert (choose(logits, {"temp": 0}) == V - 2).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, r"top_k \(0\) must be an integer of at least 1; leave it out, or null"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_p": -0.1}, r"top_p \(-0.1\) must be a number from 0 to 1"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_p": "0.9"}, "top_p"),
        ({"temp": -1}, r"temp \(-1\) must be a finite number of at least 0"),
        ({"temp": float("inf")}, "temp"),
        ({"temp": [0.5, float("nan")]}, "temp"),
        ({"temp": [1, 1, 1]}, "temp has 3 entries for 2 rows"),
        ({"temperature": 1}, "'temperature' is unknown; the nearest is 'temp'"),
    ],
)
def test_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        sampler_of(options, 2)


def test_options_left_out_have_the_documented_defaults():
    for options in (None, {}, {"top_p": None, "top_k": None, "temp": None}):
        sampler = sampler_of(options, 3)
        assert (sampler.temp == 1).all() and (sampler.top_p == 1).all() and (sampler.top_k == NO_TOP_K).all()
    assert sampler_of({"temp": np.float32(0.5), "top_k": np.int64(3)}, 1).top_k == [3]


def test_seeds_are_64_bits_wide():
    assert sampler_of(None, 2, 2**32 - 1).seed.tolist() == [[0, 2**32 - 1], [1, 0]]
    assert sampler_of(None, 1, -1).seed.tolist() == [[2**32 - 1, 2**32 - 1]]
    with pytest.raises(ConfigError, match="seed"):
        sampler_of(None, 1, 1.5)
