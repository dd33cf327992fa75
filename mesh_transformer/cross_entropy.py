"""Cross-entropy over a vocabulary that is split over shards, a chunk of positions at a time.

Letters: N positions (tokens of this replica), C positions of a chunk, D d_model, v vocabulary rows per shard. No
buffer ever has the whole vocabulary, and logits exist for C positions only. In training the gradient of a chunk is
taken while its logits exist, in the forward pass, so that the output matrix product is never computed a second time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh_transformer.collectives import max_over_shards, shard_index, sum_over_shards, varying
from mesh_transformer.weight_products import weight_gradient

Z_LOSS_WEIGHT = 1e-4
# QUIRK v2-unstopped-maximum: as "reference", and the maximum that is subtracted gets a gradient too.
UNSTOPPED = "reference with a gradient at the maximum"


class PositionLosses(NamedTuple):
    """Per position, float32 [N]: cross-entropy, the z-loss with its weight, and 1 where the target is the arg-max: of
    equal logits the first one, which is also what greedy decoding takes (in training any of them)."""

    cross_entropy: jax.Array
    z_loss: jax.Array
    correct: jax.Array


class _Chunk(NamedTuple):
    losses: PositionLosses
    log_z: jax.Array
    probability: jax.Array
    column: jax.Array
    mine: jax.Array
    at_peak: jax.Array


def _chunk(h_CD: jax.Array, w_Dv: jax.Array, b_v: jax.Array, target_C: jax.Array, z_loss: str, ties: bool) -> _Chunk:
    """`ties`: whether `correct` looks for equal logits of lower ids, which is one more pass over the logits."""
    logits = jnp.dot(h_CD, w_Dv.astype(h_CD.dtype), preferred_element_type=jnp.float32)
    logits = logits + b_v.astype(jnp.float32)[None, :]
    peak = max_over_shards(jnp.max(logits, axis=-1))
    exp = jnp.exp(logits - peak[:, None])
    local = target_C - shard_index() * w_Dv.shape[1]
    mine = (local >= 0) & (local < w_Dv.shape[1])
    column = jnp.where(mine, local, 0)
    found = jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0] - peak
    at_peak = logits == peak[:, None]
    # One reduction for all: the normaliser, the target's logit, which lives on one shard only, and ties before it.
    sums = [exp.sum(-1), jnp.where(mine, found, 0.0)]
    if ties:
        before = jnp.arange(w_Dv.shape[1], dtype=jnp.int32)[None, :] < local[:, None]
        sums.append(jnp.sum((at_peak & before).astype(jnp.float32), axis=-1))
    total, hit, *equal = sum_over_shards(jnp.stack(sums))
    losses, log_z = losses_of(peak, total, hit, z_loss)
    if ties:
        losses = losses._replace(correct=losses.correct * (equal[0] == 0.0))
    return _Chunk(losses, log_z, exp / total[:, None], column, mine, at_peak)


def losses_of(peak: jax.Array, total: jax.Array, hit: jax.Array, z_loss: str) -> tuple[PositionLosses, jax.Array]:
    """Losses, and the weighted log of the normaliser that the z-loss squares, from a position's largest logit, its
    sum of exp(logits - peak) and its target's logit less peak."""
    after_max = jnp.log(total)
    # QUIRK z-loss-after-max: the 2021 library penalises log(sum exp(logits - max)), not log Z.
    log_z = after_max + peak if z_loss == "log_z" else after_max
    weight = 0.0 if z_loss == "off" else Z_LOSS_WEIGHT
    losses = PositionLosses(after_max - hit, weight * jnp.square(log_z), (hit >= 0.0).astype(jnp.float32))
    return losses, weight * log_z


def logits_gradient(
    probability: jax.Array,
    log_z: jax.Array,
    weight: jax.Array,
    column: jax.Array,
    mine: jax.Array,
    at_peak: jax.Array,
    z_loss: str,
) -> jax.Array:
    """Gradient [C, v] of sum(weight * (cross-entropy + z-loss)) with respect to the logits [C, v].

    d/dlogits of the cross-entropy is p - onehot; of weight * log_z^2 it is 2 weight log_z p: the maximum gets no
    gradient, unless UNSTOPPED. `column`: of the target, where it is `mine`.
    """
    grad = probability * (weight * (1.0 + 2.0 * log_z))[:, None]
    if z_loss == UNSTOPPED:
        grad = grad - jnp.where(at_peak, (weight * 2.0 * log_z)[:, None], 0.0)
    rows = jnp.arange(column.shape[0])
    return grad.at[rows, column].add(-jnp.where(mine, weight, 0.0))


def chunks(x: jax.Array, size: int) -> jax.Array:
    """[N, ...] -> [N/C, C, ...], padded with zeros at the end."""
    padding = [(0, -x.shape[0] % size)] + [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, padding) if padding[0][1] else x
    return x.reshape(-1, size, *x.shape[1:])


def position_losses(
    h_ND: jax.Array, w_Dv: jax.Array, b_v: jax.Array, target_N: jax.Array, chunk: int, z_loss: str
) -> PositionLosses:
    """Losses of every position, without a gradient (evaluation). `target_N` are ids of the whole vocabulary."""
    size = min(chunk, h_ND.shape[0])

    def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, PositionLosses]:
        return None, _chunk(inputs[0], w_Dv, b_v, inputs[1], z_loss, ties=True).losses

    _, out = lax.scan(step, None, (chunks(h_ND, size), chunks(target_N, size)))
    return PositionLosses(*(x.reshape(-1)[: h_ND.shape[0]] for x in out))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def weighted_loss(
    h_ND: jax.Array, w_Dv: jax.Array, b_v: jax.Array, target_N: jax.Array, weight_N: jax.Array, chunk: int, z_loss: str
) -> tuple[jax.Array, PositionLosses]:
    """sum(weight * (cross-entropy + z-loss)), float32 [], and the losses of every position (no gradient through them).

    `h_ND` varies over mp (see `collectives.copy_to_shards`), since each shard returns its part of h's gradient.
    """
    losses = position_losses(h_ND, w_Dv, b_v, target_N, chunk, z_loss)
    return jnp.sum(weight_N * (losses.cross_entropy + losses.z_loss)), losses


def _weighted_loss_forward(
    h_ND: jax.Array, w_Dv: jax.Array, b_v: jax.Array, target_N: jax.Array, weight_N: jax.Array, chunk: int, z_loss: str
) -> tuple[tuple[jax.Array, PositionLosses], tuple[jax.Array, ...]]:
    size = min(chunk, h_ND.shape[0])

    def step(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, ...]) -> Any:
        grad_w, grad_b = carry
        h_CD, target_C, weight_C = inputs
        c = _chunk(h_CD, w_Dv, b_v, target_C, z_loss, ties=False)
        grad = logits_gradient(c.probability, c.log_z, weight_C, c.column, c.mine, c.at_peak, z_loss)
        narrow = grad.astype(h_CD.dtype)
        grad_h = jnp.dot(narrow, w_Dv.astype(h_CD.dtype).T, preferred_element_type=jnp.float32).astype(h_CD.dtype)
        grad_w = grad_w + weight_gradient(h_CD, narrow)
        return (grad_w, grad_b + grad.sum(0)), (grad_h, c.losses)

    zeros = (jnp.zeros(w_Dv.shape, jnp.float32), jnp.zeros(b_v.shape, jnp.float32))
    start = varying(zeros)  # typed like the gradients that are added to them
    inputs = (chunks(h_ND, size), chunks(target_N, size), chunks(weight_N, size))
    (grad_w, grad_b), (grad_h, losses) = lax.scan(step, start, inputs)
    n = h_ND.shape[0]
    losses = PositionLosses(*(x.reshape(-1)[:n] for x in losses))
    total = jnp.sum(weight_N * (losses.cross_entropy + losses.z_loss))
    grad_h = grad_h.reshape(-1, h_ND.shape[1])[:n]
    return (total, losses), (grad_h, grad_w.astype(w_Dv.dtype), grad_b.astype(b_v.dtype))


def _weighted_loss_backward(chunk: int, z_loss: str, residuals: tuple[jax.Array, ...], cotangents: Any) -> Any:
    del chunk, z_loss
    scale = cotangents[0]
    return tuple((g * scale).astype(g.dtype) for g in residuals) + (None, None)


weighted_loss.defvjp(_weighted_loss_forward, _weighted_loss_backward)
