"""Steps in the "orbax" layout: written from a snapshot or a stream, read onto any mesh by any number of processes.

Each process writes the blocks of its own devices. Reading goes array by array, largest first, and each process reads
each chunk that it needs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import layout, manifest, orbax_files, orbax_layout
from mesh_transformer.checkpoint.blocks import Blocks, Region, overlap
from mesh_transformer.checkpoint.casting import cast
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.manifest import LeafEntry, Manifest
from mesh_transformer.checkpoint.orbax_files import Arrays, StoredArray
from mesh_transformer.checkpoint.orbax_layout import ArrayLeaf, NewArray
from mesh_transformer.errors import CheckpointError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mesh_transformer.checkpoint.layout import StateLeaf
    from mesh_transformer.checkpoint.snapshot import Snapshot
    from mesh_transformer.checkpoint.weights import Tensor
    from mesh_transformer.config import ModelConfig
    from mesh_transformer.parameters import Kind
    from mesh_transformer.state import TrainState

_COUNTER = np.dtype(np.int32)
_WORKERS = 4
_READERS = 2  # chunks that are being read at a time; tensorstore holds each of them twice


def write_step(step_dir: storage.PathLike, state: Snapshot, model: ModelConfig, **details: Any) -> None:
    """Write this process's part of a snapshot, and when all processes have, the manifest with `details` in it.

    Everything is on the disk when it returns. Raises StorageError; what it wrote until then stays.
    """
    import jax

    path = storage.normalise(step_dir)
    state.check(model, state.mesh_shards)
    leaves = orbax_layout.array_leaves(model, state.mesh_shards, state.full)
    new: dict[str, NewArray] = {}
    for leaf in leaves:
        if leaf.kind is None:
            new[leaf.label] = NewArray((), _COUNTER, ())
        else:
            held = state.held(leaf.section, leaf.kind)
            chunks = orbax_layout.chunks(held.block_shape, held.dtype.itemsize, leaf.kind.stacked)
            new[leaf.label] = NewArray(leaf.shape, held.dtype, chunks)

    def fill(arrays: Arrays) -> None:
        for leaf in leaves:
            if leaf.kind is not None:
                for region, block in sorted(state.held(leaf.section, leaf.kind).blocks.items()):
                    arrays.write(leaf.label, region, block)
            elif jax.process_index() == 0:
                arrays.write(leaf.label, (), np.array(state.counters[leaf.section], _COUNTER))

    orbax_files.save(path, new, fill)
    if jax.process_index() == 0:
        describe(path, new, state.mesh_shards, details)
    orbax_files.meet()


def write_stream(
    step_dir: str, model: ModelConfig, shards: int, tensors: Iterable[Tensor], counters: Mapping[str, int],
    dtypes: Callable[[StateLeaf], np.dtype], details: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write a step from tensors of single layers that come one at a time, in any order.

    `dtypes`: the type of a tensor, the same for all layers. `shards` matters only to norm layernorm-desync. Raises
    CheckpointError where a tensor is missing or comes twice, or a value is too large for its type, and StorageError.
    """
    full = layout.COUNT in counters
    leaves = orbax_layout.array_leaves(model, shards, full)
    types = {array_of(leaf).label: dtypes(leaf) for leaf in layout.state_leaves(model, shards, full) if leaf.leaf}
    new: dict[str, NewArray] = {}
    for leaf in leaves:
        dtype = types.get(leaf.label, _COUNTER)
        stacked = leaf.kind is not None and leaf.kind.stacked
        chunks = orbax_layout.chunks(leaf.shape, dtype.itemsize, stacked, layer_by_layer=True)
        new[leaf.label] = NewArray(leaf.shape, dtype, chunks)
    missing = {
        (leaf.label, layer)
        for leaf in leaves
        if leaf.kind is not None
        for layer in (range(model.layers) if leaf.kind.stacked else (None,))
    }

    def fill(arrays: Arrays) -> None:
        for leaf in leaves:
            if leaf.kind is None:
                arrays.write(leaf.label, (), np.array(counters[leaf.section], _COUNTER))
        for tensor in tensors:
            whose, layer = array_of(tensor.leaf), tensor.leaf.leaf.layer if tensor.leaf.leaf else None
            if (whose.label, layer) not in missing:
                raise CheckpointError(f"{tensor.leaf.label} came, which is not one of the tensors still expected")
            missing.remove((whose.label, layer))
            region = tuple((0, n) for n in tensor.value.shape)
            value = cast(tensor.value, new[whose.label].dtype, tensor.leaf.label)
            if layer is not None:
                region, value = ((layer, layer + 1), *region), value[None]
            arrays.write(whose.label, region, value)
            arrays.finish()  # its memory may be used again for the next
        if missing:
            raise CheckpointError(f"{len(missing)} tensors never came, such as {sorted(missing, key=str)[0][0]}")

    orbax_files.save(step_dir, new, fill)
    describe(step_dir, new, shards, details)


def array_of(leaf: StateLeaf) -> ArrayLeaf:
    """The array that holds a leaf of the published layout."""
    return ArrayLeaf(leaf.section, None if leaf.leaf is None else leaf.leaf.kind)


def describe(step_dir: str, new: Mapping[str, NewArray], shards: int, details: Mapping[str, Any]) -> None:
    """Write the manifest of arrays whose files are all there."""
    names = file_names(step_dir)
    storage.sync_folder(storage.join(step_dir, orbax_layout.FOLDER))
    leaves = [LeafEntry(label, array.shape, array.chunks, str(array.dtype)) for label, array in new.items()]
    entries = manifest.entries_of(step_dir, names)
    manifest.write(step_dir, Manifest(shards, leaves, entries, dict(details), manifest.ORBAX))


def file_names(step_dir: str) -> list[str]:
    """The files of a step's arrays, and Orbax's own, named from the step's folder on."""
    found = []
    for name in storage.listdir(storage.join(step_dir, orbax_layout.FOLDER)):
        inner = f"{orbax_layout.FOLDER}/{name}"
        if orbax_layout.is_state_file(name):
            found.append(inner)
        elif orbax_layout.is_array_folder(name):
            found += [f"{inner}/{file}" for file in storage.listdir(storage.join(step_dir, inner))]
    return found


def check(path: str, described: Manifest, model: ModelConfig | None, mesh_shards: int | None = None) -> None:
    """A look at every file, without reading any.

    Raises one DamagedError naming all that are missing or of another size, and CheckpointError where the step is not
    of `model` (None: of any), on `mesh_shards` model-parallel shards.
    """
    there = set(file_names(path))

    def problem(name: str) -> str | None:
        if name not in there:
            return f"{name} is missing"
        size, expected = storage.size(storage.join(path, name)), described.files[name].bytes
        return None if size == expected else f"{name} has {size} bytes, expected {expected}"

    with ThreadPoolExecutor(_WORKERS) as pool:
        problems = [line for line in pool.map(problem, described.files) if line]
    if problems:
        raise DamagedError(f"{path} is not complete: {'; '.join(problems)}; copy it again, or use another", problems)
    if model is not None:
        match(path, described, model, mesh_shards or described.shards)


def match(path: str, described: Manifest, model: ModelConfig, mesh_shards: int) -> tuple[ArrayLeaf, ...]:
    """The arrays of a step. Raises CheckpointError listing config against checkpoint where they differ."""
    if model.norm == "layernorm-desync" and described.shards != mesh_shards:
        raise CheckpointError(
            f"{path} was saved on {described.shards} shards, the config has cores_per_replica {mesh_shards}: with norm "
            f"'layernorm-desync' each shard has its own norms, so they must be equal: set it to {described.shards}"
        )
    expected = orbax_layout.array_leaves(model, mesh_shards, described.full)
    config = described.details.get("config") or {}
    shapes = {leaf.name: leaf.shape for leaf in described.leaves}
    different = [
        f"{key} {wanted} in the config, {config[key]} in the checkpoint"
        for key in ("version", "layers", "d_model", "n_heads", "d_head", "n_vocab", "norm", "pe")
        if key in config and config[key] != (wanted := getattr(model, key))
    ]
    odd = [label for label in shapes if label not in {leaf.label for leaf in expected}]
    odd += [leaf.label for leaf in expected if shapes.get(leaf.label) != leaf.shape]
    if different or odd:
        first = f"; first array that differs: {odd[0]}" if odd else ""
        raise CheckpointError(
            f"{path} does not hold the config's model: {'; '.join(different)}{first}. Use the config it was trained "
            "with"
        )
    return expected


def read_step(
    step_dir: storage.PathLike, described: Manifest, model: ModelConfig, mesh: Mesh, optimizer: bool, dtype: Any,
    zero_stage: int,
) -> TrainState:  # fmt: skip
    """The step as a new TrainState of global arrays; options and errors as in `shards.read_step`."""
    from mesh_transformer.checkpoint import placing
    from mesh_transformer.mesh import MP

    path = storage.normalise(step_dir)
    check(path, described, model, int(mesh.shape[MP]))
    leaves = match(path, described, model, int(mesh.shape[MP]))
    sections = [layout.PARAMS]
    if described.full and optimizer:
        sections += [layout.MU, layout.NU]
    needed = [leaf.label for leaf in leaves if leaf.kind is None or leaf.section in sections]
    manifest.verify(path, described, orbax_layout.files_of(described.files, needed))
    counters = {leaf.section: counter(path, leaf) for leaf in leaves if leaf.kind is None}
    with ThreadPoolExecutor(_READERS) as pool:

        def fill(section: str, kind: Kind, blocks: Blocks) -> None:
            _fill(StoredArray(path, ArrayLeaf(section, kind).label), blocks, pool)

        trees = placing.place_all(fill, sections, model, mesh, np.dtype(dtype), zero_stage)
    return placing.to_state(path, trees, counters, optimizer, model, mesh, zero_stage)


def counter(path: str, leaf: ArrayLeaf) -> int:
    return int(StoredArray(path, leaf.label).read(()))


def _fill(stored: StoredArray, blocks: Blocks, pool: Executor) -> None:
    """Read every chunk that some block needs a part of, once."""

    def scatter(region: Region) -> None:
        blocks.scatter(None, region, stored.read(region))

    wanted = [
        region
        for region in orbax_layout.grid(stored.shape, stored.chunks)
        if any(overlap(region, place) is not None for place in blocks.blocks)
    ]
    for _ in pool.map(scatter, wanted):
        pass
