"""The published layout (2021): which array of which file holds which leaf of the train state.

`step_N/shard_m/j.npz`, m in 0..M-1, j in 0..15: the leaves of the state in JAX's tree order, cut into 16 consecutive
runs (the first `leaves mod 16` runs are one longer), each file holding its run as arr_0, arr_1, ... A full state is
Adam's count, mu leaves, nu leaves, the schedule's count, parameters, step; a slim one is parameters, step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from mesh_transformer import parameters, storage
from mesh_transformer.checkpoint.npz import BFLOAT16

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig

FILES = 16

COUNT = "opt_state/count"
MU = "opt_state/mu"
NU = "opt_state/nu"
SCHEDULE_COUNT = "opt_state/schedule_count"
PARAMS = "params"
STEP = "step"


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One leaf of the state: a parameter or moment of `section` (MU, NU, PARAMS), or a counter without `leaf`."""

    section: str
    leaf: parameters.Leaf | None

    @property
    def label(self) -> str:
        return self.section if self.leaf is None else f"{self.section}/{self.leaf.label}"

    @property
    def moment(self) -> bool:
        return self.section in (MU, NU)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of one layer's whole tensor."""
        return () if self.leaf is None else self.leaf.kind.layer_shape

    def shard_shape(self, shards: int) -> tuple[int, ...]:
        """Shape of one shard's part."""
        return () if self.leaf is None else self.leaf.kind.shard_shape(shards)

    def fits(self, dtype: np.dtype) -> bool:
        """Whether a file may hold this leaf in `dtype`: counters are int32, the rest floats."""
        if self.leaf is None:
            return dtype == np.int32
        return dtype == BFLOAT16 or dtype in (np.dtype(np.float32), np.dtype(np.float16))


def state_leaves(model: ModelConfig, shards: int, full: bool) -> tuple[StateLeaf, ...]:
    """The leaves in their order on disk; `full` with the optimizer's, else slim."""
    leaves = parameters.published_leaves(model, shards)
    params = [StateLeaf(PARAMS, leaf) for leaf in leaves]
    step = StateLeaf(STEP, None)
    if not full:
        return (*params, step)
    moments = [[StateLeaf(section, leaf) for leaf in leaves] for section in (MU, NU)]
    return (StateLeaf(COUNT, None), *moments[0], *moments[1], StateLeaf(SCHEDULE_COUNT, None), *params, step)


def runs(leaves: int) -> list[int]:
    """How many leaves each of the 16 files holds."""
    each, more = divmod(leaves, FILES)
    return [each + (j < more) for j in range(FILES)]


def places(leaves: int) -> list[tuple[int, int]]:
    """(file, array number) of every leaf."""
    return [(j, i) for j, length in enumerate(runs(leaves)) for i in range(length)]


def shard_file(step_dir: str, shard: int, file: int) -> str:
    return storage.join(step_dir, f"shard_{shard}", f"{file}.npz")


def step_bytes(model: ModelConfig, shards: int, full: bool = True, itemsize: int = 4) -> int:
    """Bytes that a step takes on disk, all shards, headers included (rounded up)."""
    leaves = state_leaves(model, shards, full)
    one = sum(itemsize * math.prod(leaf.shard_shape(shards)) + 512 for leaf in leaves)
    manifest = 160 * len(leaves) + 100 * shards * FILES + 16384
    return shards * (one + FILES * 64) + manifest
