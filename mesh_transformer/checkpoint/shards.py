"""The published npz layout, read into placed global arrays and written from a snapshot, for any M on any mesh.

Reading goes kind by kind, largest first: the blocks of one kind exist on the host beside the arrays that are already
placed, and each member of each file is read once, in slices. Writing reads slices of the snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mesh_transformer import storage
from mesh_transformer.checkpoint import inventory, layout, manifest, placing
from mesh_transformer.checkpoint.blocks import Blocks, merge_copies, overlap, part_region, pieces, rows_region
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.inventory import Inventory
from mesh_transformer.checkpoint.layout import StateLeaf
from mesh_transformer.checkpoint.npz import Header, NpzReader, NpzWriter
from mesh_transformer.checkpoint.snapshot import Snapshot, snapshot
from mesh_transformer.mesh import MP
from mesh_transformer.parameters import Combine, Kind
from mesh_transformer.state import TrainState

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig

__all__ = ["read_step", "snapshot", "write_step"]

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
        manifest.verify(path, found.manifest, _needed(leaves, sections, found.shards, mesh))
    files = _Files(found)
    trees = _read_tensors(files, leaves, sections, model, mesh, np.dtype(dtype), zero_stage)
    counters = {leaf.section: files.counter(number, leaf) for number, leaf in enumerate(leaves) if not leaf.leaf}
    return placing.to_state(path, trees, counters, optimizer, model, mesh, zero_stage)


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
    describe(step_dir, write_files(step_dir, state, model, shards), state, model, shards, **details)


def write_files(
    step_dir: storage.PathLike, state: Snapshot, model: ModelConfig, shards: int
) -> dict[str, manifest.FileEntry]:
    """Write the files of this process's part of a snapshot; on the disk when it returns, with what a manifest says."""
    path = storage.normalise(step_dir)
    state.check(model, shards)
    leaves = layout.state_leaves(model, shards, state.full)
    own = range(shards) if state.own_shards is None else state.own_shards
    for shard in own:
        storage.makedirs(storage.join(path, f"shard_{shard}"))
    runs = np.cumsum([0, *layout.runs(len(leaves))])
    tasks = [(shard, file) for file in range(layout.FILES) for shard in own]

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
    for shard in own:
        storage.sync_folder(storage.join(path, f"shard_{shard}"))
    return entries


def describe(
    step_dir: storage.PathLike, entries: Mapping[str, manifest.FileEntry], state: Snapshot, model: ModelConfig,
    shards: int, **details: Any,
) -> None:  # fmt: skip
    """Write the manifest of files that are all there; of `state` only types count."""
    described = [
        manifest.LeafEntry(leaf.label, leaf.whole_shape, leaf.shard_shape(shards), str(_dtype(leaf, state)))
        for leaf in layout.state_leaves(model, shards, state.full)
    ]
    manifest.write(storage.normalise(step_dir), manifest.Manifest(shards, described, dict(entries), details))


def _add(writer: NpzWriter, leaf: StateLeaf, state: Snapshot, shard: int, shards: int) -> None:
    if leaf.leaf is None:
        writer.add(Header((), np.dtype(np.int32)), [np.array(state.counters[leaf.section], np.int32)])
        return
    header = Header(leaf.shard_shape(shards), _dtype(leaf, state))
    writer.add(header, pieces(state.blocks(leaf), leaf.leaf.layer, shard, shards, leaf.moment))


def _dtype(leaf: StateLeaf, state: Snapshot) -> np.dtype:
    if leaf.leaf is None:
        return np.dtype(np.int32)
    return state.held(leaf.section, leaf.leaf.kind).dtype


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


def _needed(leaves: Sequence[StateLeaf], sections: Sequence[str], shards: int, mesh: Mesh) -> set[str]:
    """The files that hold leaves of these sections, or counters; of several processes, those that this one reads."""
    places = layout.places(len(leaves))
    found = set()
    for (file, _), leaf in zip(places, leaves, strict=True):
        if leaf.leaf is None or leaf.section in sections:
            found |= {f"shard_{shard}/{file}.npz" for shard in _read_of(leaf, shards, mesh)}
    return found


def _read_of(leaf: StateLeaf, shards: int, mesh: Mesh) -> Iterable[int]:
    """The shards whose parts of a leaf this process reads."""
    if jax.process_count() == 1:
        return range(shards)
    if leaf.leaf is None:
        return (0,)
    if leaf.leaf.kind.combine not in (Combine.CONCAT, Combine.PER_SHARD):
        return range(shards)  # copies and summands of small vectors
    mp = int(mesh.shape[MP])
    columns = np.nonzero(np.isin(mesh.devices, mesh.local_devices))[mesh.axis_names.index(MP)]
    return [m for m in range(shards) if any(m * mp < (c + 1) * shards and c * shards < (m + 1) * mp for c in columns)]


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
) -> placing.Trees:
    numbers: dict[tuple[str, tuple[str, str]], list[tuple[int, StateLeaf]]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.leaf is not None:
            numbers.setdefault((leaf.section, leaf.leaf.kind.path), []).append((number, leaf))
    with ThreadPoolExecutor(_WORKERS) as pool:

        def fill(section: str, kind: Kind, blocks: Blocks) -> None:
            _fill(files, numbers[section, kind.path], blocks, pool.map)

        return placing.place_all(fill, sections, model, mesh, dtype, zero_stage)


def _fill(files: _Files, leaves: list[tuple[int, StateLeaf]], blocks: Blocks, run_all: Callable[..., Any]) -> None:
    """Put all layers of one kind into its blocks."""

    def scatter(task: tuple[int, int]) -> None:
        _scatter(files, [(n, leaf) for n, leaf in leaves if files.file(n) == task[0]], *task, blocks)

    if blocks.kind.combine in (Combine.CONCAT, Combine.PER_SHARD):
        # What no block of this process's devices needs is not read.
        shards = [
            shard
            for shard in range(files.shards)
            if any(overlap(region[blocks.kind.stacked :], part_region(blocks.kind, shard, files.shards)) is not None
                   for region in blocks.blocks)
        ]  # fmt: skip
        tasks = sorted({(files.file(n), shard) for n, _ in leaves for shard in shards})
        for _ in run_all(scatter, tasks):
            pass
    else:
        for _ in run_all(lambda item: _merge(files, item[0], item[1], blocks), leaves):
            pass


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
