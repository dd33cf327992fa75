"""A plan in words and figures."""

from __future__ import annotations

from mesh_transformer import parameters
from mesh_transformer.config import Config
from mesh_transformer.planning.chips import Topology, size
from mesh_transformer.planning.estimate import Estimate, Time, time_of

WHAT = {"train": "update", "eval": "batch", "generate": "token of every row"}


def text(config: Config, topology: Topology, estimate: Estimate) -> str:
    """The table of one estimate, one fact a line."""
    how = "read from the compiled program" if estimate.exact else "by arithmetic alone"
    remat = f", remat {estimate.remat}" if estimate.task == "train" else ""
    mesh = f"dp {estimate.dp} x mp {estimate.mp}, zero_stage {config.mesh.zero_stage}{remat}"
    lines = [
        config.source or "config",
        f"on                {topology}, as {mesh}; {how}",
        f"parameters        {parameters.count(config.model, estimate.mp):,}",
        f"{WHAT[estimate.task].split()[0]:<18}{_batch(config, estimate)}",
        "",
        *_memory(topology, estimate),
        "",
        f"products a device {estimate.flops / 1e12:.3f} TFLOP, "
        f"{estimate.flops / estimate.model_flops:.2f} times the model's own",
        "",
        *_traffic(estimate),
        *_times(topology, estimate, time_of(estimate, topology)),
    ]
    return "\n".join(lines) + "\n"


def _batch(config: Config, estimate: Estimate) -> str:
    mesh, rows = config.mesh, config.mesh.per_replica_batch * estimate.dp
    if estimate.task == "generate":
        return f"rows {estimate.tokens:,}, each with a cache of {config.model.seq} positions"
    split = f"{mesh.gradient_accumulation_steps} microbatches x " if estimate.task == "train" else ""
    sequences = rows * (mesh.gradient_accumulation_steps if split else 1)
    return f"{estimate.tokens:,} tokens = {sequences} sequences ({split}{mesh.per_replica_batch} x dp {estimate.dp})"


def _memory(topology: Topology, estimate: Estimate) -> list[str]:
    rows = [
        ("weights", estimate.weights, ""),
        ("moments", estimate.moments, ""),
        ("gradients", estimate.gradients, ""),
        ("cache", estimate.cache, " of keys and values"),
        ("copies", estimate.copies, " of weights in the compute dtype"),
        ("activations", estimate.activations, ", kept for the backward pass"),
        ("temporaries", estimate.temporaries, ""),
    ]
    usable = topology.chip.usable
    found = [f"  {name:<16}{size(count)}{note}" for name, count, note in rows if count]
    share = f"{estimate.peak / usable:.0%} of the {size(usable)} that a program gets"
    return [f"memory a device   {size(estimate.peak)} at its fullest, {share}", *found]


def _traffic(estimate: Estimate) -> list[str]:
    if not estimate.traffic:
        return ["traffic a device  none", ""]
    found = sorted(estimate.traffic, key=lambda each: -each.sent)
    rows = [
        f"  {each.kind:<18}over {each.axis:<10} of {each.devices:<4} {each.runs:>6} times {each.bytes:>14,} bytes"
        for each in found
    ]
    return ["traffic a device", *rows, ""]


def _times(topology: Topology, estimate: Estimate, time: Time) -> list[str]:
    rate = [estimate.tokens / seconds for seconds in (time.in_turn, time.overlapped)]
    mfu = [estimate.model_flops / topology.chip.flops / seconds for seconds in (time.in_turn, time.overlapped)]
    parts = [
        ("compute", time.compute, "matrix products at peak speed"),
        ("HBM", time.memory, f"{size(estimate.accessed)} read and written"),
        ("ICI", time.links, "links between devices"),
        ("DCN", time.network, "network between slices or hosts"),
    ]
    return [
        f"step time         {_ms(time.overlapped)} where all overlaps, {_ms(time.in_turn)} where links work alone",
        *[f"  {name:<16}{_ms(seconds)}, {note}" for name, seconds, note in parts if seconds],
        f"speed             {rate[0]:,.0f} to {rate[1]:,.0f} tokens/s, MFU {mfu[0]:.0%} to {mfu[1]:.0%}; "
        f"{time.limit} sets the pace",
    ]


def _ms(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e3:.2g} ms"
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def advice(config: Config, topology: Topology, task: str = "train") -> str:
    """What to change where a step does not fit."""
    mesh, ways = config.mesh, []
    if task == "train":
        if config.model.remat not in ("auto", "full"):
            ways.append("remat full")
        if mesh.zero_stage != 3 and topology.devices > mesh.cores_per_replica:
            ways.append("zero_stage 3, which cuts the state over the replicas too")
        if mesh.zero_stage == 3 and config.version == 2 and config.run.early_collect:
            ways.append("early_collect false")
    if mesh.cores_per_replica < topology.devices:
        ways.append("a larger cores_per_replica")
    if mesh.per_replica_batch > 1:
        ways.append("a smaller per_replica_batch" + (" with more gradient_accumulation_steps" * (task == "train")))
    ways.append("a larger slice" if topology.devices < topology.chip.largest else "a chip with more memory")
    return f"what would help: {'; '.join(ways)}"


def settings(config: Config) -> str:
    """The keys that a search changes, in a line."""
    mesh = config.mesh
    return (
        f"cores_per_replica {mesh.cores_per_replica}, per_replica_batch {mesh.per_replica_batch}, "
        f"gradient_accumulation_steps {mesh.gradient_accumulation_steps}, zero_stage {mesh.zero_stage}, "
        f"remat {config.model.remat}"
    )
