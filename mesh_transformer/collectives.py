"""The few collectives between model-parallel shards, each with what it does forward and backward.

They are written for `jax.shard_map` with replication checking on (`check_vma=True`): a value's type says over which
mesh axes it varies, so a missing or doubled sum is a type error while tracing, not a wrong gradient.
"""

from __future__ import annotations

import jax
from jax import lax

from mesh_transformer.mesh import DP, MP


def copy_to_shards(x: jax.Array) -> jax.Array:
    """Forward: nothing (every mp shard reads the same value). Backward: sum of the shards' gradients."""
    return lax.pcast(x, MP, to="varying")


def sum_over_shards(x: jax.Array) -> jax.Array:
    """Forward: sum over mp. Backward: nothing (each shard gets the whole gradient)."""
    return lax.psum(x, MP)


def max_over_shards(x: jax.Array) -> jax.Array:
    """Forward: maximum over mp. Backward: none; only ever applied where no gradient flows."""
    return lax.pmax(lax.stop_gradient(x), MP)


def copy_to_replicas(tree: jax.Array) -> jax.Array:
    """Forward: nothing. Backward: sum over dp.

    Applied to parameters *outside* the function that is differentiated, it keeps each replica's gradient to itself,
    so that the replicas are summed once a step instead of once a layer and microbatch.
    """
    return jax.tree.map(lambda x: lax.pcast(x, DP, to="varying"), tree)


def sum_over_replicas(tree: jax.Array) -> jax.Array:
    """Forward: sum over dp. Backward: nothing."""
    return lax.psum(tree, DP)


def shard_index() -> jax.Array:
    """Number of this shard on the mp axis, int32 []."""
    return lax.axis_index(MP)
