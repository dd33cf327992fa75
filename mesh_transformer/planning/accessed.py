"""Bytes that a compiled step reads from and writes to a device's memory, as if nothing stayed in a cache.

What a fusion computes inside stays inside; of its operands it reads what it uses. So a layer's slice of stacked weights
counts as one layer, and an update in place of one layer's gradient as that layer's.
"""

from __future__ import annotations

import math
import re

from mesh_transformer.planning.program import BYTES, Operation, Program

_MOVES_NOTHING = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "opt-barrier", "partition-id", "iota",
)  # fmt: skip
_SAME_VALUES = ("bitcast", "reshape", "convert", "copy", "transpose")
_SLICES = ("dynamic-slice", "slice", "gather")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLEE = re.compile(r"calls=%?([\w.\-]+)")
_VALUE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_ON_CHIP = "S(1)"  # in the layout of a value that a TPU keeps in its vector memory


def accessed_bytes(text: str, unknown: float = 1) -> float:
    """Bytes of one step on one device, from a compiled program's text, in which loops of unknown length run `unknown`
    times."""
    program, total = Program(text, unknown), 0.0
    inside = program.fused()
    for name, body in program.computations.items():
        runs = program.runs[name]
        if runs and name not in inside:
            reading = _Body(program, name)
            total += runs * sum(reading.moved(each) for each in body)
    return total


class _Body:
    """One computation, and what its operations read and write."""

    def __init__(self, program: Program, name: str) -> None:
        self._program = program
        self._operations = program.computations[name]
        self._by_name = {each.name: each for each in self._operations}
        self._users: dict[str, list[Operation]] = {}
        for each in self._operations:
            for operand in set(_operands(each)):
                self._users.setdefault(operand, []).append(each)

    def moved(self, operation: Operation) -> float:
        """Bytes read and written by an operation that stands for itself."""
        does = operation.does.removesuffix("-start")
        if does in _MOVES_NOTHING or does.endswith("-done"):
            return 0.0
        if does != operation.does:
            return self._started(does, operation.shape)
        if does in _SLICES:
            return 2 * _bytes(operation.shape)
        if operation.does == "dynamic-update-slice":
            return 2 * self._shape_bytes(_operands(operation)[1])
        if operation.does != "fusion":
            return _bytes(operation.shape) + sum(self._shape_bytes(name) for name in set(_operands(operation)))
        fused = self._callee(operation)
        operands = _operands(operation)
        places: dict[str, list[int]] = {}
        for place, name in enumerate(operands):
            places.setdefault(name, []).append(place)
        # An operand that is passed twice is read at most once as a whole.
        read = sum(
            min(self._shape_bytes(name), sum(fused.read(place) for place in found)) for name, found in places.items()
        )
        return read + fused.written(operation.shape)

    def _started(self, does: str, shape: str) -> float:
        """Of what runs beside other work: its operands, results and a context stand in one shape."""
        values = [found.group(0) for found in _VALUE.finditer(shape) if found.group(2)]
        if does in _SLICES and values:
            return _bytes(values[-1], chip=True) + _bytes(values[-1])  # out of memory, mostly onto the chip
        return sum(_bytes(value) for value in values)

    def read(self, place: int) -> float:
        """Bytes of its parameter number `place` that a fusion reads: slices of it, where it uses nothing else."""
        for each in self._operations:
            if each.does == "parameter" and each.rest.startswith(f"{place})"):
                width = _width(each.shape)
                return min(_bytes(each.shape, chip=True), self._used(each.name) * width)
        return 0.0

    def written(self, shape: str) -> float:
        """Bytes of the result, which is of `shape` (a tuple's: of its values); of an update in place the update's."""
        root = self._operations[-1]
        values = [found.group(0) for found in _VALUE.finditer(shape)]
        roots = _operands(root) if root.does == "tuple" else [root.name]
        if len(roots) != len(values):
            return _bytes(shape)
        return sum(self._written(name, value) for name, value in zip(roots, values, strict=True))

    def _used(self, name: str) -> float:
        """Elements of a value that its users read."""
        total = 0.0
        for user in self._users.get(name, []):
            operands = _operands(user)
            if user.does in _SLICES and operands[0] == name:
                total += _elements(user.shape)
            elif user.does == "dynamic-update-slice" and operands[0] == name:
                continue  # updated in place
            elif user.does in _SAME_VALUES and self._users.get(user.name):
                total += self._used(user.name)
            elif user.does == "fusion":
                inner = self._callee(user)
                for place, operand in enumerate(operands):
                    if operand == name:
                        total += inner.read(place) / _width(self._by_name[name].shape)
            else:
                return _elements(self._by_name[name].shape)
        return total

    def _written(self, name: str, shape: str) -> float:
        operation = self._by_name.get(name)
        while operation is not None and operation.does in ("bitcast", "reshape", "copy"):
            operation = self._by_name.get(_operands(operation)[0])
        if operation is None:
            return _bytes(shape)
        if operation.does == "dynamic-update-slice":
            return self._shape_bytes(_operands(operation)[1]) if _ON_CHIP not in shape else 0.0
        if operation.does == "fusion":
            return min(_bytes(shape), self._callee(operation).written(shape))
        return _bytes(shape)

    def _shape_bytes(self, name: str) -> float:
        return _bytes(self._by_name[name].shape) if name in self._by_name else 0.0

    def _callee(self, fusion: Operation) -> _Body:
        found = _CALLEE.search(fusion.rest)
        return _Body(self._program, found.group(1)) if found else self


def _operands(operation: Operation) -> list[str]:
    return _OPERAND.findall(operation.rest.partition("), ")[0])


def _bytes(shape: str, chip: bool = False) -> float:
    """Bytes of a shape, or of a tuple's shapes; what is kept on the chip counts only with `chip`."""
    return float(
        sum(
            BYTES.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims, layout in _VALUE.findall(shape)
            if chip or _ON_CHIP not in layout
        )
    )


def _elements(shape: str) -> float:
    return float(sum(math.prod(int(n) for n in dims.split(",") if n) for _, dims, _ in _VALUE.findall(shape)))


def _width(shape: str) -> int:
    found = _VALUE.search(shape)
    return BYTES.get(found.group(1), 4) if found else 4
