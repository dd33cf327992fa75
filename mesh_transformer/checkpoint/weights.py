"""What every layout's weights have in common: one whole tensor of one layer at a time, in the published order."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.layout import StateLeaf
from mesh_transformer.config_groups import ModelConfig


class Tensor(NamedTuple):
    """One leaf of the published layout, merged.

    `leaf`: which (section PARAMS, MU or NU; kind; layer). `value`: the whole tensor of one layer, [*kind.layer_shape];
    in the type of the files, except that parts that were summed or averaged come in float32. `dtype`: the type that
    files hold it in: what was read, and what `write_weights` will cast to.
    """

    leaf: StateLeaf
    value: np.ndarray
    dtype: np.dtype


@dataclasses.dataclass
class Weights(abc.ABC):
    """A step's weights on disk or in a bucket; `open_weights` makes it, and it is a context manager.

    `format`: of the layout, see `formats`. `model`: whose they are; `known`: whether a config or a manifest says so
    (else n_heads, and where shapes do not tell, norm, are the most usual that fit). `shards`: M of the files, or of the
    mesh that they were saved on. `full`: with the optimizer's state. `counters`: layout.STEP, and where `full`, COUNT
    and SCHEDULE_COUNT. `details`: what the manifest, or meta.json beside the step, says of it: step, config, agreement,
    mesh, aux; keys may be missing.
    """

    path: str
    format: str
    model: ModelConfig
    known: bool
    shards: int
    full: bool
    counters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        """The N of step_N: updates of its run. counters[layout.STEP], of the weights' whole life, may be more."""
        return int(self.details.get("step", self.counters[layout.STEP]))

    @abc.abstractmethod
    def dtype(self, leaf: StateLeaf) -> np.dtype:
        """The type that the files hold a leaf in."""

    @abc.abstractmethod
    def read(self, leaf: StateLeaf, buffer: np.ndarray | None = None) -> Tensor:
        """One tensor, in any order; cheapest in the published one. `leaf` is one of `tensor_leaves`.

        `buffer`: bytes (uint8, flat) to put a large one into, where fresh memory is not wanted.
        Raises DamagedError naming the file where its arrays are not what they should be.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Gives back what was open."""

    def tensors(self, optimizer: bool = True) -> Iterator[Tensor]:
        """Every tensor in the published order; without `optimizer`, or where there is none, the parameters alone.

        Hold one at a time: then memory is that of the largest tensor.
        """
        for leaf in tensor_leaves(self.model, self.shards, self.full):
            if optimizer or not leaf.moment:
                yield self.read(leaf)

    def stream(self, optimizer: bool = True) -> Iterator[Tensor]:
        """As `tensors`, for those who have done with each before they ask for the next: its memory is used again.

        The next one is read in the meantime, so two of the largest exist.
        """
        leaves = [leaf for leaf in tensor_leaves(self.model, self.shards, self.full) if optimizer or not leaf.moment]
        size = max(math.prod(leaf.whole_shape) * self.dtype(leaf).itemsize for leaf in leaves)
        buffers = [np.empty(size, np.uint8) for _ in range(2)]
        with ThreadPoolExecutor(1) as ahead:
            following = ahead.submit(self.read, leaves[0], buffers[0])
            for number in range(1, len(leaves) + 1):
                tensor = following.result()
                if number < len(leaves):
                    following = ahead.submit(self.read, leaves[number], buffers[number % 2])
                yield tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def tensor_leaves(model: ModelConfig, shards: int, full: bool = False) -> tuple[StateLeaf, ...]:
    """The leaves that are tensors, in the published order: what `write_weights` wants, and `Weights.tensors` gives.

    `shards` matters only to norm layernorm-desync. `full`: with Adam's moments, which come before the parameters.
    """
    return tuple(leaf for leaf in layout.state_leaves(model, shards, full) if leaf.leaf is not None)
