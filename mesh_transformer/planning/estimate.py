"""The plan of one config on one topology: what a device holds, computes and sends in a step, and how long it takes."""

from __future__ import annotations

import dataclasses

from mesh_transformer.planning.chips import Chip


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of collective of a step: over which mesh axis, how many devices, how often, bytes of one run."""

    kind: str
    axis: str
    devices: int
    runs: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step, by a ring: (n - 1) / n of the value, twice for an all-reduce."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * (self.devices - 1) / self.devices * self.runs * self.bytes


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one device and one step.

    Bytes: `weights`, `moments`, `gradients` and `rest` (activations and temporaries), which make the `peak`, and
    `accessed`, what is read from and written to memory. `flops`: of all matrix products; `model_flops`: the model's own
    (see `training.throughput.flops_per_token`). `tokens`: of all devices.
    """

    weights: float
    moments: float
    gradients: float
    rest: float
    accessed: float
    flops: float
    model_flops: float
    tokens: int
    traffic: tuple[Traffic, ...]

    @property
    def peak(self) -> float:
        return self.weights + self.moments + self.gradients + self.rest


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of a step by a roofline: products at peak speed, memory and links at full bandwidth."""

    products: float
    memory: float
    links: float

    @property
    def overlapped(self) -> float:
        """Where the slowest hides the others: no step is faster."""
        return max(self.products, self.memory, self.links)

    @property
    def in_turn(self) -> float:
        """Where links work alone: about what a step takes that overlaps nothing."""
        return max(self.products, self.memory) + self.links

    @property
    def limit(self) -> str:
        """What sets the pace."""
        return max(("products", "memory", "links"), key=lambda name: float(getattr(self, name)))


def time_of(estimate: Estimate, chip: Chip) -> Time:
    """The roofline of a step on one chip."""
    links = sum(each.sent / _bandwidth(each, chip) for each in estimate.traffic)
    return Time(estimate.flops / chip.flops, estimate.accessed / chip.memory_bandwidth, links)


def _bandwidth(traffic: Traffic, chip: Chip) -> float:
    """Bytes/s of a ring: both directions of a torus' link; a switch; the network, where a group is larger than that."""
    if chip.dims:
        return 2 * chip.link_bandwidth
    return chip.link_bandwidth if traffic.devices <= chip.per_host else chip.network_bandwidth
