"""What accelerators can do, per JAX device, and the slices they come in, by the names that people use."""

from __future__ import annotations

import dataclasses
import math
import re

from mesh_transformer.config_fields import nearest
from mesh_transformer.errors import ConfigError

GIB, MIB = 2**30, 2**20


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device: bytes of its memory, and of what a program gets of it (`usable`); dense peak FLOP/s in bfloat16
    (fp16 on V100 and T4); bytes of on-chip memory that XLA keeps values in; bytes/s of its memory, of one link to a
    neighbour in one direction, and its share of its host's network.

    `dims`: of the torus that links chips (0: all to all, through a switch or the host); `devices`: per chip;
    `per_host`: devices; `suffix`: what N in NAME-N counts, units a chip; `largest`: devices of the largest slice that
    is offered; `kinds`: how JAX's `device_kind` begins. `one_engine`: the same cores multiply, move memory and pass
    values on, so that nothing overlaps; `fresh_bandwidth`: bytes/s of memory that each step takes anew from the system,
    which fills it with zeros, where the device keeps no pool of it.
    """

    name: str
    memory: float
    usable: float
    flops: float
    vector_memory: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    dims: int
    devices: int
    per_host: int
    suffix: int
    largest: int
    kinds: tuple[str, ...]
    source: str
    one_engine: bool = False
    fresh_bandwidth: float = math.inf


# What the TPU compiler calls available is from its own message for a program that is too large (libtpu 0.0.42).
_TPU = (
    "memory, FLOP/s, bandwidth, slices: cloud.google.com/tpu/docs, system architecture; links and network: How to "
    "Scale Your Model (2025), chapter 2; usable memory: the compiler's own limit"
)
_GPU = "the vendor's data sheet; usable: the 75 % that jax takes at first (XLA_PYTHON_CLIENT_MEM_FRACTION)"


def _tpu(
    name: str, memory: float, usable: float, flops: float, vector: float, bandwidth: float, link: float, network: float,
    shape: tuple[int, int, int, int], largest: int, *kinds: str,
) -> Chip:  # fmt: skip
    """GiB, teraflop/s, MiB and gigabytes/s; shape: dims, devices a chip and a host, units of the name a chip."""
    return Chip(name, memory * GIB, usable * GIB, flops * 1e12, vector * MIB, bandwidth * 1e9, link * 1e9,
                network * 1e9, *shape, largest, kinds, _TPU)  # fmt: skip


def _gpu(name: str, memory: float, flops: float, bandwidth: float, link: float, network: float, *kinds: str) -> Chip:
    """Gigabytes, teraflop/s and gigabytes/s."""
    return Chip(name, memory * 1e9, 0.75 * memory * 1e9, flops * 1e12, 0, bandwidth * 1e9, link * 1e9, network * 1e9,
                0, 1, 8, 1, 4096, kinds, _GPU)  # fmt: skip


CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v2", 8, 7.48, 22.5, 16, 350, 62, 3.1, (2, 2, 8, 2), 512, "TPU v2"),
        _tpu("v3", 16, 15.48, 61.5, 16, 450, 100, 3.1, (2, 2, 8, 2), 2048, "TPU v3"),
        _tpu("v4", 32, 30.75, 275, 32, 1228, 45, 6.25, (3, 1, 4, 2), 4096, "TPU v4"),
        _tpu("v5e", 16, 15.75, 197, 128, 819, 45, 3.1, (2, 1, 8, 1), 256, "TPU v5 lite", "TPU v5e"),
        _tpu("v5p", 96, 95.74, 459, 64, 2765, 90, 6.25, (3, 1, 4, 2), 4096, "TPU v5"),
        _tpu("v6e", 32, 31.25, 918, 128, 1640, 90, 12.5, (2, 1, 8, 1), 256, "TPU v6"),
        _gpu("b200", 180, 2250, 8000, 900, 50, "NVIDIA B200"),
        _gpu("h200", 141, 989, 4800, 450, 50, "NVIDIA H200"),
        _gpu("h100pcie", 80, 756, 2000, 64, 25, "NVIDIA H100 PCIe"),
        _gpu("h100", 80, 989, 3350, 450, 50, "NVIDIA H100"),
        _gpu("a100-40gb", 40, 312, 1555, 300, 25, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        _gpu("a100", 80, 312, 2039, 300, 25, "NVIDIA A100"),
        _gpu("a10g", 24, 70, 600, 32, 12, "NVIDIA A10G"),
        _gpu("l40s", 48, 362, 864, 32, 12, "NVIDIA L40S"),
        _gpu("l4", 24, 121, 300, 32, 12, "NVIDIA L4"),
        _gpu("rtx4090", 24, 165, 1008, 32, 1, "NVIDIA GeForce RTX 4090"),
        _gpu("rtx3090", 24, 71, 936, 32, 1, "NVIDIA GeForce RTX 3090"),
        _gpu("v100-32gb", 32, 125, 900, 150, 12, "Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB"),
        _gpu("v100", 16, 125, 900, 150, 12, "Tesla V100"),
        _gpu("t4", 16, 65, 320, 16, 4, "Tesla T4"),
        Chip("cpu", 4e9, 4e9, 21e9, 0, 5e9, 2e9, 1e9, 0, 1, 1024, 1, 1024, (),
             "one of 8 simulated devices of a two-core machine, whose 170 GFLOP/s, 40 GB/s, and 2 GB/s of memory that "
             "the system hands out page by page, they share", True, 2e9 / 8),
    )
}  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`; None where it is not known (any CPU). The first entry that fits counts."""
    kind = device_kind.lower()
    return next((chip for chip in CHIPS.values() if any(kind.startswith(k.lower()) for k in chip.kinds)), None)


_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6": "v6e"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """All devices of one or several equal slices: `shape` of a slice's chips, () where a switch links them."""

    chip: Chip
    devices: int
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """As XLA's ahead-of-time compiler takes it, `v5e:2x4`; several slices with their number in front."""
        one = f"{self.chip.name}:{'x'.join(map(str, self.shape)) or self.devices}"
        return one if self.slices == 1 else f"{self.slices} of {one}"

    @property
    def is_tpu(self) -> bool:
        return self.chip.dims > 0

    def __str__(self) -> str:
        noun = "device" if self.devices == 1 else "devices"
        return f"{self.name} ({self.devices} {noun}, {size(self.chip.memory)} each)"


def size(count: float) -> str:
    """Bytes in GiB, two places; in MiB where that is less than a tenth."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / MIB:.2f} MiB"


def smallest_first(family: str) -> list[Topology]:
    """The slices of a chip, by the powers of two of its devices. Raises ConfigError for an unknown one."""
    name = family.strip().lower().removeprefix("gpu:")
    chip = CHIPS.get(_ALIASES.get(name, name))
    if chip is None:
        raise ConfigError(
            f"chip {family!r} is not known; the nearest is {_nearest(name)!r}; known are {', '.join(CHIPS)}"
        )
    counts = [2**n for n in range(14) if chip.devices <= 2**n <= chip.largest]
    if not chip.dims:
        return [Topology(chip, count, ()) for count in counts]
    return [Topology(chip, n, _shape(n // chip.devices, chip.dims)) for n in counts if n >= 4 * chip.devices]


def topology(name: str) -> Topology:
    """The topology of `v3-8`, `v4-32`, `v5e-16`, `v5litepod-16`, `v5e:4x8`, `v4:2x2x1`, `gpu:h100x8` or `cpu:8`.

    A number above the largest slice's means several of those, linked by the network. Raises ConfigError, which names
    what is known.
    """
    text = name.strip().lower()
    flat = re.fullmatch(r"(?:gpu:)?([a-z]+\d*[a-z]*?(?:-\d+gb)?)(?:[x:-](\d+))?", text)
    if flat and flat.group(1) in CHIPS and not CHIPS[flat.group(1)].dims and flat.group(2) != "0":
        return Topology(CHIPS[flat.group(1)], int(flat.group(2) or 1), ())
    slice_ = re.fullmatch(r"(v\d[a-z]*)(?:-(\d+)|:(\d+(?:x\d+)+))", text)
    chip = CHIPS.get(_ALIASES.get(slice_.group(1), slice_.group(1))) if slice_ else None
    if slice_ is None or chip is None or not chip.dims:
        family = re.split(r"[:-]|x\d*$", text.removeprefix("gpu:"))[0]
        raise ConfigError(
            f"topology {name!r} is not known; the chip nearest to {family!r} is {_nearest(family)!r}; expected such as "
            "v3-8, v4-32, v5e-16, v5p-128, v6e:4x8, gpu:h100x8 or cpu:8"
        )
    if slice_.group(3):
        shape = tuple(int(n) for n in slice_.group(3).split("x"))
        if len(shape) != chip.dims or 0 in shape:
            raise ConfigError(f"topology {name!r}: chips of {chip.name} are linked in {chip.dims} dimensions, e.g. "
                              f"{chip.name}:{'x'.join(map(str, _shape(16, chip.dims)))}")  # fmt: skip
        devices = math.prod(shape) * chip.devices
        if devices > chip.largest:
            two = 2 * chip.largest // chip.devices * chip.suffix
            raise ConfigError(f"topology {name!r}: a slice of {chip.name} has at most {chip.largest} devices; "
                              f"{chip.name}-{two} is two of those")  # fmt: skip
        return Topology(chip, devices, shape)
    count = int(slice_.group(2))
    chips = count // chip.suffix
    if count % chip.suffix or chips in (0, 2) or chips & (chips - 1):
        raise ConfigError(
            f"topology {name!r}: the number after {chip.name} counts {'cores' if chip.suffix == 2 else 'chips'}, and "
            f"slices are {chip.name}-{chip.suffix} and powers of two from {chip.name}-{4 * chip.suffix} on"
        )
    slices = max(1, chips * chip.devices // chip.largest)
    return Topology(chip, chips * chip.devices, _shape(chips // slices, chip.dims), slices)


def _nearest(family: str) -> str:
    return nearest(family, CHIPS)


def _shape(chips: int, dims: int) -> tuple[int, ...]:
    """As near to a cube as powers of two can be, smallest side first."""
    power = int(math.log2(chips))
    sides = [2 ** ((power + i) // dims) for i in range(dims)]
    if dims == 3 and chips == 4:
        return (2, 2, 1)
    return tuple(sides)
