"""Embedding and training loss where ZeRO has cut the vocabulary's matrices over the replicas.

A matrix is collected a block of the vocabulary at a time, and each block's gradient is scattered as soon as it is
whole, so that a replica never holds more than a block of the matrix and of its gradient. The loss needs two passes over
the blocks: the first finds every position's normaliser, the second the gradients. A fourth product of that size, and
collecting the matrix twice, is the price.

Letters as in `cross_entropy`, and: P replicas, n chunks of C positions, k rows or columns of a block.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mesh_transformer.collectives import max_over_shards, shard_index, sum_over_shards, varying
from mesh_transformer.cross_entropy import PositionLosses, chunks, logits_gradient, losses_of
from mesh_transformer.mesh import DP
from mesh_transformer.weight_products import weight_gradient

MOST_BLOCKS = 4


def blocks_of(size: int) -> int:
    """In how many blocks a vocabulary of `size` is collected: the most, up to four, that divide it."""
    return next(n for n in range(MOST_BLOCKS, 0, -1) if size % n == 0)


@jax.custom_vjp
def collected_rows(w_vD: jax.Array, row_T: jax.Array, mine_T: jax.Array, probe: jax.Array) -> jax.Array:
    """Rows `row_T` of an embedding `w_vD` [v, D/P] cut over replicas: float32 [T, D], zeros where not `mine_T`."""
    return _rows_forward(w_vD, row_T, mine_T, probe)[0]


def _rows_forward(w_vD: jax.Array, row_T: jax.Array, mine_T: jax.Array, probe: jax.Array) -> tuple[jax.Array, Any]:
    del probe
    k = w_vD.shape[0] // blocks_of(w_vD.shape[0])

    def block(out: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        w_block, start = inputs
        w_kD = lax.all_gather(w_block.astype(jnp.float32), DP, axis=1, tiled=True)
        row, mine = _within(row_T, start, k)
        return out + jnp.where((mine & mine_T)[:, None], jnp.take(w_kD, row, axis=0), 0.0), None

    whole = w_vD.shape[1] * lax.axis_size(DP)
    blocks = (w_vD.reshape(-1, k, w_vD.shape[1]), jnp.arange(0, w_vD.shape[0], k, dtype=jnp.int32))
    out, _ = lax.scan(block, varying(jnp.zeros((row_T.shape[0], whole), jnp.float32)), blocks)
    return out, (row_T, mine_T, jnp.zeros((w_vD.shape[0], 0), w_vD.dtype))


def _rows_backward(residuals: Any, grad_TD: jax.Array) -> tuple[jax.Array, None, None, jax.Array]:
    row_T, mine_T, like = residuals
    v = like.shape[0]
    k = v // blocks_of(v)

    def block(norm: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, mine = _within(row_T, start, k)
        grad_kD = varying(jnp.zeros((k, grad_TD.shape[1]), jnp.float32))
        grad_kD = grad_kD.at[row].add(jnp.where((mine & mine_T)[:, None], grad_TD, 0.0))
        scattered = lax.psum_scatter(grad_kD, DP, scatter_dimension=1, tiled=True)
        return norm + jnp.sum(jnp.square(grad_kD)), scattered

    norm, blocks = lax.scan(block, varying(jnp.float32(0)), jnp.arange(0, v, k, dtype=jnp.int32))
    return blocks.reshape(v, -1).astype(like.dtype), None, None, norm


collected_rows.defvjp(_rows_forward, _rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def collected_loss(
    h_ND: jax.Array,
    w_Dv: jax.Array,
    b_v: jax.Array,
    probe: jax.Array,
    target_N: jax.Array,
    weight_N: jax.Array,
    chunk: int,
    z_loss: str,
) -> tuple[jax.Array, PositionLosses]:
    """`cross_entropy.weighted_loss` of a `w_Dv` [D/P, v] cut over replicas; `probe` as in
    `collectives.gather_from_replicas`."""
    return _forward(h_ND, w_Dv, b_v, probe, target_N, weight_N, chunk, z_loss)[0]


def _collect(w_block: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return lax.all_gather(w_block.astype(dtype), DP, axis=0, tiled=True)


def _forward(
    h_ND: jax.Array,
    w_Dv: jax.Array,
    b_v: jax.Array,
    probe: jax.Array,
    target_N: jax.Array,
    weight_N: jax.Array,
    chunk: int,
    z_loss: str,
) -> tuple[Any, tuple[jax.Array, ...]]:
    del probe
    N, v = h_ND.shape[0], w_Dv.shape[1]
    count = blocks_of(v)
    size = min(chunk, N)
    h, target, weight = chunks(h_ND, size), chunks(target_N, size), chunks(weight_N, size)
    starts = shard_index() * v + jnp.arange(count, dtype=jnp.int32) * (v // count)
    blocks = (w_Dv.reshape(-1, count, v // count).swapaxes(0, 1), b_v.reshape(count, -1), starts)

    peak, total, hit = _normalisers(h, target, blocks)
    losses, log_z = losses_of(peak, total, hit, z_loss)
    grad_h, grad_w, grad_b, norm = _gradients(h, target, weight, blocks, (peak, total, log_z), z_loss)
    losses = PositionLosses(*(x.reshape(-1)[:N] for x in losses))
    value = jnp.sum(weight_N * (losses.cross_entropy + losses.z_loss))
    grad_w = grad_w.swapaxes(0, 1).reshape(w_Dv.shape).astype(w_Dv.dtype)
    grad_h = grad_h.astype(h_ND.dtype).reshape(-1, h_ND.shape[1])[:N]
    return (value, losses), (grad_h, grad_w, grad_b.reshape(-1).astype(b_v.dtype), norm)


def _backward(chunk: int, z_loss: str, residuals: tuple[jax.Array, ...], cotangents: Any) -> Any:
    del chunk, z_loss
    scale = cotangents[0]
    grad_h, grad_w, grad_b, norm = residuals
    scaled = tuple((g * scale).astype(g.dtype) for g in (grad_h, grad_w, grad_b))
    return *scaled, norm * jnp.square(scale), None, None


collected_loss.defvjp(_forward, _backward)


def _logits(h_CD: jax.Array, w_Dk: jax.Array, b_k: jax.Array) -> jax.Array:
    return jnp.dot(h_CD, w_Dk, preferred_element_type=jnp.float32) + b_k.astype(jnp.float32)[None, :]


def _within(ids: jax.Array, start: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The place of ids in a block of `k` that begins at `start`, and whether they lie in it."""
    local = ids - start
    mine = (local >= 0) & (local < k)
    return jnp.where(mine, local, 0), mine


def _normalisers(h_nCD: jax.Array, target_nC: jax.Array, blocks: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[n, C] each: the largest logit, the sum of exp(logits - peak), and the target's logit less peak."""

    def block(carry: Any, inputs: Any) -> tuple[Any, None]:
        w_block, b_k, start = inputs
        w_Dk = _collect(w_block, h_nCD.dtype)

        def one(_: None, inputs: Any) -> tuple[None, Any]:
            h_CD, target_C, peak, total, found = inputs
            logits = _logits(h_CD, w_Dk, b_k)
            higher = jnp.maximum(peak, jnp.max(logits, axis=-1))
            total = total * jnp.exp(peak - higher) + jnp.sum(jnp.exp(logits - higher[:, None]), axis=-1)
            column, mine = _within(target_C, start, logits.shape[1])
            own = jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0]
            return None, (higher, total, jnp.where(mine, own, found))

        return lax.scan(one, None, (h_nCD, target_nC, *carry))[1], None

    nowhere = jnp.full(target_nC.shape, -jnp.inf, jnp.float32)
    start = varying((nowhere, jnp.zeros_like(nowhere), nowhere))
    (own_peak, total, found), _ = lax.scan(block, start, blocks)
    peak = max_over_shards(own_peak)
    hit = jnp.where(found > -jnp.inf, found - peak, 0.0)
    both = sum_over_shards(jnp.stack([total * jnp.exp(own_peak - peak), hit]))
    return peak, both[0], both[1]


def _gradients(
    h_nCD: jax.Array,
    target_nC: jax.Array,
    weight_nC: jax.Array,
    blocks: Any,
    normalisers: tuple[jax.Array, jax.Array, jax.Array],
    z_loss: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of h [n, C, D], of w's blocks, scattered, of b's, and the squared norm of this replica's w gradient."""
    D, f32 = h_nCD.shape[2], jnp.float32

    def block(carry: Any, inputs: Any) -> Any:
        grad_h, norm = carry
        w_block, b_k, start = inputs
        w_Dk = _collect(w_block, h_nCD.dtype)

        def one(sums: Any, inputs: Any) -> Any:
            grad_w, grad_b = sums
            h_CD, target_C, weight_C, peak, total, log_z, grad_h = inputs
            logits = _logits(h_CD, w_Dk, b_k)
            probability = jnp.exp(logits - peak[:, None]) / total[:, None]
            column, mine = _within(target_C, start, logits.shape[1])
            grad = logits_gradient(probability, log_z, weight_C, column, mine, logits == peak[:, None], z_loss)
            narrow = grad.astype(h_CD.dtype)
            grad_h = grad_h + jnp.dot(narrow, w_Dk.T, preferred_element_type=f32)
            grad_w = grad_w + weight_gradient(h_CD, narrow)
            return (grad_w, grad_b + grad.sum(0)), grad_h

        zeros = varying((jnp.zeros((D, b_k.shape[0]), f32), jnp.zeros(b_k.shape, f32)))
        (grad_w, grad_b), grad_h = lax.scan(one, zeros, (h_nCD, target_nC, weight_nC, *normalisers, grad_h))
        scattered = lax.psum_scatter(grad_w, DP, scatter_dimension=0, tiled=True)
        return (grad_h, norm + jnp.sum(jnp.square(grad_w))), (scattered, grad_b)

    start = varying((jnp.zeros(h_nCD.shape, f32), jnp.float32(0)))
    (grad_h, norm), (grad_w, grad_b) = lax.scan(block, start, blocks)
    return grad_h, grad_w, grad_b, norm
