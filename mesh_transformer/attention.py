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
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer import fused_attention
from mesh_transformer.fused_attention import MASKED, causal_block, query_blocks
from mesh_transformer.parameters import T5_BUCKETS

T5_EXACT = 16
T5_MAX_DISTANCE = 128

Bias = Callable[[int, int, int, int], jax.Array]


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


def t5_bias(table_hN: jax.Array, query_start: int, query_stop: int, key_start: int, key_stop: int) -> jax.Array:
    """Bias [1, h, t, T] for a block of queries and keys, from the table [h, 32].

    Buckets are constants of the program by distance only, not by pair.
    """
    by_distance = table_hN.astype(jnp.float32)[:, t5_bucket(np.arange(query_stop - key_start))]
    query, key = jnp.arange(query_start, query_stop)[:, None], jnp.arange(key_start, key_stop)[None, :]
    return by_distance[:, jnp.maximum(query - key, 0)][None]


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

    The half of the score matrix above the diagonal is not computed, nor is anything of it kept for a gradient, which
    computes each block's weights and bias again. `bias(query_start, query_stop, key_start, key_stop)` gives a block's
    bias; `key_visible_BS` hides keys (bool).
    """
    if bias is None and key_visible_BS is None:
        return fused_attention.causal_attention(q_BhSK, k_BhSK, v_BhSK)

    def block(q_BhtK: jax.Array, k_BhTK: jax.Array, v_BhTK: jax.Array, start: int, stop: int) -> jax.Array:
        visible = causal_block(start, stop)[None, None]
        if key_visible_BS is not None:
            visible = visible & key_visible_BS[:, None, None, :stop]
        return attend(q_BhtK, k_BhTK, v_BhTK, visible, None if bias is None else bias(start, stop, 0, stop))

    again = jax.checkpoint(block, static_argnums=(3, 4))
    out = [
        again(q_BhSK[:, :, start:stop], k_BhSK[:, :, :stop], v_BhSK[:, :, :stop], start, stop)
        for start, stop in query_blocks(q_BhSK.shape[2])
    ]
    return checkpoint_name(jnp.concatenate(out, axis=2), "attended")  # as rematerialisation knows it


def t5_bias_of(table_hN: jax.Array | None) -> Bias | None:
    """The bias function of a t5 model; None without a table."""
    return None if table_hN is None else functools.partial(t5_bias, table_hN)
