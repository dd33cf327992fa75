"""Weights of the layouts that keep layers stacked: "orbax", and the folders of the 2021 library's version 2."""

from __future__ import annotations

import math
import re

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import inventory, manifest, orbax_layout, orbax_steps
from mesh_transformer.checkpoint.blocks import Region
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.formats import ORBAX, REFERENCE_V2
from mesh_transformer.checkpoint.layout import StateLeaf
from mesh_transformer.checkpoint.orbax_files import StoredArray
from mesh_transformer.checkpoint.reference_v2 import Reference
from mesh_transformer.checkpoint.weights import Tensor, Weights
from mesh_transformer.config_groups import ModelConfig
from mesh_transformer.errors import CheckpointError


class OrbaxWeights(Weights):
    """Weights in the layout "orbax"; each array's files are compared with the manifest right before they are read."""

    def __init__(self, step_dir: str, model: ModelConfig | None) -> None:
        described = manifest.read(step_dir)
        if described is None:
            raise DamagedError(f"{step_dir}/{manifest.NAME} is missing; copy the step again, or use another")
        recorded = inventory.recorded(described)
        model = model or recorded
        if model is None:
            raise CheckpointError(f"{step_dir}: its manifest does not say its model; name its config")
        orbax_steps.check(step_dir, described, model)
        full, shards = described.full, described.shards
        super().__init__(step_dir, ORBAX, model, True, shards, full, details=dict(described.details))
        self._described = described
        self._types = {leaf.name: np.dtype(leaf.dtype) for leaf in described.leaves}
        self._arrays: dict[str, StoredArray] = {}
        leaves = orbax_layout.array_leaves(model, shards, full)
        self.counters = {leaf.section: int(self._array(leaf.label).read(())) for leaf in leaves if leaf.kind is None}

    def dtype(self, leaf: StateLeaf) -> np.dtype:
        return self._types[orbax_steps.array_of(leaf).label]

    def read(self, leaf: StateLeaf, buffer: np.ndarray | None = None) -> Tensor:
        if leaf.leaf is None:
            raise ValueError(f"{leaf.label} is a counter; see counters")
        stored = self._array(orbax_steps.array_of(leaf).label)
        whole, layer, dtype = leaf.whole_shape, leaf.leaf.layer, self.dtype(leaf)
        if buffer is None:
            value = np.empty(whole, dtype)
        else:
            value = buffer[: math.prod(whole) * dtype.itemsize].view(dtype).reshape(whole)
        first: Region = () if layer is None else ((layer, layer + 1),)
        for region in orbax_layout.grid(whole, stored.chunks[len(first) :]):
            part = value[tuple(slice(*ends) for ends in region)]
            part[...] = stored.read((*first, *region)).reshape(part.shape)
        return Tensor(leaf, value, dtype)

    def _array(self, label: str) -> StoredArray:
        if label not in self._arrays:
            manifest.verify(self.path, self._described, orbax_layout.files_of(self._described.files, {label}))
            self._arrays[label] = StoredArray(self.path, label)
        return self._arrays[label]


class ReferenceWeights(Weights):
    """Weights of the 2021 library's version 2. The section that is being read is in memory whole."""

    def __init__(self, step_dir: str, model: ModelConfig | None) -> None:
        if model is None:
            raise CheckpointError(
                f"{step_dir} is of the 2021 library's version 2, which does not say its model: name its config, with "
                "v2_merged_heads in it"
            )
        self._reference = Reference(step_dir, model)
        self._reference.check()
        name = storage.name(step_dir)
        details = {"step": int(name[5:])} if re.fullmatch(r"step_\d+", name) else {}
        super().__init__(
            step_dir, REFERENCE_V2, model, True, model.v2_merged_heads or 1, self._reference.full,
            self._reference.counters(), details,
        )  # fmt: skip
        self._section: tuple[str, dict[tuple[str, str], np.ndarray]] | None = None

    def dtype(self, leaf: StateLeaf) -> np.dtype:
        return np.dtype(np.int32 if leaf.leaf is None else np.float32)

    def read(self, leaf: StateLeaf, buffer: np.ndarray | None = None) -> Tensor:
        if leaf.leaf is None:
            raise ValueError(f"{leaf.label} is a counter; see counters")
        if self._section is None or self._section[0] != leaf.section:
            self._section = None  # before the next is read
            self._section = leaf.section, self._reference.tensors(leaf.section)
        whole = self._section[1][leaf.leaf.kind.path]
        value = whole if leaf.leaf.layer is None else whole[leaf.leaf.layer]
        return Tensor(leaf, value.astype(np.float32, copy=False), self.dtype(leaf))
