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
from mesh_transformer.checkpoint import formats, inventory, layout, manifest, orbax_layout
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.inventory import Inventory
from mesh_transformer.checkpoint.manifest import LeafEntry, Manifest
from mesh_transformer.checkpoint.npz import NpzReader
from mesh_transformer.checkpoint.stacked_weights import OrbaxWeights, ReferenceWeights
from mesh_transformer.checkpoint.weights import Weights
from mesh_transformer.config_groups import ModelConfig

_WORKERS = 4


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a step holds: `layout` in words, `parts` as a name and a value; `full`: with the optimizer; `models`: those
    that the shapes fit, most usual first (one, if a manifest or a config says); `counters`: by name; `bytes`: of all
    arrays in the files."""

    path: str
    layout: str
    parts: tuple[str, str]
    full: bool
    described: Manifest | None
    models: Sequence[ModelConfig]
    leaves: Sequence[LeafEntry]
    counters: dict[str, int]
    bytes: int

    @property
    def step(self) -> int:
        return self.counters[layout.STEP]

    @property
    def config(self) -> dict[str, Any] | None:
        """The config of the run that wrote it, as flat JSON keys, if the manifest says."""
        return self.described.details.get("config") if self.described else None

    @property
    def parameters(self) -> int:
        """Number of parameters, each counted once."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves if leaf.name.startswith(layout.PARAMS + "/"))


def inspect(step_dir: storage.PathLike, model: ModelConfig | None = None) -> Inspection:
    """Names and shapes of a step from its headers alone.

    Files without a manifest carry no names: those of `model` are used, which must fit, or of the first model that
    fits. Raises CheckpointError if files are missing or damaged (all named), or belong to no model of this project.
    """
    path = storage.normalise(step_dir)
    kind = formats.format_of(path)
    if kind == formats.SHARDS:
        return _inspect_shards(inventory.take(path, model), model)
    with OrbaxWeights(path, model) if kind == formats.ORBAX else ReferenceWeights(path, model) as weights:
        return _inspect_stacked(weights)


def _inspect_shards(found: Inventory, model: ModelConfig | None) -> Inspection:
    models = inventory.candidates(found)
    if model is not None:
        expected = inventory.match(found, model, found.shards)
    elif models:
        expected = layout.state_leaves(models[0], found.shards, found.full)
    else:
        raise DamagedError(
            f"{found.path} has all its files, but their {found.leaves} leaves fit no model of version 1 (shapes do not "
            "tell one of version 2); compare it with a config: --config FILE"
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
    one = sum(np.dtype(header.dtype).itemsize * math.prod(header.shape) for header in found.headers)
    return Inspection(
        found.path, "published (2021)", ("shards", f"{found.shards}, each of 16 files"), found.full, found.manifest,
        models, leaves, counters, one * found.shards,
    )  # fmt: skip


def _inspect_stacked(weights: Weights) -> Inspection:
    described = manifest.read(weights.path)
    arrays = orbax_layout.array_leaves(weights.model, weights.shards, weights.full)
    if described is not None:
        leaves = described.leaves
        parts = "arrays", f"{len(leaves)}, in {len(described.files)} files"
    else:
        leaves = [LeafEntry(a.label, a.shape, a.shape, "float32" if a.kind else "int32") for a in arrays]
        parts = "arrays", f"{len(leaves)}, as they are in memory here"
    size = sum(np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape) for leaf in leaves)
    return Inspection(
        weights.path, weights.format, parts, weights.full, described, [weights.model], leaves, dict(weights.counters),
        size,
    )  # fmt: skip


def _counter(found: Inventory, place: tuple[int, int]) -> int:
    file, member = place
    with contextlib.closing(NpzReader(layout.shard_file(found.path, 0, file))) as reader:
        return int(reader.read(member))


def verify(step_dir: storage.PathLike) -> str:
    """Read every byte of a step, of any layout, and compare checksums; returns which.

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
        if re.fullmatch(r"shard_\d+|params|opt_state", shard)
        for name in storage.listdir(storage.join(path, shard))
        if re.fullmatch(r"(shard_)?\d+\.npz", name)
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
