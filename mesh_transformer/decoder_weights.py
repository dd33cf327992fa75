"""Parameters as decoding reads them: matrices in the compute dtype, and on CPU one array for each layer.

A token's step reads every weight once and does little else, so nothing may copy them. XLA's CPU backend copies a
layer's slice of the stacked arrays before it multiplies by it; there the layers stand alone, as views of the same
memory, and a layer's cache too. Elsewhere layers and caches stay stacked and are scanned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer import parameters
from mesh_transformer.config import ModelConfig
from mesh_transformer.mesh import DP, MP
from mesh_transformer.sampler import Leaf
from mesh_transformer.state import Params


class Weights(NamedTuple):
    """`params`, in the tree of the parameters; where layers stand alone without them, and `layers`, {name: array} of
    each, else None."""

    params: Any
    layers: Any


def stands_alone(mesh: Mesh) -> bool:
    """Whether layers and caches are one array a layer on this mesh's platform."""
    return bool(mesh.devices.flat[0].platform == "cpu")


def cache_spec(mesh: Mesh) -> P:
    """Placement of keys and values: by sequences over dp, by heads over mp."""
    return P(DP, MP) if stands_alone(mesh) else P(None, DP, MP)


def cache_heads(model: ModelConfig, mp: int) -> int:
    """Attention heads of a layer's cache, those of all shards (see `layers.qkv`: some models keep all on each)."""
    whole = model.d_attention // mp % model.attention_width == 0
    return model.attention_heads if whole else model.attention_heads * mp


def each_layer(function: Callable[..., Any], *caches: Leaf) -> Any:
    """`function` of each layer's cache (and what else is given for each layer), whether these stand alone or not."""
    if isinstance(caches[0], tuple):
        return tuple(function(*layer) for layer in zip(*caches, strict=True))
    return jax.vmap(function)(*caches)


def specs(model: ModelConfig, mesh: Mesh) -> Weights:
    """Placement of `weights`."""
    whole = parameters.specs(model, mesh.shape[MP])
    if not stands_alone(mesh):
        return Weights(whole, None)
    layer = {name: P(*spec[1:]) for name, spec in whole.pop(parameters.LAYERS).items()}
    return Weights(whole, (layer,) * model.layers)


def weights(model: ModelConfig, mesh: Mesh, params: Params | Weights) -> Weights:
    """What decoding reads, made of parameters; costs no memory where these have the compute dtype already.

    Vectors and tables keep their dtype: the network adds them in float32. The parameters must live as long as this,
    undonated. Weights are returned as they are.
    """
    if isinstance(params, Weights):
        return params
    dtype = jnp.dtype(model.compute_dtype)
    whole = {module: dict(group) for module, group in params.items()}
    for kind in parameters.kinds(model, mesh.shape[MP]):
        if kind.decay and kind.module in (parameters.LAYERS, parameters.PROJECTION):
            whole[kind.module][kind.name] = _cast(whole[kind.module][kind.name], dtype)
    if not stands_alone(mesh):
        return Weights(whole, None)
    placed = specs(model, mesh).layers[0]
    stacked = whole.pop(parameters.LAYERS)
    alone = {name: _unstacked(x, NamedSharding(mesh, placed[name])) for name, x in stacked.items()}
    return Weights(whole, tuple({name: alone[name][i] for name in alone} for i in range(model.layers)))


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else _casting(dtype)(x)


@functools.lru_cache(maxsize=8)
def _casting(dtype: Any) -> Any:
    return jax.jit(lambda x: x.astype(dtype))


def _unstacked(x: jax.Array, sharding: NamedSharding) -> Sequence[jax.Array]:
    """The layers of a CPU's array, each a view where its address allows."""
    blocks = [(np.asarray(shard.data), shard.device) for shard in x.addressable_shards]
    return [
        jax.make_array_from_single_device_arrays(
            x.shape[1:], sharding, [jax.device_put(block[i, ...], device, may_alias=True) for block, device in blocks]
        )
        for i in range(x.shape[0])
    ]
