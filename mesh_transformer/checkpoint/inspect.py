"""What a step holds, for people: names, shapes, types, counters. Needs no devices and no JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mesh_transformer import storage
from mesh_transformer.checkpoint import inventory, layout, manifest
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.inventory import Inventory
from mesh_transformer.checkpoint.manifest import LeafEntry
from mesh_transformer.checkpoint.npz import NpzReader
from mesh_transformer.config_groups import ModelConfig

_WORKERS = 4


@dataclasses.dataclass(frozen=True)
class Inspection:
    """`models`: the models that the shapes fit, most usual first (one, if a manifest says); `counters`: by name."""

    found: Inventory
    models: Sequence[ModelConfig]
    leaves: Sequence[LeafEntry]
    counters: dict[str, int]

    @property
    def parameters(self) -> int:
        """Number of parameters, each counted once."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves if leaf.name.startswith(layout.PARAMS + "/"))


def inspect(step_dir: storage.PathLike, model: ModelConfig | None = None) -> Inspection:
    """Names and shapes of a step from its headers alone.

    Files without a manifest carry no names: those of `model` are used, which must fit, or of the first model that
    fits. Raises CheckpointError if files are missing or damaged (all named), or belong to no model of this project.
    """
    found = inventory.take(step_dir, model)
    models = inventory.candidates(found)
    if model is not None:
        expected = inventory.match(found, model, found.shards)
    elif models:
        expected = layout.state_leaves(models[0], found.shards, found.full)
    else:
        raise DamagedError(
            f"{found.path} has all its files, but their {found.leaves} leaves fit no model of version 1; "
            "compare it with a config: --config FILE"
        )
    leaves = [
        LeafEntry(leaf.label, leaf.leaf.kind.layer_shape if leaf.leaf else (), header.shape, str(header.dtype))
        for leaf, header in zip(expected, found.headers, strict=True)
    ]
    counters = {
        leaf.label: _counter(found, place)
        for leaf, place in zip(expected, layout.places(found.leaves), strict=True)
        if leaf.leaf is None
    }
    return Inspection(found, models, leaves, counters)


def _counter(found: Inventory, place: tuple[int, int]) -> int:
    file, member = place
    with contextlib.closing(NpzReader(layout.shard_file(found.path, 0, file))) as reader:
        return int(reader.read(member))


def verify(found: Inventory) -> str:
    """Read every byte of a step and compare checksums; returns which. Raises one DamagedError naming all bad files."""
    if found.manifest is not None:
        manifest.verify(found.path, found.manifest)
        return "checksums of all files, from the manifest"

    def read(place: tuple[int, int]) -> str | None:
        try:
            with contextlib.closing(NpzReader(layout.shard_file(found.path, *place))) as reader:
                for number in range(len(reader)):
                    for _ in reader.pieces(number):
                        pass
        except DamagedError as error:
            return str(error).removeprefix(f"{found.path}/")
        return None

    places = [(shard, file) for shard in range(found.shards) for file in range(layout.FILES)]
    with ThreadPoolExecutor(_WORKERS) as pool:
        problems = [line for line in pool.map(read, places) if line]
    if problems:
        raise DamagedError(f"{found.path}: {'; '.join(problems)}; copy the step again, or use another")
    return "checksums of all arrays, from the files themselves"
