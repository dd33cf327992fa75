"""What accelerators can do, per JAX device, and the slices they come in, by the names that people use."""

from __future__ import annotations

import dataclasses
import math
import re

from mesh_transformer.errors import ConfigError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device: bytes of memory, of which a program gets `usable`; peak FLOP/s in bfloat16; bytes/s of its
    memory, of one link to a neighbour in one direction, and of the network between hosts or slices.

    `dims`: of the torus that links chips (0: all to all, through a switch); `devices`: per chip; `per_host`: devices.
    """

    name: str
    memory: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    dims: int
    devices: int
    per_host: int
    suffix: int  # what N in NAME-N counts: units a chip
    source: str

    @property
    def usable(self) -> float:
        """XLA keeps a part for itself: 15.75 of 16 GiB on v5e, and about that share elsewhere."""
        return 0.984 * self.memory


_TPU = "cloud.google.com/tpu/docs, system architecture; links: How to Scale Your Model (2025), chapter 2"
_GPU = "the vendor's data sheet; network: one 400 Gbit/s port a GPU"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", 8 * GIB, 22.5e12, 350e9, 62e9, 3.1e9, 2, 2, 8, 2, _TPU),
        Chip("v3", 16 * GIB, 61.5e12, 450e9, 100e9, 3.1e9, 2, 2, 8, 2, _TPU),
        Chip("v4", 32 * GIB, 275e12, 1228e9, 45e9, 6.25e9, 3, 1, 4, 2, _TPU),
        Chip("v5e", 16 * GIB, 197e12, 819e9, 45e9, 6.25e9, 2, 1, 8, 1, _TPU),
        Chip("v5p", 95 * GIB, 459e12, 2765e9, 90e9, 6.25e9, 3, 1, 4, 2, _TPU),
        Chip("v6e", 32 * GIB, 918e12, 1640e9, 90e9, 12.5e9, 2, 1, 8, 1, _TPU),
        Chip("a100", 80e9, 312e12, 2039e9, 300e9, 25e9, 0, 1, 8, 1, _GPU),
        Chip("h100", 80e9, 989e12, 3350e9, 450e9, 50e9, 0, 1, 8, 1, _GPU),
        Chip("h200", 141e9, 989e12, 4800e9, 450e9, 50e9, 0, 1, 8, 1, _GPU),
        Chip("b200", 180e9, 2250e12, 8000e9, 900e9, 50e9, 0, 1, 8, 1, _GPU),
        Chip("cpu", 4e9, 0.1e12, 10e9, 5e9, 1e9, 0, 1, 8, 1, "a guess: one simulated device of a desktop machine"),
    )
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6": "v6e"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one chip in one slice: `shape` of the chips, () where a switch links them."""

    chip: Chip
    devices: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """As XLA's ahead-of-time compiler takes it, `v5e:2x4`."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape)) or self.devices}"

    @property
    def is_tpu(self) -> bool:
        return self.chip.dims > 0

    def __str__(self) -> str:
        noun = "device" if self.devices == 1 else "devices"
        return f"{self.name} ({self.devices} {noun}, {size(self.chip.memory)} each)"


def size(count: float) -> str:
    """Bytes in GiB, two places."""
    return f"{count / GIB:.2f} GiB"


def topology(name: str) -> Topology:
    """The topology of `v3-8`, `v4-32`, `v5e-16`, `v5litepod-16`, `v5e:4x8`, `v4:2x2x1`, `gpu:h100x8` or `cpu:8`.

    Raises ConfigError naming what is known.
    """
    text = name.strip().lower()
    gpu = re.fullmatch(r"(?:gpu:)?(a100|h100|h200|b200|cpu)(?:[x:-](\d+))?", text.replace("cpu:", "cpu-"))
    if gpu:
        return Topology(CHIPS[gpu.group(1)], int(gpu.group(2) or 1), ())
    slice_ = re.fullmatch(r"(v\d[a-z]*)(?:-(\d+)|:(\d+(?:x\d+)+))", text)
    chip = CHIPS.get(_ALIASES.get(slice_.group(1), slice_.group(1))) if slice_ else None
    if slice_ is None or chip is None or not chip.dims:
        raise ConfigError(
            f"topology {name!r} is not known; expected such as v3-8, v4-32, v5e-16, v5p-128, v6e:4x8, gpu:h100x8 or "
            f"cpu:8 (chips: {', '.join(CHIPS)})"
        )
    if slice_.group(3):
        shape = tuple(int(n) for n in slice_.group(3).split("x"))
        if len(shape) != chip.dims or 0 in shape:
            raise ConfigError(f"topology {name!r}: chips of {chip.name} are linked in {chip.dims} dimensions, e.g. "
                              f"{chip.name}:{'x'.join(map(str, _shape(16, chip.dims)))}")  # fmt: skip
        return Topology(chip, math.prod(shape) * chip.devices, shape)
    count = int(slice_.group(2))
    chips = count // chip.suffix
    if count % chip.suffix or chips < 1 or chips & (chips - 1):
        raise ConfigError(
            f"topology {name!r}: the number after {chip.name} counts {'cores' if chip.suffix == 2 else 'chips'}, and "
            f"slices are powers of two, from {chip.name}-{chip.suffix} on"
        )
    return Topology(chip, chips * chip.devices, _shape(chips, chip.dims))


def _shape(chips: int, dims: int) -> tuple[int, ...]:
    """As near to a cube as powers of two can be, smallest side first."""
    power = int(math.log2(chips))
    sides = [2 ** ((power + i) // dims) for i in range(dims)]
    if dims == 3 and chips == 4:
        return (2, 2, 1)
    return tuple(sides)
