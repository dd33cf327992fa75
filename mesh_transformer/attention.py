"""Causal attention of one shard's heads, rotary embedding and the t5 relative bias.

Letters: B sequences, S positions, h heads per shard, K head size, R rotated dims of a head, t query and T key
positions of a block. Softmax, rotary tables and biases are float32 whatever the compute dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer import fused_attention
from mesh_transformer.attention_tiles import MASKED
from mesh_transformer.memory import QUERY_BLOCK, UNROLLED
from mesh_transformer.parameters import T5_BUCKETS

T5_EXACT = 16
T5_MAX_DISTANCE = 128

Bias = Callable[[jax.Array, int], jax.Array]


def rotary_table(positions: np.ndarray, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """sin and cos of pos / 10000^(i/R), i = 0, 2, .. R-2: float32 [S, R/2], computed in float64 and cast once."""
    frequency = 1.0 / 10000 ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    angle = np.asarray(positions, np.float64)[:, None] * frequency[None, :]
    return np.sin(angle).astype(np.float32), np.cos(angle).astype(np.float32)


def rotate(x_BhSK: jax.Array, sin_SR: jax.Array, cos_SR: jax.Array) -> jax.Array:
    """Rotates the interleaved pairs (2i, 2i+1) of the first R dims; the tables are [S, R/2], or [B, S, R/2]."""
    R = 2 * sin_SR.shape[-1]
    x = x_BhSK[..., :R].astype(jnp.float32)
    pairs = x.reshape(*x.shape[:-1], R // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    batched = sin_SR.ndim == 3
    sin = sin_SR[:, None] if batched else sin_SR[None, None]
    cos = cos_SR[:, None] if batched else cos_SR[None, None]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)
    return jnp.concatenate([turned.astype(x_BhSK.dtype), x_BhSK[..., R:]], axis=-1)


def t5_bucket(distance: np.ndarray) -> np.ndarray:
    """Bucket of a causal distance query - key (int array, any shape): exact below 16, logarithmic up to 128."""
    n = np.maximum(np.asarray(distance), 0)
    span = math.log(T5_MAX_DISTANCE / T5_EXACT)
    large = T5_EXACT + (
        np.log(np.maximum(n, 1).astype(np.float32) / T5_EXACT) / np.float32(span) * (T5_BUCKETS - T5_EXACT)
    ).astype(np.int32)
    return np.where(n < T5_EXACT, n, np.minimum(large, T5_BUCKETS - 1)).astype(np.int32)


def t5_bias(table_hN: jax.Array, query_t: jax.Array, keys: int) -> jax.Array:
    """Bias [1, h, t, T] of queries at positions [t], all below `keys`, and the first `keys` keys; from [h, 32].

    Buckets are constants of the program by distance only, not by pair.
    """
    by_distance = table_hN.astype(jnp.float32)[:, t5_bucket(np.arange(keys))]
    return by_distance[:, jnp.maximum(query_t[:, None] - jnp.arange(keys)[None, :], 0)][None]


def attend(
    q_BhtK: jax.Array, k_BhTK: jax.Array, v_BhTK: jax.Array, visible: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    """softmax(q k / sqrt(K) + bias) v -> [B, h, t, K]; `visible` (bool, broadcastable to [B, h, t, T]) masks keys."""
    scale = 1.0 / math.sqrt(q_BhtK.shape[-1])
    scores = jnp.einsum("bhtk,bhTk->bhtT", q_BhtK * jnp.asarray(scale, q_BhtK.dtype), k_BhTK,
                        preferred_element_type=jnp.float32)  # fmt: skip
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BhTK.dtype)
    return jnp.einsum("bhtT,bhTk->bhtk", weights, v_BhTK, preferred_element_type=jnp.float32).astype(v_BhTK.dtype)


def causal_attention(
    q_BhSK: jax.Array,
    k_BhSK: jax.Array,
    v_BhSK: jax.Array,
    bias: Bias | None = None,
    key_visible_BS: jax.Array | None = None,
) -> jax.Array:
    """Causal attention [B, h, S, K] -> [B, h, S, K], over blocks of query rows against the keys up to their end.

    The half of the score matrix above the diagonal is not computed (of long sequences, three eighths), nor is anything
    of it kept for a gradient, which computes each block's weights and bias again. `bias(positions of queries [t],
    number of keys)` gives a block's bias; `key_visible_BS` hides keys (bool).
    """
    if bias is None and key_visible_BS is None:
        return fused_attention.causal_attention(q_BhSK, k_BhSK, v_BhSK)

    def block(q_BhtK: jax.Array, k_BhTK: jax.Array, v_BhTK: jax.Array, query_t: jax.Array) -> jax.Array:
        keys = k_BhTK.shape[2]
        visible = (query_t[:, None] >= jnp.arange(keys)[None, :])[None, None]
        if key_visible_BS is not None:
            visible = visible & key_visible_BS[:, None, None, :keys]
        return attend(q_BhtK, k_BhTK, v_BhTK, visible, None if bias is None else bias(query_t, keys))

    again = jax.checkpoint(block)
    out = []
    for start, stop in _spans(q_BhSK.shape[2]):
        q_BhtK, k_BhTK, v_BhTK = q_BhSK[:, :, start:stop], k_BhSK[:, :, :stop], v_BhSK[:, :, :stop]
        if stop - start <= QUERY_BLOCK:
            out.append(again(q_BhtK, k_BhTK, v_BhTK, jnp.arange(start, stop)))
        else:
            step = lambda q, position, k=k_BhTK, v=v_BhTK: again(q, k, v, position)  # noqa: E731
            out.append(_one_by_one(step, q_BhtK, start))
    return checkpoint_name(jnp.concatenate(out, axis=2), "attended")  # as rematerialisation knows it


def _spans(S: int) -> list[tuple[int, int]]:
    """(start, stop) of what is unrolled: a block of query rows, or as many as make UNROLLED spans of whole blocks."""
    rows = QUERY_BLOCK * max(1, math.ceil(S / (UNROLLED * QUERY_BLOCK)))
    return [(start, min(start + rows, S)) for start in range(0, S, rows)]


def _one_by_one(block: Callable[[jax.Array, jax.Array], jax.Array], q_BhtK: jax.Array, start: int) -> jax.Array:
    """`block(query rows, their positions)` over the rows [B, h, t, K] from position `start` on, a block at a time."""
    B, h, rows, K = q_BhtK.shape
    count = math.ceil(rows / QUERY_BLOCK)
    # Rows behind the last, which fill its block, stand at the last position too, and are cut off again.
    filled = jnp.pad(q_BhtK, ((0, 0), (0, 0), (0, count * QUERY_BLOCK - rows), (0, 0)))
    blocks = filled.reshape(B, h, count, QUERY_BLOCK, K).transpose(2, 0, 1, 3, 4)
    position = np.minimum(start + np.arange(count * QUERY_BLOCK), start + rows - 1).reshape(count, QUERY_BLOCK)
    out = lax.map(lambda each: block(*each), (blocks, position.astype(np.int32)))
    return out.transpose(1, 2, 0, 3, 4).reshape(B, h, -1, K)[:, :, :rows]


def t5_bias_of(table_hN: jax.Array | None) -> Bias | None:
    """The bias function of a t5 model; None without a table."""
    return None if table_hN is None else functools.partial(t5_bias, table_hN)
