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
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mesh_transformer import parameters, storage
from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.npz import NpzReader
from mesh_transformer.errors import CheckpointError
from mesh_transformer.parameters import EMBEDDING, LAYERS, PROJECTION

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mesh_transformer.config import ModelConfig
    from mesh_transformer.state import TrainState

META, PARAMS, MOMENTS = "meta.json", "params", "opt_state"

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


class Reference:
    """One step: what it holds, and its tensors as those of `parameters.kinds`, a section at a time.

    Raises CheckpointError where the model has no `v2_merged_heads`, or the files are of another model, DamagedError
    naming what is missing or corrupt.
    """

    def __init__(self, step_dir: storage.PathLike, model: ModelConfig) -> None:
        self.path, self.model = storage.normalise(step_dir), model
        if model.v2_merged_heads is None:
            raise CheckpointError(
                f"{self.path} is of the 2021 library's version 2, whose heads and columns depend on the shards it was "
                'trained with; set "v2_merged_heads" in the config to the cores_per_replica of that run'
            )
        self._hosts, self.step = _meta(self.path)
        self.full = storage.exists(storage.join(self.path, MOMENTS, "shard_0.npz"))

    def check(self) -> None:
        """Looks at all files' headers, and reads no array."""
        for arrays, first in self._groups():
            with arrays:
                for i, shape in enumerate(_shapes(self.model).values()):
                    arrays.axis(first + i, shape)

    def tensors(self, section: str) -> Whole:
        """All whole tensors of the parameters or of one moment."""
        if section == layout.PARAMS:
            with _Arrays(self.path, PARAMS, self._hosts, len(ORDER)) as arrays:
                return _tensors(arrays, 0, self.model)
        with _Arrays(self.path, MOMENTS, self._hosts, 2 * len(ORDER) + 2) as arrays:
            return _tensors(arrays, 1 if section == layout.MU else 1 + len(ORDER), self.model)

    def counters(self, optimizer: bool = True) -> dict[str, int]:
        """`layout.STEP`, and with the `optimizer` its counts; without, its files are not opened."""
        found = {layout.STEP: self.step}
        if self.full and optimizer:
            with _Arrays(self.path, MOMENTS, self._hosts, 2 * len(ORDER) + 2) as arrays:
                found[layout.COUNT] = int(arrays.read(0, ()))
                found[layout.SCHEDULE_COUNT] = int(arrays.read(2 * len(ORDER) + 1, ()))
        return found

    def _groups(self) -> Iterator[tuple[_Arrays, int]]:
        yield _Arrays(self.path, PARAMS, self._hosts, len(ORDER)), 0
        if self.full:
            for first in (1, 1 + len(ORDER)):
                yield _Arrays(self.path, MOMENTS, self._hosts, 2 * len(ORDER) + 2), first


def read_step(
    step_dir: str,
    model: ModelConfig,
    mesh: Mesh,
    optimizer: bool = True,
    dtype: Any = np.float32,
    zero_stage: int = 0,
) -> TrainState:
    """The step as a new TrainState of global arrays; options as in `shards.read_step`, errors as in `Reference`."""
    import jax
    from jax.sharding import NamedSharding

    from mesh_transformer.checkpoint import placing
    from mesh_transformer.mesh import MP

    found = Reference(step_dir, model)
    shards = int(mesh.shape[MP])

    def placed(section: str) -> Any:
        whole = found.tensors(section)
        moments = section != layout.PARAMS
        specs = parameters.storage_specs(model, shards, zero_stage, moments)
        of = np.float32 if moments else dtype
        return parameters.tree(
            (k, jax.device_put(whole.pop(k.path).astype(of), NamedSharding(mesh, specs[k.module][k.name])))
            for k in parameters.kinds(model, shards)
        )

    sections = (layout.PARAMS, layout.MU, layout.NU) if optimizer and found.full else (layout.PARAMS,)
    trees = {section: placed(section) for section in sections}
    return placing.to_state(found.path, trees, found.counters(optimizer), optimizer, model, mesh, zero_stage)


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

    def axis(self, number: int, shape: Sequence[int]) -> int | None:
        """Along which axis the hosts' slices of array `number` make up `shape`; None where host 0 has it whole.

        Raises CheckpointError where they do not.
        """
        hosts, first = len(self._readers), self._readers[0].header(number).shape
        if first == tuple(shape):
            return None
        short = [
            axis
            for axis, size in enumerate(shape)
            if hosts > 1 and tuple(shape) == (*first[:axis], first[axis] * hosts, *first[axis + 1 :])
        ]
        if len(short) != 1:
            raise CheckpointError(
                f"{self._names[0]}: arr_{number} is {list(first)}, the config expects {list(shape)} over {hosts} "
                "host(s): layers, d_model, n_heads, d_head or n_vocab differ"
            )
        return short[0]

    def read(self, number: int, shape: Sequence[int]) -> np.ndarray:
        """Array `number`, whose whole shape is `shape`: host 0's, or its hosts' slices joined."""
        axis = self.axis(number, shape)
        if axis is None:
            return self._readers[0].read(number)
        return np.concatenate([reader.read(number) for reader in self._readers], axis=axis)


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the reference's twelve tensors, in their order."""
    L, D, V = model.layers, model.d_model, model.n_vocab
    wide, narrow = 3 * model.d_attention + 2 * model.d_ff, model.d_attention + model.d_ff
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(_PLAIN, (L, D)), "/embed/embedding_shard_v2/~/linear/b": (D,),
        "/embed/embedding_shard_v2/~/linear/w": (V, D), "/proj/projection/~/layer_norm/offset": (D,),
        "/proj/projection/~/layer_norm/scale": (D,), "/proj/projection/~/linear/b": (V,),
        "/proj/projection/~/linear/w": (D, V), f"{_INPUT}/b": (L, wide), f"{_INPUT}/w": (L, D, wide),
        f"{_OUTPUT}/w": (L, narrow, D),
    }  # fmt: skip
    return {name: shapes[name] for name in ORDER}


def _tensors(arrays: _Arrays, first: int, model: ModelConfig) -> Whole:
    """The tensors of `parameters.kinds` from the twelve arrays that begin with number `first`."""
    merged = model.v2_merged_heads or 1
    read = {name: arrays.read(first + i, shape) for i, (name, shape) in enumerate(_shapes(model).items())}
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
