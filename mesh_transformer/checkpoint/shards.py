"""The published npz layout, read into placed global arrays and written from a snapshot, for any M on any mesh.

Reading goes kind by kind, largest first: the blocks of one kind exist on the host beside the arrays that are already
placed, and each member of each file is read once, in slices. Writing reads slices of the snapshot.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mesh_transformer import parameters, storage
from mesh_transformer.checkpoint import inventory, layout, manifest
from mesh_transformer.checkpoint.blocks import Blocks, merge_copies, pieces, region_of, rows_region
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.inventory import Inventory
from mesh_transformer.checkpoint.layout import StateLeaf
from mesh_transformer.checkpoint.npz import Header, NpzReader, NpzWriter
from mesh_transformer.checkpoint.snapshot import Snapshot, snapshot
from mesh_transformer.mesh import MP, replicated
from mesh_transformer.optimizer import init as fresh_moments
from mesh_transformer.parameters import Combine, Kind
from mesh_transformer.state import OptimizerState, Params, TrainState

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig

__all__ = ["read_step", "snapshot", "write_step"]

logger = logging.getLogger(__name__)

_WORKERS = 4


def read_step(
    step_dir: storage.PathLike,
    model: ModelConfig,
    mesh: Mesh,
    optimizer: bool = True,
    dtype: Any = jnp.float32,
    zero_stage: int = 0,
) -> TrainState:
    """A step as a new TrainState of global arrays on `mesh`; M of the files and of the mesh may differ.

    `optimizer`: with the Adam state; fresh, with a logged notice, where the files are slim. `dtype`: of the
    parameters in memory (moments are float32), cast from the files' bf16, f16 or f32. `zero_stage`: how the state is
    cut over dp (see `parameters.storage_specs`).
    Raises CheckpointError where the files belong to another model, DamagedError (one) naming every file that is
    missing, empty or corrupt; nothing is changed then.
    """
    path = storage.normalise(step_dir)
    found = inventory.take(path, model)
    leaves = inventory.match(found, model, int(mesh.shape[MP]))
    full = found.full
    sections = [layout.PARAMS]
    if full and optimizer:
        sections += [layout.MU, layout.NU]
    if found.manifest is not None:
        manifest.verify(path, found.manifest, _needed(leaves, sections, found.shards))
    files = _Files(found)
    trees = _read_tensors(files, leaves, sections, model, mesh, np.dtype(dtype), zero_stage)
    counters = {leaf.section: files.counter(number, leaf) for number, leaf in enumerate(leaves) if not leaf.leaf}

    def scalar(section: str) -> jax.Array:
        return jax.device_put(np.int32(counters[section]), replicated(mesh))

    params = trees[layout.PARAMS]
    opt_state = None
    if optimizer and full:
        opt_state = OptimizerState(
            scalar(layout.COUNT), trees[layout.MU], trees[layout.NU], scalar(layout.SCHEDULE_COUNT)
        )
    elif optimizer:
        logger.warning("%s is slim: it holds no optimizer state, so Adam starts fresh", path)
        opt_state = fresh_optimizer(params, model, mesh, zero_stage)
    return TrainState(params, opt_state, scalar(layout.STEP))


def fresh_optimizer(params: Params, model: ModelConfig, mesh: Mesh, zero_stage: int) -> OptimizerState:
    """Zero moments, placed as the stage wants them."""
    specs = parameters.storage_specs(model, int(mesh.shape[MP]), zero_stage, moments=True)
    placed: Any = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
    counter: Any = replicated(mesh)
    fresh: OptimizerState = jax.jit(fresh_moments, out_shardings=OptimizerState(counter, placed, placed, counter))(
        params
    )
    return fresh


def _is_spec(x: Any) -> bool:
    return isinstance(x, jax.sharding.PartitionSpec)


def write_step(
    step_dir: storage.PathLike,
    state: Snapshot,
    model: ModelConfig,
    shards: int,
    **details: Any,
) -> None:
    """Write a snapshot's files and then the manifest, with `details` (config, mesh, position, ...) as JSON in it.

    Everything is on the disk when it returns. Raises StorageError; what it wrote until then stays.
    """
    path = storage.normalise(step_dir)
    state.check(model, shards)
    leaves = layout.state_leaves(model, shards, state.full)
    for shard in range(shards):
        storage.makedirs(storage.join(path, f"shard_{shard}"))
    runs = np.cumsum([0, *layout.runs(len(leaves))])
    tasks = [(shard, file) for file in range(layout.FILES) for shard in range(shards)]

    def write(task: tuple[int, int]) -> tuple[str, manifest.FileEntry]:
        shard, file = task
        run = leaves[runs[file] : runs[file + 1]]
        name = layout.shard_file(path, shard, file)
        with storage.errors(name, "write"):
            with NpzWriter(name) as writer:
                for leaf in run:
                    _add(writer, leaf, state, shard, shards)
            return f"shard_{shard}/{file}.npz", manifest.FileEntry(writer.size, writer.crc32c)

    with ThreadPoolExecutor(_WORKERS) as pool:
        entries = dict(pool.map(write, tasks))
    for shard in range(shards):
        storage.sync_folder(storage.join(path, f"shard_{shard}"))
    described = [
        manifest.LeafEntry(leaf.label, leaf.whole_shape, leaf.shard_shape(shards), str(_dtype(leaf, state)))
        for leaf in leaves
    ]
    manifest.write(path, manifest.Manifest(shards, described, entries, details))


def _add(writer: NpzWriter, leaf: StateLeaf, state: Snapshot, shard: int, shards: int) -> None:
    if leaf.leaf is None:
        writer.add(Header((), np.dtype(np.int32)), [np.array(state.counters[leaf.section], np.int32)])
        return
    header = Header(leaf.shard_shape(shards), _dtype(leaf, state))
    writer.add(header, pieces(state.blocks(leaf), leaf.leaf.layer, shard, shards, leaf.moment))


def _dtype(leaf: StateLeaf, state: Snapshot) -> np.dtype:
    if leaf.leaf is None:
        return np.dtype(np.int32)
    return next(iter(state.blocks(leaf).blocks.values())).dtype


class _Files:
    """Where the arrays of a step are."""

    def __init__(self, found: Inventory) -> None:
        self._path = found.path
        self._places = layout.places(found.leaves)
        self.shards = found.shards

    def file(self, number: int) -> int:
        """Which of the 16 files holds a leaf."""
        return self._places[number][0]

    def member(self, number: int) -> int:
        """Which array of its file a leaf is."""
        return self._places[number][1]

    def open(self, file: int, shard: int) -> contextlib.closing[NpzReader]:
        return contextlib.closing(NpzReader(layout.shard_file(self._path, shard, file)))

    def read(self, number: int, leaf: StateLeaf, shard: int) -> np.ndarray:
        """A small leaf's part, whole."""
        member = self.member(number)
        with self.open(self.file(number), shard) as reader:
            return _checked(reader, member, leaf, self.shards).read(member)

    def counter(self, number: int, leaf: StateLeaf) -> int:
        return int(self.read(number, leaf, 0))


def _needed(leaves: Sequence[StateLeaf], sections: Sequence[str], shards: int) -> set[str]:
    """The files that hold leaves of these sections, or counters."""
    places = layout.places(len(leaves))
    files = {
        file for (file, _), leaf in zip(places, leaves, strict=True) if leaf.leaf is None or leaf.section in sections
    }
    return {f"shard_{shard}/{file}.npz" for shard in range(shards) for file in files}


def _checked(reader: NpzReader, member: int, leaf: StateLeaf, shards: int) -> NpzReader:
    header = reader.header(member)
    if header.shape != leaf.shard_shape(shards) or not leaf.fits(header.dtype):
        raise DamagedError(
            f"{reader.path}: arr_{member} ({leaf.label}) is {header.dtype}{list(header.shape)}, "
            f"expected {list(leaf.shard_shape(shards))}"
        )
    return reader


def _read_tensors(
    files: _Files,
    leaves: tuple[StateLeaf, ...],
    sections: list[str],
    model: ModelConfig,
    mesh: Mesh,
    dtype: np.dtype,
    zero_stage: int,
) -> dict[str, dict[str, dict[str, jax.Array]]]:
    numbers: dict[tuple[str, tuple[str, str]], list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.leaf is not None:
            numbers.setdefault((leaf.section, leaf.leaf.kind.path), []).append(number)
    kinds = parameters.kinds(model, int(mesh.shape[MP]))
    wanted = [(section, kind) for section in sections for kind in kinds]
    # Largest first: the extra memory of a kind's blocks then falls into the time when most arrays are still to come.
    wanted.sort(key=lambda item: -int(np.prod(item[1].shape, dtype=np.int64)))
    done: dict[tuple[str, tuple[str, str]], jax.Array] = {}
    with ThreadPoolExecutor(_WORKERS) as pool:
        for section, kind in wanted:
            target = dtype if section == layout.PARAMS else np.dtype(np.float32)
            of_kind = [(n, leaves[n]) for n in numbers[section, kind.path]]
            over_replicas = zero_stage == 3 or (zero_stage == 1 and section != layout.PARAMS)
            sharding = NamedSharding(mesh, kind.spec(over_replicas))
            done[section, kind.path] = _read_kind(files, of_kind, kind, sharding, target, pool.map)
    return {section: parameters.tree((kind, done[section, kind.path]) for kind in kinds) for section in sections}


def _read_kind(
    files: _Files, leaves: list[tuple[int, StateLeaf]], kind: Kind, sharding: NamedSharding, dtype: np.dtype,
    run_all: Callable[..., Any],
) -> jax.Array:  # fmt: skip
    """All layers of one kind, as one placed array."""
    devices = {
        device: region_of(index or (), kind.shape)
        for device, index in sharding.addressable_devices_indices_map(kind.shape).items()
    }
    blocks = Blocks(kind, {
        region: np.empty([stop - start for start, stop in region], dtype) for region in set(devices.values())
    })  # fmt: skip

    def scatter(task: tuple[int, int]) -> None:
        _scatter(files, [(n, leaf) for n, leaf in leaves if files.file(n) == task[0]], *task, blocks)

    if kind.combine in (Combine.CONCAT, Combine.PER_SHARD):
        tasks = sorted({(files.file(n), shard) for n, _ in leaves for shard in range(files.shards)})
        for _ in run_all(scatter, tasks):
            pass
    else:
        for _ in run_all(lambda item: _merge(files, item[0], item[1], blocks), leaves):
            pass
    arrays: dict[jax.Device, jax.Array] = {}
    for region in sorted(blocks.blocks):
        block = blocks.blocks.pop(region)
        arrays |= {device: jax.device_put(block, device) for device, place in devices.items() if place == region}
        jax.block_until_ready(list(arrays.values()))
    return jax.make_array_from_single_device_arrays(kind.shape, sharding, [arrays[device] for device in devices])


def _scatter(files: _Files, leaves: list[tuple[int, StateLeaf]], file: int, shard: int, blocks: Blocks) -> None:
    """One shard's parts of the leaves that lie in one file."""
    with files.open(file, shard) as reader:
        for number, leaf in leaves:
            member = files.member(number)
            _checked(reader, member, leaf, files.shards)
            layer = leaf.leaf.layer if leaf.leaf else None
            for start, rows in reader.pieces(member):
                stop = start + (len(rows) if rows.ndim else 1)
                blocks.scatter(layer, rows_region(blocks.kind, shard, files.shards, start, stop), rows)


def _merge(files: _Files, number: int, leaf: StateLeaf, blocks: Blocks) -> None:
    """Kinds whose parts are copies or summands: small vectors, read whole."""
    kind = blocks.kind
    whole = merge_copies(kind, lambda shard: files.read(number, leaf, shard), files.shards, leaf.moment)
    region = tuple((0, n) for n in kind.layer_shape)
    blocks.scatter(leaf.leaf.layer if leaf.leaf else None, region, whole)
