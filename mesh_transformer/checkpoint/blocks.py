"""Whole tensors that exist only as blocks: the blocks of a mesh's devices on one side, a file's parts on the other.

A region is a box of a tensor: (start, stop) for every axis. Nothing here ever holds the whole tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mesh_transformer.checkpoint.npz import CHUNK
from mesh_transformer.parameters import Combine, Kind

Region = tuple[tuple[int, int], ...]


def overlap(a: Region, b: Region) -> Region | None:
    """The box that two boxes share, or None."""
    shared = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(region: Region, outer: Region) -> tuple[slice, ...]:
    """Indices of `region` in an array that holds `outer`."""
    return tuple(slice(a0 - o0, a1 - o0) for (a0, a1), (o0, _) in zip(region, outer, strict=True))


def region_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """A device's index of a global array (as JAX gives it) as a region."""
    return tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=True))


def part_region(kind: Kind, shard: int, shards: int) -> Region:
    """Where shard `shard`'s part lies in one layer's whole tensor; only for kinds whose parts are disjoint."""
    region = [(0, n) for n in kind.layer_shape]
    axis = 0 if kind.combine is Combine.PER_SHARD else kind.split_axis
    if axis is not None:
        size = kind.layer_shape[axis] // shards
        region[axis] = (shard * size, (shard + 1) * size)
    return tuple(region)


def rows_region(kind: Kind, shard: int, shards: int, start: int, stop: int) -> Region:
    """Where rows start..stop of shard `shard`'s part (in its shape on disk) lie in one layer's whole tensor."""
    region = list(part_region(kind, shard, shards))
    axis = 1 if kind.combine is Combine.PER_SHARD else 0  # the part on disk lacks the axis of shards
    first = region[axis][0]
    region[axis] = (first + start, first + stop)
    return tuple(region)


def merge_copies(kind: Kind, read: Callable[[int], np.ndarray], shards: int, moment: bool) -> np.ndarray:
    """One layer's whole tensor of a kind whose parts are copies or summands; `read(shard)` gives a part."""
    first_only = kind.combine is Combine.FIRST or (kind.combine is Combine.SUM and moment)
    parts = [read(shard) for shard in range(1 if first_only else shards)]
    # Equal copies are taken as they are: their mean, computed, could differ in the last bit.
    same = kind.combine is Combine.MEAN and all(np.array_equal(part, parts[0], equal_nan=True) for part in parts)
    return np.asarray(parts[0] if same else kind.merge_parts(parts, moment))


@dataclasses.dataclass
class Blocks:
    """The blocks of one kind in memory, [L, ...] for stacked kinds, keyed by where they lie in the whole."""

    kind: Kind
    blocks: dict[Region, np.ndarray]

    def scatter(self, layer: int | None, region: Region, values: np.ndarray) -> None:
        """Put values that fill `region` of one layer's tensor into every block that needs some of them."""
        target = self._in_memory(layer, region)
        values = values.reshape([stop - start for start, stop in target])
        for place, block in self.blocks.items():
            shared = overlap(place, target)
            if shared is not None:
                block[within(shared, place)] = values[within(shared, target)]

    def gather(self, layer: int | None, region: Region) -> np.ndarray:
        """The values of `region` of one layer's tensor: a view where one block holds them all, else a copy."""
        source = self._in_memory(layer, region)
        shape = [stop - start for start, stop in source]
        out: np.ndarray | None = None
        missing = int(np.prod(shape, dtype=np.int64))
        for place, block in self.blocks.items():
            shared = overlap(place, source)
            if shared is None:
                continue
            piece = block[within(shared, place)]
            if list(piece.shape) == shape:
                return piece.reshape(shape[1:] if self.kind.stacked else shape)
            if out is None:
                out = np.empty(shape, block.dtype)
            out[within(shared, source)] = piece
            missing -= piece.size
        if out is None or missing > 0:
            raise ValueError(f"{self.kind.module}/{self.kind.name}: this process does not hold {region}")
        return out.reshape(shape[1:] if self.kind.stacked else shape)

    def whole(self, layer: int | None) -> np.ndarray:
        """One layer's whole tensor."""
        return self.gather(layer, tuple((0, n) for n in self.kind.layer_shape))

    def _in_memory(self, layer: int | None, region: Region) -> Region:
        return region if layer is None else ((layer, layer + 1), *region)


def pieces(blocks: Blocks, layer: int | None, shard: int, shards: int, moment: bool) -> Iterator[np.ndarray]:
    """Shard `shard`'s part of one layer's tensor, as it goes to disk, in runs of rows of a few MB."""
    kind = blocks.kind
    shape = kind.shard_shape(shards)
    if kind.combine not in (Combine.CONCAT, Combine.PER_SHARD):
        yield kind.split_whole(blocks.whole(layer), shards, moment)[shard]
        return
    if not shape:
        yield blocks.gather(layer, part_region(kind, shard, shards)).reshape(())
        return
    itemsize = next(iter(blocks.blocks.values())).dtype.itemsize
    row = itemsize * int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, CHUNK // max(row, 1))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        yield blocks.gather(layer, rows_region(kind, shard, shards, start, stop)).reshape(stop - start, *shape[1:])
