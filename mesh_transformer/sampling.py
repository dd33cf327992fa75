"""From logits to the next token: temperature, top-k and nucleus filters, and a seed for each row.

Letters: B rows, V vocabulary. The order of the steps is the 2021 library's, and docs/sampling.md states it: ids that
the tokenizer does not have are masked; top_k and top_p each choose a set of tokens on the distribution *before*
temperature, and what is in both sets stays; temperature scales what is left; one token is drawn from that.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesh_transformer.errors import ConfigError

# A jax.Array inside a computation, numpy's on the way there, a PartitionSpec where placements have the same tree.
Leaf: TypeAlias = Any

NO_TOP_K = np.iinfo(np.int32).max
DEFAULTS: dict[str, float | int | None] = {"top_p": 1.0, "top_k": None, "temp": 1.0}
_SEED_BITS = 64
_FLOAT32 = np.finfo(np.float32)


class Sampler(NamedTuple):
    """How each row's tokens are drawn.

    `temp` float32 [B], 0 is greedy; `top_p` float32 [B] in [0, 1]; `top_k` int32 [B], NO_TOP_K is off; `seed` uint32
    [B, 2], the two words of a 64-bit seed.
    """

    temp: Leaf
    top_p: Leaf
    top_k: Leaf
    seed: Leaf


def sampler_of(options: Mapping[str, Any] | None, rows: int, seed: int | Sequence[int] = 0) -> Sampler:
    """Checks sampler options (scalars or one entry a row: top_p, top_k, temp) and spreads them over `rows` rows.

    What is left out or None: top_p 1, top_k off, temp 1. A single seed s gives row i the seed s + i, so that equal
    prompts get different texts; a sequence gives each row its own. Host arrays. Raises ConfigError naming the option.
    """
    options = dict(options or {})
    for name in options:
        if name not in DEFAULTS:
            nearest = difflib.get_close_matches(str(name), DEFAULTS, 1, 0.0)[0]
            raise ConfigError(f"sampler option {name!r} is unknown; the nearest is {nearest!r}")
    values = {name: _spread(name, options.get(name), rows) for name in DEFAULTS}
    return Sampler(
        np.array([min(_number("temp", x, 0, math.inf), float(_FLOAT32.max)) for x in values["temp"]], np.float32),
        np.array([_number("top_p", x, 0, 1) for x in values["top_p"]], np.float32),
        np.array([_top_k(x) for x in values["top_k"]], np.int32),
        seed_words(seed, rows),
    )


def seed_words(seed: int | Sequence[int], rows: int) -> np.ndarray:
    """uint32 [rows, 2] of one seed (row i: seed + i) or one seed a row; any integers, taken modulo 2^64."""
    each = list(np.asarray(seed, object).reshape(-1))
    if np.ndim(seed) == 0:
        each = [each[0] + i if _is_integer(each[0]) else each[0] for i in range(rows)]
    _check_rows("seed", len(each), rows)
    for value in each:
        if not _is_integer(value):
            raise ConfigError(f"seed ({value!r}) must be an integer")
    wrapped = [int(value) % 2**_SEED_BITS for value in each]
    return np.array([[value >> 32, value & 0xFFFFFFFF] for value in wrapped], np.uint32).reshape(rows, 2)


def _spread(name: str, value: Any, rows: int) -> list[Any]:
    """One entry a row of a scalar or sequence; None becomes the default."""
    entries = [value] * rows if value is None or np.ndim(value) == 0 else list(np.asarray(value, object).reshape(-1))
    _check_rows(name, len(entries), rows)
    return [DEFAULTS[name] if entry is None else entry for entry in entries]


def _check_rows(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise ConfigError(f"{name} has {found} entries for {rows} rows: give one number, or one for each row")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral | np.integer) and not isinstance(value, bool | np.bool_)


def _number(name: str, value: Any, low: float, high: float) -> float:
    value = value.item() if isinstance(value, np.ndarray | jax.Array) and np.ndim(value) == 0 else value
    real = isinstance(value, numbers.Real | np.floating | np.integer) and not isinstance(value, bool | np.bool_)
    if not real or not low <= float(value) <= high or not math.isfinite(float(value)):
        rule = f"a number from {low} to {high}" if math.isfinite(high) else f"a finite number of at least {low}"
        raise ConfigError(f"{name} ({value!r}) must be {rule}")
    return float(value)


def _top_k(value: Any) -> int:
    value = value.item() if isinstance(value, np.ndarray | jax.Array) and np.ndim(value) == 0 else value
    if value is None:
        return NO_TOP_K
    if not _is_integer(value) or int(value) < 1:
        raise ConfigError(f"top_k ({value!r}) must be an integer of at least 1; leave it out, or null, to turn it off")
    return min(int(value), NO_TOP_K)


def keep_probable(logits_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Logits with -inf at tokens outside the top_k set or outside the nucleus, [B, V] float32.

    top_k keeps the k largest. The nucleus is the smallest set of the most probable tokens whose probability exceeds
    top_p: a token stays as long as those before it have at most top_p together, so the first one always does. Both
    sets are those of the distribution given, and tokens that tie with the last one kept are kept as well.
    """
    V = logits_BV.shape[1]
    sorted_BV = lax.sort(logits_BV, dimension=1)[:, ::-1]
    probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
    # The sum of those before: not cumsum - probability, which rounding could leave above the sum itself.
    before_BV = jnp.pad(jnp.cumsum(probability_BV, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    rank = jnp.arange(V, dtype=jnp.int32)[None, :]
    # top_p 1 is off: the running sum may round to above 1 before the last token.
    kept_BV = (rank < top_k_B[:, None]) & ((before_BV <= top_p_B[:, None]) | (top_p_B[:, None] >= 1.0))
    last_B = jnp.sum(kept_BV, axis=-1) - 1
    threshold_B1 = jnp.take_along_axis(sorted_BV, last_B[:, None], axis=1)
    return jnp.where(logits_BV >= threshold_B1, logits_BV, -jnp.inf)


def mask_padding(logits_BV: jax.Array, n_tokens: jax.Array) -> jax.Array:
    """-inf at the ids that the tokenizer does not have: a model's vocabulary may be padded beyond it."""
    ids = jnp.arange(logits_BV.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(ids < n_tokens, logits_BV, -jnp.inf)


def choose(logits_BV: jax.Array, sampler: Sampler, drawn_B: jax.Array, n_tokens: jax.Array) -> jax.Array:
    """One token for each row from logits float32 [B, V]: int32 [B].

    A row's draw depends on its own logits, options, seed and `drawn` (int32 [B], how many tokens it has drawn before)
    and on nothing of the other rows. temp 0 and top_p 0 take the largest logit, the first of equals. Ids from
    `n_tokens` (int32 []) on are never chosen. Sorting is done only where a row asks for a filter, drawing only where a
    row is not greedy.
    """
    masked_BV = mask_padding(logits_BV, n_tokens)
    best_B = jnp.argmax(masked_BV, axis=-1).astype(jnp.int32)
    # Devices flush numbers below the smallest normal one to 0, by which nothing may be divided.
    greedy_B = (sampler.temp < _FLOAT32.tiny) | (sampler.top_p <= 0.0)
    filtered_B = ~greedy_B & ((sampler.top_p < 1.0) | (sampler.top_k < logits_BV.shape[1]))

    def draw() -> jax.Array:
        kept_BV = _if_any(filtered_B, lambda x: keep_probable(x, sampler.top_k, sampler.top_p), masked_BV)
        # After the maximum is subtracted a tiny temperature gives -inf beside 0, not infinity beside infinity.
        shifted_BV = kept_BV - jnp.max(kept_BV, axis=-1, keepdims=True)
        scaled_BV = shifted_BV / jnp.where(greedy_B, 1.0, sampler.temp)[:, None]
        keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(sampler.seed, impl="threefry2x32"), drawn_B)
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, scaled_BV.shape[1:], jnp.float32))(keys_B)
        # Gumbel-max: the arg-max of logits plus Gumbel noise is a draw from their softmax.
        return jnp.where(greedy_B, best_B, jnp.argmax(scaled_BV + noise_BV, axis=-1).astype(jnp.int32))

    return lax.cond(jnp.all(greedy_B), lambda: best_B, draw)


def _if_any(wanted_B: jax.Array, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.cond(jnp.any(wanted_B), function, lambda same: same, x)
