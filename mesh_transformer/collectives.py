"""The few collectives between model-parallel shards, each with what it does forward and backward.

They are written for `jax.shard_map` with replication checking on (`check_vma=True`): a value's type says over which
mesh axes it varies, so a missing or doubled sum is a type error while tracing, not a wrong gradient.

Over an axis of size 1 nothing varies (`steps.live` keeps such axes out of the specs), and every collective is left
out of the program: XLA would keep it, as a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh_transformer.mesh import DP, MP


def copy_to_shards(x: jax.Array) -> jax.Array:
    """Forward: nothing (every mp shard reads the same value). Backward: sum of the shards' gradients."""
    return x if lax.axis_size(MP) == 1 else lax.pcast(x, MP, to="varying")


def sum_over_shards(x: jax.Array) -> jax.Array:
    """Forward: sum over mp. Backward: nothing (each shard gets the whole gradient)."""
    return x if lax.axis_size(MP) == 1 else lax.psum(x, MP)


def max_over_shards(x: jax.Array) -> jax.Array:
    """Forward: maximum over mp. Backward: none; only ever applied where no gradient flows."""
    x = lax.stop_gradient(x)
    return x if lax.axis_size(MP) == 1 else lax.pmax(x, MP)


def copy_to_replicas(tree: Any) -> Any:
    """Forward: nothing. Backward: sum over dp.

    Applied to parameters *outside* the function that is differentiated, it keeps each replica's gradient to itself,
    so that the replicas are summed once a step instead of once a layer and microbatch.
    """
    return tree if lax.axis_size(DP) == 1 else jax.tree.map(lambda x: lax.pcast(x, DP, to="varying"), tree)


class Probe(NamedTuple):
    """Two float32 [] that nothing reads: their gradients are the squared norms of one replica's own gradient.

    `split`: of what is split over mp; `whole`: of what is whole on every shard.
    """

    split: jax.Array
    whole: jax.Array


def make_probe() -> Probe:
    """A probe, typed as the gradients that it measures vary."""
    zero = jnp.float32(0)
    return Probe(varying(zero), varying(zero, (DP,)))


@jax.custom_vjp
def observe(x: jax.Array, probe: jax.Array) -> jax.Array:
    """Forward: `x`. Backward: x's gradient, and its squared norm as the gradient of `probe` (float32 [])."""
    del probe
    return x


def _observe_forward(x: jax.Array, probe: jax.Array) -> tuple[jax.Array, None]:
    del probe
    return x, None


def _observe_backward(_: None, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return grad, jnp.sum(jnp.square(grad.astype(jnp.float32)))


observe.defvjp(_observe_forward, _observe_backward)


def gather_from_replicas(block: jax.Array, axis: int, dtype: jnp.dtype, probe: jax.Array) -> jax.Array:
    """Forward: the replicas' blocks joined along `axis`, in `dtype`. Backward: sum over dp, of which each replica keeps
    its block (a reduce-scatter), in float32.

    `probe` (float32 [], varying) is not read; its gradient is the squared norm of this replica's own gradient, which
    the reduce-scatter hides.
    """
    return _gather(axis, dtype, block, probe) if lax.axis_size(DP) > 1 else block


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(axis: int, dtype: jnp.dtype, block: jax.Array, probe: jax.Array) -> jax.Array:
    del probe
    return lax.all_gather(block.astype(dtype), DP, axis=axis, tiled=True)


def _gather_forward(axis: int, dtype: jnp.dtype, block: jax.Array, probe: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather(axis, dtype, block, probe), jnp.zeros((), block.dtype)


def _gather_backward(axis: int, dtype: jnp.dtype, like: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    del dtype
    grad = grad.astype(jnp.float32)
    block = lax.psum_scatter(grad, DP, scatter_dimension=axis, tiled=True)
    return block.astype(like.dtype), jnp.sum(jnp.square(grad))


_gather.defvjp(_gather_forward, _gather_backward)


def scatter_over_replicas(x: jax.Array, axis: int) -> jax.Array:
    """Forward: sum over dp, of which each replica keeps its block of `axis`. Backward: not used."""
    return x if lax.axis_size(DP) == 1 else lax.psum_scatter(x, DP, scatter_dimension=axis, tiled=True)


def gather_from_shards(x: jax.Array) -> jax.Array:
    """Forward: the shards' last axes joined, on every shard. Backward: sum over mp, of which each keeps its part."""
    return x if lax.axis_size(MP) == 1 else lax.all_gather(x, MP, axis=x.ndim - 1, tiled=True)


def part_of_shard(x: jax.Array) -> jax.Array:
    """Forward: this shard's part of the last axis, of which every shard has the whole. Backward: zeros around it."""
    size = x.shape[-1] // lax.axis_size(MP)
    return lax.dynamic_slice_in_dim(x, shard_index() * size, size, x.ndim - 1)


def sum_over_replicas(tree: Any) -> Any:
    """Forward: sum over dp. Backward: nothing."""
    return tree if lax.axis_size(DP) == 1 else lax.psum(tree, DP)


def varying(x: Any, over: Sequence[str] = (DP, MP)) -> Any:
    """`x`, the same everywhere so far, typed as varying over mesh axes: for sums that are still to vary."""
    axes = tuple(axis for axis in over if lax.axis_size(axis) > 1)
    return lax.pcast(x, axes, to="varying") if axes else x


def shard_index() -> jax.Array:
    """Number of this shard on the mp axis, int32 []."""
    return jnp.int32(0) if lax.axis_size(MP) == 1 else lax.axis_index(MP)
