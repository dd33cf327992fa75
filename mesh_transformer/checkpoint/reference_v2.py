"""Reads the version-2 folders of the 2021 library, onto any mesh.

A folder holds meta.json {total_hosts, step, param_order, opt_order}, params/shard_{host}.npz and
opt_state/shard_{host}.npz; with several hosts each has a slice of what was split. Its input projection is one matrix,
[q, v, k, value, gate] for each of M shards after another, and its output projection has rows [attention, feed-forward]
likewise; here they become the whole tensors of `parameters.kinds`, whose columns do not depend on a mesh.

Letters: L layers, D d_model, M `v2_merged_heads`, H*K width of all heads.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mesh_transformer import parameters, storage
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.npz import NpzReader
from mesh_transformer.checkpoint.shards import fresh_optimizer
from mesh_transformer.errors import CheckpointError
from mesh_transformer.mesh import MP, replicated
from mesh_transformer.parameters import EMBEDDING, LAYERS, PROJECTION
from mesh_transformer.state import OptimizerState, TrainState

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig

META, PARAMS, MOMENTS = "meta.json", "params", "opt_state"

logger = logging.getLogger(__name__)

Whole = dict[tuple[str, str], np.ndarray]

_NORM, _INPUT, _OUTPUT = (
    f"/transformer/transformer_layer_shard_v2/~/{name}" for name in ("layer_norm", "linear", "linear_1")
)
# In the order of the reference's files: what a tensor is called there, and here where it is a parameter as it stands.
_PLAIN = {
    "/embed/embedding_shard_v2/~/linear/b": (EMBEDDING, "b"),
    "/embed/embedding_shard_v2/~/linear/w": (EMBEDDING, "w"),
    "/proj/projection/~/layer_norm/offset": (PROJECTION, "norm_offset"),
    "/proj/projection/~/layer_norm/scale": (PROJECTION, "norm_scale"),
    "/proj/projection/~/linear/b": (PROJECTION, "b"),
    "/proj/projection/~/linear/w": (PROJECTION, "w"),
    f"{_NORM}/offset": (LAYERS, "norm_offset"),
    f"{_NORM}/scale": (LAYERS, "norm_scale"),
    f"{_OUTPUT}/b": (LAYERS, "b2"),
}
ORDER = (*list(_PLAIN)[:8], f"{_INPUT}/b", f"{_INPUT}/w", f"{_OUTPUT}/b", f"{_OUTPUT}/w")


class _Meta(NamedTuple):
    hosts: int
    step: int


def is_reference(step_dir: str) -> bool:
    """Whether a folder is a step of the 2021 library's version 2."""
    return storage.exists(storage.join(step_dir, PARAMS, "shard_0.npz"))


def read_step(
    step_dir: str,
    model: ModelConfig,
    mesh: Mesh,
    optimizer: bool = True,
    dtype: Any = jnp.float32,
    zero_stage: int = 0,
) -> TrainState:
    """The step as a new TrainState of global arrays; options as in `shards.read_step`.

    Raises CheckpointError where the config has no `v2_merged_heads` or the files are of another model, DamagedError
    naming what is missing or corrupt.
    """
    path = storage.normalise(step_dir)
    if model.v2_merged_heads is None:
        raise CheckpointError(
            f"{path} is of the 2021 library's version 2, whose heads and columns depend on the shards it was trained "
            'with; set "v2_merged_heads" in the config to the cores_per_replica of that run'
        )
    found = _meta(path)

    def placed(whole: Whole, dtype: Any, moments: bool) -> Any:
        specs = parameters.storage_specs(model, int(mesh.shape[MP]), zero_stage, moments)
        return parameters.tree(
            (
                kind,
                jax.device_put(whole.pop(kind.path).astype(dtype), NamedSharding(mesh, specs[kind.module][kind.name])),
            )
            for kind in parameters.kinds(model, int(mesh.shape[MP]))
        )

    def scalar(value: Any) -> jax.Array:
        return jax.device_put(np.int32(value), replicated(mesh))

    with _Arrays(path, PARAMS, found.hosts, len(ORDER)) as arrays:
        params = placed(_tensors(arrays, 0, model), dtype, moments=False)
    opt_state = None
    if optimizer and storage.exists(storage.join(path, MOMENTS, "shard_0.npz")):
        with _Arrays(path, MOMENTS, found.hosts, 2 * len(ORDER) + 2) as arrays:
            mu, nu = (placed(_tensors(arrays, 1 + i * len(ORDER), model), np.float32, moments=True) for i in range(2))
            count, updates = arrays.read(0, ()), arrays.read(2 * len(ORDER) + 1, ())
            opt_state = OptimizerState(scalar(count), mu, nu, scalar(updates))
    elif optimizer:
        logger.warning("%s holds no optimizer state, so Adam starts fresh", path)
        opt_state = fresh_optimizer(params, model, mesh, zero_stage)
    return TrainState(params, opt_state, scalar(found.step))


def _meta(path: str) -> _Meta:
    name = storage.join(path, META)
    try:
        meta: Mapping[str, Any] = json.loads(storage.read_bytes(name))
        found, order = _Meta(int(meta["total_hosts"]), int(meta["step"])), tuple(meta["param_order"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{name} is not what the 2021 library's version 2 writes: {error!r}") from error
    if order != ORDER:
        odd = sorted(set(order) ^ set(ORDER)) or ["their order"]
        raise CheckpointError(f"{name}: param_order is not version 2's, it differs in {', '.join(odd)}")
    return found


class _Arrays(contextlib.ExitStack):
    """The arrays of one group of files, whole, from all hosts' slices."""

    def __init__(self, path: str, group: str, hosts: int, count: int) -> None:
        super().__init__()
        self._names = [storage.join(path, group, f"shard_{host}.npz") for host in range(hosts)]
        missing = [name for name in self._names if not storage.exists(name)]
        if missing:
            raise DamagedError(f"{path} is not complete: {', '.join(missing)} missing, of {hosts} hosts")
        self._readers = [self.enter_context(contextlib.closing(NpzReader(name))) for name in self._names]
        for name, reader in zip(self._names, self._readers, strict=True):
            if len(reader) != count:
                raise DamagedError(f"{name} holds {len(reader)} arrays, expected {count}")

    def read(self, number: int, shape: Sequence[int]) -> np.ndarray:
        """Array `number`, whose whole shape is `shape`: host 0's, or its hosts' slices joined along the one axis in
        which they are short."""
        parts = [reader.read(number) for reader in self._readers]
        hosts, first = len(parts), parts[0].shape
        if first == tuple(shape):
            return parts[0]
        short = [axis for axis, size in enumerate(shape) if len(first) == len(shape) and first[axis] * hosts == size]
        joined = np.concatenate(parts, axis=short[0]) if len(short) == 1 and hosts > 1 else parts[0]
        if joined.shape != tuple(shape):
            raise CheckpointError(
                f"{self._names[0]}: arr_{number} is {list(first)}, the config expects {list(shape)} over {hosts} "
                "host(s): layers, d_model, n_heads, d_head or n_vocab differ"
            )
        return joined


def _tensors(arrays: _Arrays, first: int, model: ModelConfig) -> Whole:
    """The tensors of `parameters.kinds` from the twelve arrays that begin with number `first`."""
    L, D, V, merged = model.layers, model.d_model, model.n_vocab, model.v2_merged_heads or 1
    wide, narrow = 3 * model.d_attention + 2 * model.d_ff, model.d_attention + model.d_ff
    shapes = {
        **dict.fromkeys(_PLAIN, (L, D)), "/embed/embedding_shard_v2/~/linear/b": (D,),
        "/embed/embedding_shard_v2/~/linear/w": (V, D), "/proj/projection/~/layer_norm/offset": (D,),
        "/proj/projection/~/layer_norm/scale": (D,), "/proj/projection/~/linear/b": (V,),
        "/proj/projection/~/linear/w": (D, V), f"{_INPUT}/b": (L, wide), f"{_INPUT}/w": (L, D, wide),
        f"{_OUTPUT}/w": (L, narrow, D),
    }  # fmt: skip
    read = {name: arrays.read(first + i, shapes[name]) for i, name in enumerate(ORDER)}
    found = {path: read[name] for name, path in _PLAIN.items()}
    heads, ff = model.d_attention // merged, model.d_ff // merged
    for letter, names in (
        ("w", ("q", "v", "k", "w1", "w_gate")),
        ("b", ("b_q", "b_v", "b_k", "b1", "b_gate")),
    ):
        parts = _apart(read[f"{_INPUT}/{letter}"], merged, (heads, heads, heads, ff, ff), axis=-1)
        found |= {(LAYERS, name): part for name, part in zip(names, parts, strict=True)}
    o, w2 = _apart(read[f"{_OUTPUT}/w"], merged, (heads, ff), axis=-2)
    return found | {(LAYERS, "o"): o, (LAYERS, "w2"): w2}


def _apart(x: np.ndarray, shards: int, widths: Sequence[int], axis: int) -> list[np.ndarray]:
    """Splits an axis that holds, shard after shard, parts of `widths`: each part's pieces joined over the shards."""
    bounds = np.cumsum(widths)[:-1]
    pieces = [np.split(shard, bounds, axis=axis) for shard in np.split(x, shards, axis=axis)]
    return [np.concatenate(each, axis=axis) for each in zip(*pieces, strict=True)]
