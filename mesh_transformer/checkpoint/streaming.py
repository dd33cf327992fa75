"""Weights read and written one whole tensor at a time, so that no conversion needs more memory than its largest tensor.

Every conversion is a composition of the two halves. Re-sharding into one shard, in another float type:

    with open_weights("step_383500_slim", config.model) as weights:
        tensors = (tensor._replace(dtype=np.dtype(np.float32)) for tensor in weights.tensors())
        write_weights("out", weights.model, 1, tensors, weights.counters, weights.details)

Nothing here needs JAX, a device, or the memory of a model.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import inventory, layout, manifest, meta
from mesh_transformer.checkpoint.blocks import merge_copies, rows_region
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.formats import ORBAX, REFERENCE_V2, SHARDS, format_of
from mesh_transformer.checkpoint.inventory import Inventory
from mesh_transformer.checkpoint.layout import StateLeaf
from mesh_transformer.checkpoint.npz import NpzReader
from mesh_transformer.checkpoint.stacked_weights import OrbaxWeights, ReferenceWeights
from mesh_transformer.checkpoint.store import find_step
from mesh_transformer.checkpoint.weights import Tensor, Weights, tensor_leaves
from mesh_transformer.config_groups import ModelConfig
from mesh_transformer.errors import CheckpointError
from mesh_transformer.parameters import Combine

__all__ = ["Tensor", "Weights", "open_weights", "tensor_leaves"]

logger = logging.getLogger(__name__)

_WORKERS = 4


class ShardWeights(Weights):
    """Weights in the published layout."""

    def __init__(self, found: Inventory, model: ModelConfig, known: bool) -> None:
        super().__init__(found.path, SHARDS, model, known, found.shards, found.full, details=_details(found))
        self._found = found
        leaves = layout.state_leaves(self.model, self.shards, self.full)
        self._numbers = {leaf.label: number for number, leaf in enumerate(leaves)}
        self._places = layout.places(len(leaves))
        self._pool = ThreadPoolExecutor(_WORKERS)
        self._readers: list[NpzReader] = []
        self._file: int | None = None
        self._verified: set[int] = set()

    def dtype(self, leaf: StateLeaf) -> np.dtype:
        return self._found.headers[self._numbers[leaf.label]].dtype

    def counter(self, leaf: StateLeaf) -> int:
        """The value of a counter, from shard 0."""
        file, member = self._places[self._numbers[leaf.label]]
        with contextlib.closing(NpzReader(layout.shard_file(self.path, 0, file))) as reader:
            return int(reader.read(member))

    def read(self, leaf: StateLeaf, buffer: np.ndarray | None = None) -> Tensor:
        if leaf.leaf is None:
            raise ValueError(f"{leaf.label} is a counter; see counters")
        kind, dtype = leaf.leaf.kind, self.dtype(leaf)
        file, member = self._places[self._numbers[leaf.label]]
        readers = self._open(file)

        def checked(shard: int) -> NpzReader:
            header, expected = readers[shard].header(member), leaf.shard_shape(self.shards)
            if header.shape != expected or header.dtype != dtype:
                raise DamagedError(
                    f"{readers[shard].path}: arr_{member} ({leaf.label}) is {header.dtype}{list(header.shape)}, "
                    f"expected {dtype}{list(expected)}"
                )
            return readers[shard]

        if kind.combine not in (Combine.CONCAT, Combine.PER_SHARD):
            whole = merge_copies(kind, lambda shard: checked(shard).read(member), self.shards, leaf.moment)
            return Tensor(leaf, whole, dtype)
        if buffer is None:
            whole = np.empty(kind.layer_shape, dtype)
        else:
            whole = buffer[: math.prod(kind.layer_shape) * dtype.itemsize].view(dtype).reshape(kind.layer_shape)
        known_good = self._found.manifest is not None  # the files' own sums were compared

        def fill(shard: int) -> None:
            for start, rows in checked(shard).pieces(member, check=not known_good):
                region = rows_region(kind, shard, self.shards, start, start + len(rows))
                place = whole[tuple(slice(*ends) for ends in region)]
                place[...] = rows.reshape(place.shape)

        for _ in self._pool.map(fill, range(self.shards)):
            pass
        return Tensor(leaf, whole, dtype)

    def close(self) -> None:
        self._pool.shutdown()
        self._close_readers()

    def _open(self, file: int) -> list[NpzReader]:
        """All shards' file of this number; one number is open at a time, since cloud files hold a buffer each."""
        if file != self._file:
            self._close_readers()
            self._verify(file)
            # Kept as they come: after an error the ones that did open are closed with the rest.
            for reader in self._pool.map(
                lambda shard: NpzReader(layout.shard_file(self.path, shard, file)), range(self.shards)
            ):
                self._readers.append(reader)
            self._file = file
        return self._readers

    def _verify(self, file: int) -> None:
        """Compare files with the manifest's checksums, each once, right before they are read from the same cache."""
        if self._found.manifest is not None and file not in self._verified:
            names = {f"shard_{shard}/{file}.npz" for shard in range(self.shards)}
            manifest.verify(self.path, self._found.manifest, names)
            self._verified.add(file)

    def _close_readers(self) -> None:
        while self._readers:
            self._readers.pop().close()
        self._file = None


def open_weights(path: storage.PathLike, model: ModelConfig | None = None) -> Weights:
    """The weights of a step of any layout: any number of shards, full or slim, written here or by the 2021 library.

    `path`: a step_N folder, or a model_dir (its newest step); local or a URL. `model`: whose weights they must be;
    without it the manifest says, or else the shapes, with a notice of what they leave open.
    Reads headers and counters only. Raises DamagedError naming every file that is missing, empty or corrupt, and
    CheckpointError where the weights are of another model.
    """
    step_dir = find_step(path)
    kind = format_of(step_dir)
    if kind == ORBAX:
        return OrbaxWeights(step_dir, model)
    if kind == REFERENCE_V2:
        return ReferenceWeights(step_dir, model)
    found = inventory.take(step_dir, model)
    known = True
    if model is None:
        models = inventory.candidates(found)
        if not models:
            raise CheckpointError(
                f"{found.path}: its {found.leaves} leaves fit no model of version 1 by shape; name its config"
            )
        model, known = models[0], found.manifest is not None and found.manifest.details.get("config") is not None
        if not known:
            _tell_guess(found.path, models)
    expected = inventory.match(found, model, found.shards)
    weights = ShardWeights(found, model, known)
    try:
        weights.counters = {leaf.section: weights.counter(leaf) for leaf in expected if leaf.leaf is None}
    except BaseException:
        weights.close()
        raise
    return weights


def _tell_guess(path: str, models: Sequence[ModelConfig]) -> None:
    first = models[0]
    others = sorted({f"norm {other.norm}, pe {other.pe}" for other in models[1:]})
    more = f" (the shapes would fit {'; '.join(others)} too)" if others else ""
    logger.warning(
        "%s does not say its model: by its shapes it is taken as layers %d, d_model %d, n_vocab %d, norm %s, pe %s%s; "
        "name its config to be sure",
        path, first.layers, first.d_model, first.n_vocab, first.norm, first.pe, more,
    )  # fmt: skip


def _details(found: Inventory) -> dict[str, Any]:
    """What is written about a step: in its manifest, or of a step of the 2021 library in meta.json beside it."""
    details = dict(found.manifest.details) if found.manifest is not None else {}
    folder = storage.name(found.path)
    if "step" in details or not re.fullmatch(r"step_\d+", folder):
        return details
    details["step"] = int(folder[5:])
    if found.manifest is None and storage.can_list(found.path):
        with contextlib.suppress(DamagedError):
            details["aux"] = meta.load(storage.parent(found.path)).aux.get(details["step"], {})
    return details
