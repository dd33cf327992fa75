"""What a compiled program computes and communicates, read from XLA's text with the loops counted in.

XLA's text has a computation for each loop's body; an operation inside a loop stands there once, so it runs as often as
the product of the trip counts of the loops around it. A loop says its trip count (CPU, GPU), or its condition compares
its counter, which begins at 0, with a constant (TPU).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8,
         "s64": 8, "u64": 8}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|mesh\[.*?\] \{.*?\}|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?)")
_PAIRS = re.compile(r"source_target_pairs=(\{\{.*?\}\})")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\(\d+\)(\d+))?")  # 'a'=4 of a mesh; 'a', or 'a':(2)4 of a part of that axis
_NAME = re.compile(r'op_name="([^"]*)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->\w+")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_NOT_CALLS = ("reduce", "reduce-window", "scatter", "sort", "map", *COLLECTIVES)


class Collective(NamedTuple):
    """One operation: its kind; the `groups` of devices, as XLA writes them; `runs`, how often a step does it; `bytes`
    of one run's whole value (what is gathered, reduced, or reduced before it is scattered) on one device; `source`,
    where in the program it comes from."""

    kind: str
    groups: str
    runs: int
    bytes: int
    source: str

    @property
    def total(self) -> int:
        """Bytes of a whole step."""
        return self.runs * self.bytes

    @property
    def group_size(self) -> int:
        """How many devices take part in one run of it."""
        return len(self.first_group)

    @property
    def first_group(self) -> list[int]:
        """The devices that take part with device 0, by their places in the program's list of devices; of a permutation
        its first pair."""
        if self.groups.startswith("{{"):
            return [int(device) for device in self.groups[2 : self.groups.index("}")].split(",")]
        if self.groups.startswith("mesh["):
            axes, _, used = self.groups.partition("] {")
            return _along([(name, int(size)) for name, size, _ in _AXIS.findall(axes)], _AXIS.findall(used))
        shape, _, devices = self.groups.partition("<=")
        dims, _, order = devices.partition("T")
        ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
        ids = ids.transpose(_numbers(order)) if order else ids
        return [int(device) for device in ids.reshape(_numbers(shape))[0]]


class Operation(NamedTuple):
    """One line of a computation: its name, the text of its shape, what it does, and all that follows the bracket."""

    name: str
    shape: str
    does: str
    rest: str


class Program:
    """The computations of one compiled program, and how often a step runs each.

    unknown: the length of loops that do not say theirs.
    """

    def __init__(self, text: str, unknown: float = math.nan) -> None:
        self.computations, self._entry = _computations(text)
        self._unknown = unknown
        self.runs = self._count()

    def operations(self, *does: str) -> Iterator[tuple[Operation, float, str]]:
        """Every operation that `does` one of these and runs, how often, and the name of its computation."""
        for name, body in self.computations.items():
            runs = self.runs[name]
            if runs:
                yield from ((operation, runs, name) for operation in body if operation.does in does)

    def shapes(self, computation: str) -> dict[str, str]:
        """The shapes of a computation's values, by name."""
        return {operation.name: operation.shape for operation in self.computations[computation]}

    def fused(self) -> set[str]:
        """The computations that are the inside of a fusion."""
        fusions = (rest for body in self.computations.values() for _, _, does, rest in body if does == "fusion")
        return {name for rest in fusions for name in _CALLED.findall(rest)}

    def _count(self) -> dict[str, float]:
        """Runs of each computation; NaN inside a loop of unknown length."""
        calls = {name: list(self._calls(body)) for name, body in self.computations.items()}
        runs = dict.fromkeys(self.computations, 0.0)
        runs[self._entry] = 1.0
        for name in _callers_first(self._entry, calls):
            for callee, times in calls[name]:
                runs[callee] += runs[name] * times
        return runs

    def _calls(self, body: list[Operation]) -> Iterator[tuple[str, float]]:
        for operation in body:
            if operation.does in _NOT_CALLS:
                continue
            times = self.trips(operation) if operation.does == "while" else 1.0
            branches = _BRANCHES.search(operation.rest)
            names = _CALLED.findall(operation.rest) + (_OPERAND.findall(branches.group(1)) if branches else [])
            yield from ((name, times) for name in names if name in self.computations)

    def trips(self, loop: Operation) -> float:
        """How often a `while` runs its body."""
        said = _TRIPS.search(loop.rest)
        if said:
            return float(said.group(1))
        condition = _CONDITION.search(loop.rest)
        body = self.computations.get(condition.group(1), []) if condition else []
        compared = [operation for operation in body if operation.does == "compare" and "direction=LT" in operation.rest]
        limits = [
            int(operation.rest.partition(")")[0])
            for operation in body
            if operation.does == "constant" and operation.shape.startswith("s32[]")
        ]
        return float(limits[0]) if len(compared) == len(limits) == 1 else self._unknown


def collectives(text: str, unknown: float = math.nan) -> list[Collective]:
    """Every collective of a compiled program's text (`compiled.as_text()`), in the order of the text.

    Raises ValueError where a loop does not say how often it runs and has a collective in it, unless its `unknown`
    length is given.
    """
    program, found = Program(text, unknown), []
    fused, seen = program.fused(), set()
    for operation, runs, computation in program.operations(*COLLECTIVES, *(f"{kind}-start" for kind in COLLECTIVES)):
        if math.isnan(runs):
            raise ValueError(f"{operation.name} stands in a loop that does not say how often it runs")
        if computation in fused:
            # A TPU runs a collective beside several fusions, each of which repeats it under the same channel.
            channel = _CHANNEL.search(operation.rest)
            if channel and channel.group(1) in seen:
                continue
            seen |= {channel.group(1)} if channel else set()
        groups = _GROUPS.search(operation.rest) or _PAIRS.search(operation.rest)
        name = _NAME.search(operation.rest)
        kind, size = operation.does.removesuffix("-start"), _size(operation.shape, operation.does)
        one = Collective(kind, groups.group(1) if groups else "", int(runs), size, name.group(1) if name else "")
        found.append(one._replace(bytes=size * one.group_size) if kind == "reduce-scatter" else one)
    return found


def product_flops(text: str, unknown: float = 1) -> float:
    """FLOPs of all matrix products of a step on one device, two for each multiply-add.

    TPUs' text has them as convolutions; a batch of products is one over a window of which a single place counts.
    Loops of unknown length run `unknown` times.
    """
    program, total = Program(text, unknown), 0.0
    for operation, runs, computation in program.operations("dot", "convolution"):
        summed = (_contracted if operation.does == "dot" else _kernel_inputs)(operation, program.shapes(computation))
        total += runs * 2 * _elements(operation.shape) * summed
    return total


def stacked_bytes(text: str, layers: int, weights: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Bytes that the backward pass over `layers` layers finds for each of them, weights and gradients left out: kept
    from the forward pass, and copies of weights in a narrower type.

    `weights`: shapes of all stacked parameters on one device. (0, 0) where there is no such loop, as with one layer.
    """
    program, most = Program(text, unknown=1), (0, 0)
    for loop, _, _ in program.operations("while"):
        name = _NAME.search(loop.rest)
        if program.trips(loop) != layers or not (name and "transpose(" in name.group(1)):
            continue
        left, kept, copies = Counter(weights), 0, 0
        for dtype, dims in _SHAPE.findall(loop.shape):
            shape = tuple(int(n) for n in dims.split(",") if n)
            if len(shape) < 2 or shape[0] != layers or (dtype == "f32" and shape in weights):
                continue
            size = BYTES.get(dtype, 4) * math.prod(shape)
            if left[shape]:
                # Where activations have a weight's shape by chance, the first ones of that shape are weights.
                copies, left[shape] = copies + size, left[shape] - 1
            else:
                kept += size
        most = max(most, (kept, copies))
    return most


def _along(axes: list[tuple[str, int]], used: list[tuple[str, str, str]]) -> list[int]:
    """Devices that differ from device 0 along the `used` axes of a mesh only; a part of an axis is its last."""
    ids = np.arange(math.prod(size for _, size in axes)).reshape([size for _, size in axes])
    parts = {name: int(part) if part else None for name, _, part in used}
    place = tuple(slice(parts[name]) if name in parts else 0 for name, _ in axes)
    return [int(device) for device in ids[place].reshape(-1)]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _computations(text: str) -> tuple[dict[str, list[Operation]], str]:
    """Name -> its operations, and the name of the entry."""
    found: dict[str, list[Operation]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins:
            current = begins.group(2)
            entry = current if begins.group(1) else entry
            found[current] = []
            continue
        operation = _OPERATION.match(line) if current else None
        if operation:
            found[current].append(Operation(*operation.groups()))
    return found, entry


def _callers_first(entry: str, calls: dict[str, list[tuple[str, float]]]) -> list[str]:
    """The computations that the entry reaches, each behind all of its callers."""
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        for callee, _ in calls[name]:
            if callee not in done:
                visit(callee)
        done[name] = None

    visit(entry)
    return list(done)[::-1]


def _contracted(operation: Operation, shapes: dict[str, str]) -> int:
    """Length of the sum in a `dot`."""
    axes = _CONTRACTED.search(operation.rest)
    left = _dims(shapes[_OPERAND.findall(operation.rest)[0]])
    return math.prod(left[int(axis)] for axis in axes.group(1).split(",") if axis) if axes else 1


def _kernel_inputs(operation: Operation, shapes: dict[str, str]) -> int:
    """Length of the sum in a `convolution` that is a matrix product: the kernel's input features."""
    labels = _LABELS.search(operation.rest)
    kernel = _dims(shapes[_OPERAND.findall(operation.rest)[1]])
    return kernel[labels.group(1).index("i")] if labels else 1


def _dims(shape: str) -> list[int]:
    found = _SHAPE.search(shape)
    return [int(n) for n in found.group(2).split(",") if n] if found else []


def _elements(shape: str) -> int:
    return math.prod(_dims(shape))


def _size(shape: str, operation: str) -> int:
    """Bytes of a shape, or of a tuple of shapes; a `-start` has its operands in front of its results."""
    sizes = [
        BYTES.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in _SHAPE.findall(shape)
    ]
    return sum(sizes[len(sizes) // 2 :] if operation.endswith("-start") and len(sizes) > 1 else sizes)
