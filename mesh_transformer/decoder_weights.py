"""Parameters as decoding reads them: matrices in the compute dtype, and on CPU one array for each layer.

A token's step reads every weight once and does little else, so nothing may copy them. XLA's CPU backend copies a
layer's slice of the stacked arrays before it multiplies by it; there the layers stand alone, and a layer's cache too:
matrices as panels where these are used (see `panels`), all else as views of the same memory. Elsewhere layers and
caches stay stacked and are scanned.
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

from mesh_transformer import panels, parameters
from mesh_transformer.config import ModelConfig
from mesh_transformer.mesh import DP, MP
from mesh_transformer.parameters import Kind
from mesh_transformer.sampler import Leaf
from mesh_transformer.state import Params

_HEAD = (parameters.PROJECTION, "w")


class Weights(NamedTuple):
    """`params`, in the tree of the parameters; where layers stand alone without them, and `layers`, {name: array} of
    each, else None. `head`: the panels of the output head's matrix, which `params` is without then, or None."""

    params: Any
    layers: Any = None
    head: Any = None


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


def specs(model: ModelConfig, mesh: Mesh, whole_matrices: bool = False) -> Weights:
    """Placement of `weights`."""
    whole = parameters.specs(model, mesh.shape[MP])
    if not stands_alone(mesh):
        return Weights(whole, None)
    kinds = parameters.kinds(model, mesh.shape[MP])
    in_panels = {kind.path: _in_panels(kind, mesh, whole_matrices) for kind in kinds}
    whole = parameters.tree((kind, _alone_spec(kind, in_panels[kind.path])) for kind in kinds)
    head = whole[parameters.PROJECTION].pop("w") if in_panels[_HEAD] else None
    return Weights(whole, (whole.pop(parameters.LAYERS),) * model.layers, head)


def weights(model: ModelConfig, mesh: Mesh, params: Params | Weights, whole_matrices: bool = False) -> Weights:
    """What decoding reads, made of parameters. A matrix is copied into panels where these are used, unless
    `whole_matrices` are asked for (of many rows the products of panels are slower), or where it has another dtype than
    computing; all else takes no memory.

    Vectors and tables keep their dtype: the network adds them in float32. The parameters must not be donated while this
    is in use. Weights are returned as they are.
    """
    if isinstance(params, Weights):
        return params
    dtype = jnp.dtype(model.compute_dtype)
    whole = {module: dict(group) for module, group in params.items()}
    del params  # a caller that has let go of them too holds every matrix once
    alone: dict[str, Sequence[jax.Array]] = {}
    head: jax.Array | None = None
    for kind in parameters.kinds(model, mesh.shape[MP]):
        group = whole[kind.module]
        if _is_matrix(kind):
            group[kind.name] = _cast(group[kind.name], dtype)
        if not stands_alone(mesh):
            continue
        in_panels = _in_panels(kind, mesh, whole_matrices)
        if kind.stacked:
            alone[kind.name] = _for_cpu(group.pop(kind.name), kind, mesh, in_panels)
        elif in_panels:
            (head,) = _for_cpu(group.pop(kind.name), kind, mesh, in_panels)
    if not stands_alone(mesh):
        return Weights(whole, None)
    del whole[parameters.LAYERS]
    return Weights(whole, tuple({name: alone[name][i] for name in alone} for i in range(model.layers)), head)


def _is_matrix(kind: Kind) -> bool:
    """Whether the network multiplies by it."""
    return kind.path == _HEAD or (kind.decay and kind.module == parameters.LAYERS)


def _in_panels(kind: Kind, mesh: Mesh, whole_matrices: bool) -> bool:
    fits = _is_matrix(kind) and panels.fits(kind.local_shape(mesh.shape[MP])[-1])
    return fits and not whole_matrices and panels.used_on(mesh)


def _alone_spec(kind: Kind, in_panels: bool) -> P:
    """Placement of a CPU's parameter, of one layer where it is stacked: of panels, a cut of columns cuts the panels."""
    spec = P(*kind.spec()[1:]) if kind.stacked else kind.spec()
    if not in_panels:
        return spec
    rows, columns = (*spec, None, None)[:2]
    return P(columns, rows, None)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else _casting(dtype)(x)


@functools.lru_cache(maxsize=8)
def _casting(dtype: Any) -> Any:
    return jax.jit(lambda x: x.astype(dtype))


def _for_cpu(x: jax.Array, kind: Kind, mesh: Mesh, in_panels: bool) -> Sequence[jax.Array]:
    """The layers of a CPU's array, one where it is not stacked: matrices as panels, others as views where their
    address allows."""
    sharding, shape = NamedSharding(mesh, _alone_spec(kind, in_panels)), kind.layer_shape
    if in_panels:
        shape = (shape[1] // panels.WIDTH, shape[0], panels.WIDTH)
    blocks = [(np.asarray(shard.data), shard.device) for shard in x.addressable_shards]
    if not kind.stacked:
        blocks = [(block[None], device) for block, device in blocks]

    def placed(block: np.ndarray, device: jax.Device) -> jax.Array:
        return jax.device_put(panels.cut(block) if in_panels else block, device, may_alias=True)

    return [
        jax.make_array_from_single_device_arrays(shape, sharding, [placed(b[i, ...], device) for b, device in blocks])
        for i in range(kind.sizes["layers"] if kind.stacked else 1)
    ]
