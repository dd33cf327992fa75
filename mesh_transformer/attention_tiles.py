"""Causal attention on a CPU, one tile of the score matrix after the other, for `fused_attention`.

A tile is QUERY_BLOCK query rows by as many keys, of a few heads; those above the diagonal are left out. All tiles are
steps of one loop, which is what bounds the memory: XLA works on independent blocks of an unrolled program side by side
on a CPU, and keeps all of their scores at once. It is faster too, since a tile stays in a core's cache.

Letters as in `fused_attention`; n heads of a group, t query and T key rows of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesh_transformer.memory import QUERY_BLOCK

HEADS = 8  # whose tiles of 128 x 128 float32 scores take half a megabyte together
# Finite, so that a row with nothing to attend to stays finite too; scores are float32, where it does not overflow.
MASKED = -1e30

Corner = tuple[jax.Array, jax.Array]  # first head, first row

_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def tiles(heads: int, S: int) -> np.ndarray:
    """[tiles, 3], int32: first head, first query row and first key of each tile; S is a multiple of QUERY_BLOCK."""
    firsts = range(0, heads, _group(heads))
    block = QUERY_BLOCK
    corners = [(n, t, T) for n in firsts for t in range(0, S, block) for T in range(0, t + 1, block)]
    return np.asarray(corners, np.int32)


def forward(q_NSK: jax.Array, k_NSK: jax.Array, v_NSK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output [N, S, K] and the log of each row's normaliser [N, S, 1] (float32); q is scaled already."""
    S = q_NSK.shape[1]
    q, k, v = (_padded(x) for x in (q_NSK, k_NSK, v_NSK))
    heads = q.shape[0]
    cut, put = _cut(_group(heads)), _put

    def tile(carry: tuple[jax.Array, ...], corner: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        out, peak, total = carry
        query, key = (corner[0], corner[1]), (corner[0], corner[2])
        scores = _dot("ntk,nTk->ntT", cut(q, query), cut(k, key)) + _hidden(corner)[None]
        before = cut(peak, query)
        highest = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - highest)
        rescaled = jnp.exp(before - highest)  # what earlier tiles of these rows added was relative to their own peak
        row_total = cut(total, query) * rescaled + jnp.sum(weights, axis=-1, keepdims=True)
        row_out = cut(out, query) * rescaled + _dot("ntT,nTk->ntk", weights.astype(v.dtype), cut(v, key))
        return (put(out, row_out, query), put(peak, highest, query), put(total, row_total, query)), None

    rows = (heads, q.shape[1], 1)
    start: tuple[jax.Array, ...] = (_filled(q, q.shape, 0.0), _filled(q, rows, MASKED), _filled(q, rows, 0.0))
    (out, peak, total), _ = lax.scan(tile, start, jnp.asarray(tiles(heads, q.shape[1])))
    return (out / total).astype(v.dtype)[:, :S], (peak + jnp.log(total))[:, :S]


def backward(
    q_NSK: jax.Array,
    k_NSK: jax.Array,
    v_NSK: jax.Array,
    out_NSK: jax.Array,
    log_sum_NS1: jax.Array,
    grad_NSK: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q (scaled), k and v, [N, S, K] each, from the output's."""
    S, f32 = q_NSK.shape[1], jnp.float32
    # sum_T weight * grad_weight of a row, which softmax's gradient subtracts
    row_NS1 = jnp.sum(out_NSK.astype(f32) * grad_NSK.astype(f32), axis=-1, keepdims=True)
    q, k, v, grad, log_sum, row = (_padded(x) for x in (q_NSK, k_NSK, v_NSK, grad_NSK, log_sum_NS1, row_NS1))
    heads = q.shape[0]
    cut = _cut(_group(heads))

    def add(whole: jax.Array, part: jax.Array, at: Corner) -> jax.Array:
        return _put(whole, cut(whole, at) + part, at)

    def tile(carry: tuple[jax.Array, ...], corner: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        query, key = (corner[0], corner[1]), (corner[0], corner[2])
        q_t, g_t, k_T, v_T = cut(q, query), cut(grad, query), cut(k, key), cut(v, key)
        scores = _dot("ntk,nTk->ntT", q_t, k_T) + _hidden(corner)[None]
        weights = jnp.exp(scores - cut(log_sum, query))
        grad_scores = weights * (_dot("ntk,nTk->ntT", g_t, v_T) - cut(row, query))
        weights, grad_scores = weights.astype(v.dtype), grad_scores.astype(q.dtype)
        return (
            add(carry[0], _dot("ntT,nTk->ntk", grad_scores, k_T), query),
            add(carry[1], _dot("ntT,ntk->nTk", grad_scores, q_t), key),
            add(carry[2], _dot("ntT,ntk->nTk", weights, g_t), key),
        ), None

    zeros = tuple(_filled(q, q.shape, 0.0) for _ in range(3))
    (grad_q, grad_k, grad_v), _ = lax.scan(tile, zeros, jnp.asarray(tiles(heads, q.shape[1])))
    return grad_q[:, :S].astype(q.dtype), grad_k[:, :S].astype(k.dtype), grad_v[:, :S].astype(v.dtype)


def _group(heads: int) -> int:
    """As many heads as a tile has: the largest divisor up to HEADS."""
    return max(n for n in range(1, HEADS + 1) if heads % n == 0)


def _padded(x_NSK: jax.Array) -> jax.Array:
    """Zero rows behind the last, up to a whole block: later keys, which no row sees, and rows without a gradient."""
    missing = -x_NSK.shape[1] % QUERY_BLOCK
    return jnp.pad(x_NSK, ((0, 0), (0, missing), (0, 0))) if missing else x_NSK


def _cut(group: int) -> Callable[[jax.Array, Corner], jax.Array]:
    """Takes a tile's rows of its heads: ([N, S, K], (first head, first row)) -> [n, t, K]."""
    return lambda x, at: lax.dynamic_slice(x, (*at, jnp.int32(0)), (group, QUERY_BLOCK, x.shape[2]))


def _put(whole: jax.Array, part: jax.Array, at: Corner) -> jax.Array:
    return lax.dynamic_update_slice(whole, part, (*at, jnp.int32(0)))


def _hidden(corner: jax.Array) -> jax.Array:
    """What is added to a tile's scores [t, T], float32: 0 where a query may see a key."""
    rows = jnp.arange(QUERY_BLOCK, dtype=jnp.int32)
    visible = (corner[1] + rows)[:, None] >= (corner[2] + rows)[None, :]
    return jnp.where(visible, jnp.float32(0), jnp.float32(MASKED))


def _filled(like: jax.Array, shape: tuple[int, ...], value: float) -> jax.Array:
    """A constant, float32, that varies over the same mesh axes as `like`: a loop's carry may not begin to."""
    return jnp.full_like(like, value, jnp.float32, shape=shape)
