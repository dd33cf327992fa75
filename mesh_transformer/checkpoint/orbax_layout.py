"""The "orbax" layout: `step_N/state/`, a checkpoint of Orbax's own, one folder for each array of the train state.

`state/params.transformer_layer_shard.q/` holds the whole array, layers stacked as in memory, cut into chunks:
`.zarray` says how, and `0.0.1` is the chunk at that place of the grid, its values in C order as they lie in memory.
Names come from the parameters' table; nothing depends on the mesh but the size of the chunks.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mesh_transformer import parameters
from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.blocks import Region

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig
    from mesh_transformer.parameters import Kind

FOLDER = "state"
CHUNK = 32 << 20  # bytes of a chunk, at most, unless an axis of it cannot be halved

# Names in the state's folder: what Orbax itself writes there, the arrays' folders, and the files in those.
_FILES = re.compile(r"_METADATA|_CHECKPOINT_METADATA|commit_success\.txt")
_ARRAYS = re.compile(r"step|(params|opt_state)\.[\w.]+")
_ARRAY_FILES = re.compile(r"(\.zarray|\d+(\.\d+)*)(\.__lock)?")


class ArrayLeaf(NamedTuple):
    """One array of the state: a stacked parameter or moment, or a counter, which has no `kind`."""

    section: str
    kind: Kind | None

    @property
    def label(self) -> str:
        """Its name in manifests: section, module without the network's prefix, name."""
        if self.kind is None:
            return self.section
        return f"{self.section}/{self.kind.module.removeprefix(parameters.PREFIX)}/{self.kind.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Whole, [L, ...] for layers."""
        return () if self.kind is None else self.kind.shape

    @property
    def folder(self) -> str:
        return folder_of(self.label)


def folder_of(label: str) -> str:
    """The folder of an array, under the step's."""
    return f"{FOLDER}/{label.replace('/', '.')}"


def array_leaves(model: ModelConfig, shards: int, full: bool) -> tuple[ArrayLeaf, ...]:
    """All arrays of a state; `shards` matters only to norm layernorm-desync."""
    kinds = parameters.kinds(model, shards)
    sections = (layout.MU, layout.NU, layout.PARAMS) if full else (layout.PARAMS,)
    counters = (layout.COUNT, layout.SCHEDULE_COUNT, layout.STEP) if full else (layout.STEP,)
    tensors = [ArrayLeaf(section, kind) for section in sections for kind in kinds]
    return (*tensors, *(ArrayLeaf(section, None) for section in counters))


def nested(values: Mapping[str, object]) -> dict[str, object]:
    """{"a/b/c": value} as the tree {"a": {"b": {"c": value}}} that Orbax names arrays by."""
    out: dict[str, object] = {}
    for label, value in values.items():
        *groups, name = label.split("/")
        group = out
        for each in groups:
            group = group.setdefault(each, {})  # type: ignore[assignment]
        group[name] = value
    return out


def chunks(block: Sequence[int], itemsize: int, stacked: bool, layer_by_layer: bool = False) -> tuple[int, ...]:
    """Shape of the chunks of an array that is written in blocks of this shape, of at most CHUNK bytes where it can be.

    Blocks of different devices never share a chunk. `stacked`: the first axis is layers, of which a chunk holds several
    if there is room, or `layer_by_layer` one.
    """
    shape = list(block)
    first = 1 if stacked else 0
    rest = itemsize * math.prod(shape[first:])
    if stacked:
        most = 1 if layer_by_layer else max(1, CHUNK // max(rest, 1))
        shape[0] = math.ceil(shape[0] / math.ceil(shape[0] / most))  # equal, but for the last
    while rest > CHUNK:
        axis = max(range(first, len(shape)), key=lambda i: shape[i] if shape[i] % 2 == 0 else 0)
        if shape[axis] % 2:
            break
        shape[axis] //= 2
        rest //= 2
    return tuple(shape)


def grid(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Region]:
    """The regions of an array's chunks, in order."""
    counts = [math.ceil(n / c) for n, c in zip(shape, chunk, strict=True)]
    for place in np.ndindex(*counts):
        yield tuple((i * c, min((i + 1) * c, n)) for i, c, n in zip(place, chunk, shape, strict=True))


def files_of(names: Collection[str], labels: Collection[str]) -> set[str]:
    """Of a step's file names, those of the arrays with these labels, and what Orbax needs to find them."""
    folders = {folder_of(label) for label in labels}
    return {name for name in names if name.rpartition("/")[0] in folders or name.rpartition("/")[0] == FOLDER}


def is_state_folder(name: str) -> bool:
    """Whether a name in a step's folder is the state's, or what a kill leaves of it half written."""
    return name == FOLDER or name.startswith(f"{FOLDER}.orbax-checkpoint-tmp")


def is_state_file(name: str) -> bool:
    """Whether a file right in the state's folder is one that Orbax writes."""
    return bool(_FILES.fullmatch(name))


def is_array_folder(name: str) -> bool:
    """Whether a folder in the state's folder is an array's."""
    return bool(_ARRAYS.fullmatch(name))


def is_array_file(name: str) -> bool:
    """Whether a file in an array's folder is one of the array's."""
    return bool(_ARRAY_FILES.fullmatch(name))


@dataclasses.dataclass(frozen=True)
class NewArray:
    """An array that is to be written: whole shape, type, and shape of its chunks."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
