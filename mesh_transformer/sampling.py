"""From logits to the next token, on the devices: bias, penalties, filters, temperature, and a seed for each row.

Letters: B rows, V vocabulary. docs/sampling.md states the order of the steps. In both orders logit_bias is added first,
then come the penalties, and ids that the tokenizer does not have are masked. In the `reference` order, the 2021
library's, top_k, top_p and min_p each choose a set of tokens on the distribution *before* temperature, what is in all
sets stays, and temperature scales what is left. In the `huggingface` order temperature comes first, then top_k, top_p
on what top_k left, and min_p. One token is drawn from the softmax of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesh_transformer.sampler import NO_LOGPROBS, Bias, Leaf, Penalties, Sampler

_TINY = np.finfo(np.float32).tiny


class History(NamedTuple):
    """What penalties look at: `prompt` bool [B, V], whether a token is in the prompt; `drawn` int32 [B, V], how often
    it was drawn."""

    prompt: Leaf
    drawn: Leaf


class LogProbs(NamedTuple):
    """Natural logarithms of the model's own probabilities, before bias, penalties, filters and temperature: `drawn`
    float32 [B], of the drawn token; the most probable tokens, in order: `top_ids` int32 [B, k], `top` float32 [B, k].
    """

    drawn: Leaf
    top_ids: Leaf
    top: Leaf


def adjust(logits_BV: jax.Array, sampler: Sampler, history: History | None) -> jax.Array:
    """Logits with bias and penalties. Rows that ask for neither keep theirs, bit for bit.

    The repetition penalty divides positive logits, and multiplies negative ones, of tokens in the prompt or drawn; the
    presence penalty is subtracted from those of drawn tokens, the frequency penalty as often as they were drawn.
    """
    if sampler.bias is not None:
        bias: Bias = sampler.bias
        logits_BV = _if_any(bias.ids >= 0, lambda x: _biased(x, bias), logits_BV)
    if sampler.penalties is not None and history is not None:
        asks, seen = sampler.penalties, history
        used = (asks.repetition != 1.0) | (asks.presence != 0.0) | (asks.frequency != 0.0)
        logits_BV = _if_any(used, lambda x: _penalised(x, asks, seen), logits_BV)
    return logits_BV


def _biased(logits_BV: jax.Array, bias: Bias) -> jax.Array:
    rows = jnp.arange(logits_BV.shape[0], dtype=jnp.int32)[:, None]
    # A negative index would count from the end; one beyond the vocabulary is dropped.
    ids = jnp.where(bias.ids >= 0, bias.ids, logits_BV.shape[1])
    return logits_BV.at[rows, ids].add(bias.values, mode="drop")


def _penalised(logits_BV: jax.Array, asks: Penalties, history: History) -> jax.Array:
    repetition, presence, frequency = (x[:, None] for x in asks)
    drawn = history.drawn > 0
    scaled = jnp.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    out = jnp.where(history.prompt | drawn, scaled, logits_BV)
    return out - presence * drawn - frequency * history.drawn.astype(jnp.float32)


def first_largest(x_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of each row's largest entry, the first of equals, int32 [B], and the entry, [B].

    Two plain reductions, which XLA's CPU backend runs several times as fast as its arg-max.
    """
    V = x_BV.shape[1]
    peak_B1 = jnp.max(x_BV, axis=-1, keepdims=True)
    ids = jnp.arange(V, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(x_BV == peak_B1, ids, V - 1), axis=-1), peak_B1[:, 0]


def mask_padding(logits_BV: jax.Array, n_tokens: jax.Array) -> jax.Array:
    """-inf at the ids that the tokenizer does not have: a model's vocabulary may be padded beyond it."""
    ids = jnp.arange(logits_BV.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(ids < n_tokens, logits_BV, -jnp.inf)


def keep_probable(
    logits_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array, order: str = "reference"
) -> jax.Array:
    """Logits with -inf at the tokens that a filter drops; `order` as in the module's words.

    top_k: the k most probable tokens. top_p: the smallest set of the most probable ones whose probability exceeds
    top_p (`reference`), or reaches it (`huggingface`); at least one. min_p: tokens at least that times as probable as
    the most probable one. Tokens equal to the last one of a set are in it.
    """
    V = logits_BV.shape[1]
    sorted_BV = lax.sort(logits_BV, dimension=1)[:, ::-1]
    kth_B1 = jnp.take_along_axis(sorted_BV, jnp.minimum(top_k_B, V)[:, None] - 1, axis=1)
    in_k_BV = sorted_BV >= kth_B1
    probability_BV = jax.nn.softmax(sorted_BV, axis=-1, where=None if order == "reference" else in_k_BV)
    # The sum of those before: not cumsum - probability, which rounding could leave above the sum itself.
    before_BV = jnp.pad(jnp.cumsum(probability_BV, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    in_p_BV = before_BV <= top_p_B[:, None] if order == "reference" else before_BV < top_p_B[:, None]
    first_BV = jnp.arange(V, dtype=jnp.int32)[None, :] == 0
    # top_p 1 is off: the running sum may round to above 1 before the last token.
    kept_BV = in_k_BV & (in_p_BV | (top_p_B[:, None] >= 1.0) | first_BV)
    last_B1 = jnp.sum(kept_BV, axis=-1)[:, None] - 1
    threshold_B1 = jnp.take_along_axis(sorted_BV, last_B1, axis=1)
    # p >= min_p * (largest p), as logarithms; log 0 is -inf, which keeps all.
    least_B1 = jnp.minimum(sorted_BV[:, :1], sorted_BV[:, :1] + jnp.log(min_p_B)[:, None])
    return jnp.where(logits_BV >= jnp.maximum(threshold_B1, least_B1), logits_BV, -jnp.inf)


def filtered(logits_BV: jax.Array, sampler: Sampler, order: str) -> jax.Array:
    """What rows that are not greedy draw from: filters and temperature, in `order`, on logits whose largest is 0."""
    wanted = (sampler.top_p < 1.0) | (sampler.top_k < logits_BV.shape[1]) | (sampler.min_p > 0.0)
    temp_B1 = jnp.where(is_greedy(sampler), 1.0, sampler.temp)[:, None]
    keep = lambda x: keep_probable(x, sampler.top_k, sampler.top_p, sampler.min_p, order)  # noqa: E731
    if order == "huggingface":
        return _if_any(wanted & ~is_greedy(sampler), keep, logits_BV / temp_B1)
    return _if_any(wanted & ~is_greedy(sampler), keep, logits_BV) / temp_B1


def is_greedy(sampler: Sampler) -> jax.Array:
    """Bool [B]: devices flush numbers below the smallest normal one to 0, by which nothing may be divided."""
    return (sampler.temp < _TINY) | (sampler.top_p <= 0.0)


def choose(
    logits_BV: jax.Array, sampler: Sampler, drawn_B: jax.Array, n_tokens: jax.Array, order: str = "reference"
) -> jax.Array:
    """One token for each row from logits float32 [B, V] (see `adjust`): int32 [B].

    A row's draw depends on its own logits, options, seed and `drawn` (int32 [B], how many tokens it has drawn before)
    and on nothing of the other rows. temp 0 and top_p 0 take the largest logit, the first of equals. Ids from
    `n_tokens` (int32 []) on are never chosen. Sorting is done only where a row asks for a filter, drawing only where a
    row is not greedy. Infinite logits share all probability; of a row with NaN any id may come.
    """
    masked_BV = mask_padding(logits_BV, n_tokens)
    best_B, peak_B = first_largest(masked_BV)
    greedy_B = is_greedy(sampler)

    def draw() -> jax.Array:
        # With the maximum subtracted a tiny temperature gives -inf beside 0, not infinity beside infinity.
        peak_B1 = peak_B[:, None]
        shifted_BV = jnp.where(masked_BV == peak_B1, 0.0, masked_BV - peak_B1)
        scaled_BV = filtered(shifted_BV, sampler, order)
        keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(sampler.seed, impl="threefry2x32"), drawn_B)
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, scaled_BV.shape[1:], jnp.float32))(keys_B)
        # Gumbel-max: the arg-max of logits plus Gumbel noise is a draw from their softmax.
        return jnp.where(greedy_B, best_B, first_largest(scaled_BV + noise_BV)[0])

    return lax.cond(jnp.all(greedy_B), lambda: best_B, draw)


def log_probs(logits_BV: jax.Array, token_B: jax.Array, asked_B: jax.Array, most: int, n_tokens: jax.Array) -> LogProbs:
    """Log-probabilities of the drawn tokens and of the `most` most probable ones; zeros for a row that asks for none.

    They are of the whole vocabulary, padding included, as the model gives them; padding is not among the listed.
    """
    zeros_B = jnp.zeros_like(logits_BV[:, 0])

    def find() -> LogProbs:
        log_z_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
        drawn = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1) - log_z_B1
        top, ids = lax.top_k(mask_padding(logits_BV, n_tokens), most)
        asked_B1 = asked_B[:, None] > NO_LOGPROBS
        return LogProbs(
            jnp.where(asked_B1, drawn, 0.0)[:, 0], jnp.where(asked_B1, ids, 0), jnp.where(asked_B1, top - log_z_B1, 0.0)
        )

    def none() -> LogProbs:
        listed = jnp.broadcast_to(zeros_B[:, None], (len(zeros_B), most))
        return LogProbs(zeros_B, listed.astype(jnp.int32), listed)

    return lax.cond(jnp.any(asked_B > NO_LOGPROBS), find, none)


def _if_any(wanted: jax.Array, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.cond(jnp.any(wanted), function, lambda same: same, x)
