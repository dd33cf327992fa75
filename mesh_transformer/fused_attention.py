"""Plain causal attention with a backward pass of its own, for training.

The forward pass keeps the output and the log of each row's normaliser; the backward pass computes the weights again
from them, block by block, so that scores are never stored (as in FlashAttention, 2022). Letters as in `attention`;
N is a group of attention heads, of any sequences, that are worked on at once.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer import attention_tiles
from mesh_transformer.attention_tiles import MASKED
from mesh_transformer.memory import QUERY_BLOCK
from mesh_transformer.mesh import MP
from mesh_transformer.weight_products import platform

logger = logging.getLogger(__name__)


def query_blocks(S: int) -> list[tuple[int, int]]:
    """(start, stop) of the blocks of query rows: 128 rows, or sixteen blocks where there are more."""
    block = max(QUERY_BLOCK, S // 16)
    return [(start, min(start + block, S)) for start in range(0, S, block)]


def causal_block(start: int, stop: int) -> jax.Array:
    """Which keys [0, stop) the queries [start, stop) may see: bool [t, T]."""
    return jnp.asarray(np.arange(stop)[None, :] <= np.arange(start, stop)[:, None])


def causal_attention(q_BhSK: jax.Array, k_BhSK: jax.Array, v_BhSK: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(K), causal) v, [B, h, S, K]."""
    if _cudnn_takes(q_BhSK) and cudnn_works():
        # [B, S, h, K] is the layout of cuDNN's fused kernel, which has a backward pass too.
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q_BhSK, k_BhSK, v_BhSK))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return checkpoint_name(out.transpose(0, 2, 1, 3), "attended")
    return _blocked(q_BhSK, k_BhSK, v_BhSK)


@functools.cache
def cudnn_works() -> bool:
    """Whether cuDNN's attention compiles here, gradient and all, inside `shard_map`: tried once, on a tiny example.

    `transformer_shard.settle` asks first, outside any trace. Where it does not work the blocks below are used.
    """
    if platform() != "gpu":
        return False
    mesh = jax.sharding.Mesh(np.asarray(jax.local_devices()[:1]), (MP,))
    whole = jax.sharding.PartitionSpec()
    shape = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").astype(jnp.float32).sum()

    mapped = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=whole, out_specs=whole)
    try:
        jax.jit(mapped).lower(shape, shape, shape).compile()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        logger.warning("cuDNN's fused attention is not available, attention runs in blocks: %s", error)
        return False
    return True


def _cudnn_takes(q_BhSK: jax.Array) -> bool:
    """What cuDNN's fused attention is made for: 16-bit types, and heads of up to 128 in steps of 8."""
    return q_BhSK.dtype in (jnp.bfloat16, jnp.float16) and q_BhSK.shape[3] <= 128 and q_BhSK.shape[3] % 8 == 0


def _hidden(start: int, stop: int) -> jax.Array:
    """What is added to scores [t, T], float32: 0 where a query may see a key. Adding is cheaper than selecting."""
    return jnp.where(causal_block(start, stop), 0.0, MASKED).astype(jnp.float32)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[N, S, K] each -> output [N, S, K] and log of the normaliser [N, S, 1] (float32)."""
    outs, log_sums = [], []
    for start, stop in query_blocks(q.shape[1]):
        scores = jnp.einsum("ntk,nTk->ntT", q[:, start:stop], k[:, :stop], preferred_element_type=jnp.float32)
        scores = scores + _hidden(start, stop)[None]
        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.einsum("ntT,nTk->ntk", weights.astype(v.dtype), v[:, :stop], preferred_element_type=jnp.float32)
        outs.append((out / total).astype(v.dtype))  # divided behind the product: K columns are fewer than T
        log_sums.append(peak + jnp.log(total))
    return jnp.concatenate(outs, axis=1), jnp.concatenate(log_sums, axis=1)


def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, log_sum: jax.Array, grad_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q (scaled), k and v, [N, S, K] each."""
    f32 = jnp.float32
    dot = functools.partial(jnp.einsum, preferred_element_type=f32)
    # sum_T weight * grad_weight of a row, which softmax's gradient subtracts
    row = jnp.sum(out.astype(f32) * grad_out.astype(f32), axis=-1, keepdims=True)
    grad_q, grad_k, grad_v = [], jnp.zeros(k.shape, f32), jnp.zeros(v.shape, f32)
    for start, stop in query_blocks(q.shape[1]):
        q_t, g_t, k_T, v_T = q[:, start:stop], grad_out[:, start:stop], k[:, :stop], v[:, :stop]
        scores = dot("ntk,nTk->ntT", q_t, k_T)
        visible = causal_block(start, stop)[None]
        weights = jnp.exp(jnp.where(visible, scores, MASKED) - log_sum[:, start:stop])
        grad_scores = weights * (dot("ntk,nTk->ntT", g_t, v_T) - row[:, start:stop])
        weights, grad_scores = weights.astype(v.dtype), grad_scores.astype(q.dtype)
        grad_q.append(dot("ntT,nTk->ntk", grad_scores, k_T))
        grad_k = grad_k.at[:, :stop].add(dot("ntT,ntk->nTk", grad_scores, q_t))
        grad_v = grad_v.at[:, :stop].add(dot("ntT,ntk->nTk", weights, g_t))
    return jnp.concatenate(grad_q, axis=1).astype(q.dtype), grad_k.astype(k.dtype), grad_v.astype(v.dtype)


def _worker(name: str, S: int) -> Callable[..., Any]:
    """`_forward` or `_backward`; on a CPU, of more than one block, the same tile by tile."""
    tiled = platform() == "cpu" and S > QUERY_BLOCK
    if name == "forward":
        return attention_tiles.forward if tiled else _forward
    return attention_tiles.backward if tiled else _backward


def _flat(x_BhSK: jax.Array) -> jax.Array:
    return x_BhSK.reshape(-1, *x_BhSK.shape[2:])


def _scaled(q: jax.Array) -> jax.Array:
    return q * jnp.asarray(1.0 / math.sqrt(q.shape[-1]), q.dtype)


@jax.custom_vjp
def _blocked(q_BhSK: jax.Array, k_BhSK: jax.Array, v_BhSK: jax.Array) -> jax.Array:
    return _blocked_forward(q_BhSK, k_BhSK, v_BhSK)[0]


def _blocked_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    out, log_sum = _worker("forward", q.shape[2])(_flat(_scaled(q)), _flat(k), _flat(v))
    # Named, so that rematerialisation can keep them: with both, the backward pass need not repeat this one.
    out, log_sum = checkpoint_name(out.reshape(q.shape), "attended"), checkpoint_name(log_sum, "log_sums")
    return out, (q, k, v, out, log_sum)


def _blocked_backward(residuals: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, log_sum = residuals
    grads = _worker("backward", q.shape[2])(_flat(_scaled(q)), _flat(k), _flat(v), _flat(out), log_sum, _flat(grad))
    grad_q, grad_k, grad_v = (g.reshape(q.shape) for g in grads)
    return _scaled(grad_q), grad_k, grad_v


_blocked.defvjp(_blocked_forward, _blocked_backward)
