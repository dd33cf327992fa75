"""The plan of one config on one topology: what a device holds, computes and sends in a step, and how long it takes."""

from __future__ import annotations

import dataclasses

from mesh_transformer.planning.chips import Topology
from mesh_transformer.planning.traffic import DP, Traffic

TASKS = ("train", "eval", "generate")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one device and one step of `task`: an update, a batch of scores, or a token of every row.

    Bytes: `peak`, the most that exists at once, and what of it `weights`, `moments`, `gradients`, `cache` (of keys and
    values), `copies` (of weights in the compute dtype, and gradients of those that `early_collect` gathers) and
    `activations` (kept for the backward pass) take; and `accessed`, what is read from and written to memory. `flops`:
    of all matrix products; `model_flops`: the model's own (see `training.throughput.flops_per_token`). `tokens`: of all
    devices. `exact`: read from the compiled program.
    """

    task: str
    exact: bool
    remat: str
    dp: int
    mp: int
    peak: float
    weights: float
    moments: float
    gradients: float
    cache: float
    copies: float
    activations: float
    accessed: float
    flops: float
    model_flops: float
    tokens: int
    traffic: tuple[Traffic, ...]

    @property
    def state(self) -> float:
        """Bytes of what lives from step to step, and of the gradients."""
        return self.weights + self.moments + self.gradients + self.cache

    @property
    def temporaries(self) -> float:
        """Bytes of all else that is at work when memory is at its fullest."""
        return max(0.0, self.peak - self.state - self.copies - self.activations)


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of a step by a roofline: products at peak speed; memory, links and the network at full bandwidth.

    `one_engine`: the same cores do all of it.
    """

    compute: float
    memory: float
    links: float
    network: float
    one_engine: bool = False

    @property
    def overlapped(self) -> float:
        """Where the slowest hides the others: no step is faster."""
        parts = (self.compute, self.memory, self.links, self.network)
        return sum(parts) if self.one_engine else max(parts)

    @property
    def in_turn(self) -> float:
        """Where links and network work alone: about what a step takes that overlaps nothing."""
        return self.overlapped if self.one_engine else max(self.compute, self.memory) + self.links + self.network

    @property
    def limit(self) -> str:
        """What sets the pace."""
        parts = {"compute": self.compute, "HBM": self.memory, "ICI": self.links, "DCN": self.network}
        return max(parts, key=lambda name: parts[name])


def time_of(estimate: Estimate, topology: Topology) -> Time:
    """The roofline of a step on one device of a topology."""
    chip, links, network = topology.chip, 0.0, 0.0
    for each in estimate.traffic:
        over_links, over_network = _seconds(each, topology)
        links, network = links + over_links, network + over_network
    fresh = max(0.0, estimate.peak - estimate.weights - estimate.moments - estimate.cache)
    memory = estimate.accessed / chip.memory_bandwidth + fresh / chip.fresh_bandwidth
    return Time(estimate.flops / chip.flops, memory, links, network, chip.one_engine)


def _seconds(traffic: Traffic, topology: Topology) -> tuple[float, float]:
    """Of a ring over both directions of a torus' link, or a switch; and over the network, where the devices of a group
    are in several slices or hosts: what is left after each slice has summed its own."""
    chip = topology.chip
    if chip.dims:
        inside = traffic.devices // topology.slices if traffic.axis != "mp" else traffic.devices
        within = dataclasses.replace(traffic, devices=max(1, inside))
        links = within.sent / (2 * chip.link_bandwidth)
        if topology.slices == 1 or traffic.axis == "mp":
            return links, 0.0
        across = dataclasses.replace(traffic, devices=topology.slices)
        return links, across.sent / max(1, inside) / chip.network_bandwidth
    beyond = traffic.axis == DP and topology.devices > chip.per_host or traffic.devices > chip.per_host
    return (0.0, traffic.sent / chip.network_bandwidth) if beyond else (traffic.sent / chip.link_bandwidth, 0.0)
