"""A plan in words and figures."""

from __future__ import annotations

from mesh_transformer.config import Config
from mesh_transformer.planning.chips import Topology, size
from mesh_transformer.planning.estimate import Estimate, time_of


def text(config: Config, topology: Topology, remat: str, estimate: Estimate) -> str:
    """The table of one estimate, one fact a line."""
    chip, time = topology.chip, time_of(estimate, topology.chip)
    mp = config.mesh.cores_per_replica
    dp = topology.devices // mp
    share = estimate.peak / chip.usable
    rate = [estimate.tokens / seconds for seconds in (time.in_turn, time.overlapped)]
    mfu = [estimate.model_flops / chip.flops / seconds for seconds in (time.in_turn, time.overlapped)]
    lines = [
        config.source or "config",
        f"on                {topology}, as dp {dp} x mp {mp}, zero_stage {config.mesh.zero_stage}, remat {remat}",
        f"update            {estimate.tokens:,} tokens",
        "",
        f"memory a device   {size(estimate.peak)} at its fullest, {share:.0%} of what a program gets",
        f"  weights         {size(estimate.weights)}",
        f"  moments         {size(estimate.moments)}",
        f"  gradients       {size(estimate.gradients)}",
        f"  activations     {size(max(estimate.rest, 0))}, temporaries included",
        "",
        f"products a device {estimate.flops / 1e12:.3f} TFLOP a step, "
        f"{estimate.flops / estimate.model_flops:.2f} times the model's own",
        "",
        "traffic a device",
    ]
    for each in sorted(estimate.traffic, key=lambda each: -each.sent)[:12]:
        lines.append(
            f"  {each.kind:<18}over {each.axis:<10} of {each.devices:<4} {each.runs:>6} times {each.bytes:>14,} bytes"
        )
    lines += [
        "",
        f"step time         {time.overlapped * 1e3:.1f} ms where all overlaps, {time.in_turn * 1e3:.1f} ms where links "
        "work alone",
        f"  products        {time.products * 1e3:.1f} ms at peak speed",
        f"  memory          {time.memory * 1e3:.1f} ms at full bandwidth",
        f"  links           {time.links * 1e3:.1f} ms at full bandwidth",
        f"speed             {rate[0]:,.0f} to {rate[1]:,.0f} tokens/s, MFU {mfu[0]:.0%} to {mfu[1]:.0%}; "
        f"{time.limit} set the pace",
    ]
    return "\n".join(lines) + "\n"


def advice(config: Config, topology: Topology) -> str:
    """What to change where a step does not fit."""
    mesh, ways = config.mesh, []
    if mesh.zero_stage != 3 and topology.devices > mesh.cores_per_replica:
        ways.append("zero_stage 3, which cuts the state over the replicas too")
    if mesh.cores_per_replica < topology.devices:
        ways.append("a larger cores_per_replica")
    if mesh.per_replica_batch > 1:
        ways.append("per_replica_batch 1 with more gradient_accumulation_steps")
    ways.append("a larger slice")
    return f"what would help: {'; '.join(ways)}"
