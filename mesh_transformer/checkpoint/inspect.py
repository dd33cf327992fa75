"""What a step holds, for people: names, shapes, types, counters. Needs no devices and no JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

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
    def step(self) -> int:
        return self.counters[layout.STEP]

    @property
    def config(self) -> dict[str, Any] | None:
        """The config of the run that wrote it, as flat JSON keys, if the manifest says."""
        return self.found.manifest.details.get("config") if self.found.manifest else None

    @property
    def bytes(self) -> int:
        """Bytes of all shards' arrays, as they lie in the files."""
        one = sum(np.dtype(header.dtype).itemsize * math.prod(header.shape) for header in self.found.headers)
        return self.found.shards * one

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


def verify(step_dir: storage.PathLike) -> str:
    """Read every byte of a step and compare checksums; returns which.

    Raises one DamagedError naming every file that is missing or damaged, of those that can be found at all.
    """
    path = storage.normalise(step_dir)
    described = manifest.read(path)
    if described is not None:
        manifest.verify(path, described)
        return "checksums of all files, from the manifest"
    names = [
        f"{shard}/{name}"
        for shard in storage.listdir(path)
        if re.fullmatch(r"shard_\d+", shard)
        for name in storage.listdir(storage.join(path, shard))
        if re.fullmatch(r"\d+\.npz", name)
    ]

    def read(name: str) -> str | None:
        try:
            with contextlib.closing(NpzReader(storage.join(path, name))) as reader:
                for number in range(len(reader)):
                    for _ in reader.pieces(number):
                        pass
        except DamagedError as error:
            return str(error).removeprefix(f"{path}/")
        return None

    with ThreadPoolExecutor(_WORKERS) as pool:
        problems = [line for line in pool.map(read, names) if line]
    if problems:
        raise DamagedError(f"{path}: {'; '.join(problems)}; copy the step again, or use another", problems)
    return "checksums of all arrays, from the files themselves"
