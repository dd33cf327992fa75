"""What a compiled program communicates: every collective of its text, with the loops around it counted in.

XLA's text has a computation for each loop's body, and says of each `while` how often it runs; an operation inside a
loop stands there once, so its count is the product of the trip counts of the loops around it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8,
         "s64": 8, "u64": 8}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|mesh\[.*?\] \{.*?\}|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?)")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\(\d+\)(\d+))?")  # 'a'=4 of a mesh; 'a', or 'a':(2)4 of a part of that axis
_NAME = re.compile(r'op_name="([^"]*)"')


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
        if self.groups.startswith("{{"):
            return len(self.groups[2 : self.groups.index("}")].split(","))
        if self.groups.startswith("mesh["):
            axes, _, used = self.groups.partition("] {")
            sizes = {name: int(size) for name, size, _ in _AXIS.findall(axes)}
            return math.prod(int(part) if part else sizes[name] for name, _, part in _AXIS.findall(used))
        return int(self.groups[1 : self.groups.index("]")].split(",")[-1])  # [groups, size]<=[devices]


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program's text (`compiled.as_text()`), in the order of the text.

    Raises ValueError where a loop does not say how often it runs and has a collective in it.
    """
    lines, entry = _computations(text)
    counts = _counts(lines, entry)
    found = []
    for name, body in lines.items():
        for shape, operation, rest in body:
            kind = operation.removesuffix("-start")
            if kind not in COLLECTIVES or not counts.get(name):
                continue
            count = counts[name]
            if count != int(count):
                raise ValueError(f"{operation} stands in a loop of {name} that does not say how often it runs")
            groups = _GROUPS.search(rest)
            size = _size(shape, operation)
            one = Collective(kind, groups.group(1) if groups else "", int(count), size, _source(rest))
            found.append(one._replace(bytes=size * one.group_size) if kind == "reduce-scatter" else one)
    return found


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str, str]]], str]:
    """Name -> its operations (shape, operation, what follows), and the name of the entry."""
    found: dict[str, list[tuple[str, str, str]]] = {}
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
            found[current].append((operation.group(1), operation.group(2), operation.group(3)))
    return found, entry


def _counts(lines: dict[str, list[tuple[str, str, str]]], entry: str) -> dict[str, float]:
    """How often a step runs each computation; not a whole number inside a loop of unknown length."""
    counts: dict[str, float] = {entry: 1}
    order = [entry]
    for name in order:  # grows while it is read: callees stand behind their callers
        for operation, callee, times in _calls(lines.get(name, [])):
            if operation in COLLECTIVES or callee not in lines:
                continue
            counts[callee] = counts.get(callee, 0) + counts[name] * times
            order.append(callee)
    return counts


def _calls(body: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, float]]:
    for _, operation, rest in body:
        trips = _TRIPS.search(rest)
        times = float(trips.group(1)) if trips else math.nan if operation == "while" else 1.0
        names = _CALLED.findall(rest) if operation not in ("reduce", "scatter", "sort", *COLLECTIVES) else []
        branches = _BRANCHES.search(rest)
        names += re.findall(r"[\w.\-]+", branches.group(1)) if branches else []
        for name in names:
            yield operation, name, times


def _size(shape: str, operation: str) -> int:
    """Bytes of a shape, or of a tuple of shapes; a `-start` has its operands in front of its results."""
    sizes = [
        BYTES.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in _SHAPE.findall(shape)
    ]
    return sum(sizes[len(sizes) // 2 :] if operation.endswith("-start") and len(sizes) > 1 else sizes)


def _source(rest: str) -> str:
    name = _NAME.search(rest)
    return name.group(1) if name else ""
