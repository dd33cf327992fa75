"""The pictures of docs/scale.md: bars of a device's memory, and a roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mesh_transformer.planning.chips import GIB, Chip, Topology
from mesh_transformer.planning.estimate import Estimate
from scripts.draw_parallelism import svg, text

PARTS = (
    ("weights", "#4477aa"), ("moments", "#66ccee"), ("gradients", "#228833"), ("copies", "#ccbb44"),
    ("activations", "#ee6677"), ("temporaries", "#aa3377"),
)  # fmt: skip

Plan = tuple[str, Topology, Estimate]


def bars(plans: Sequence[Plan]) -> str:
    """One bar for each plan, as long as the share of the chip's memory that is in use; a line where it is full."""
    left, width, step, top = 250, 470, 26, 44
    body = [text(left, 16, "one device's memory, as a share of what a program gets")]
    for i, (name, colour) in enumerate(PARTS):
        x = left + i * 92
        body += [f'<rect x="{x}" y="24" width="10" height="10" fill="{colour}"/>', text(x + 14, 33, name, 11)]
    for row, (name, topology, estimate) in enumerate(plans):
        y, x = top + row * step, float(left)
        body.append(text(left - 8, y + 14, name, 11, "end"))
        for part, colour in PARTS:
            length = getattr(estimate, part) / topology.chip.usable * width
            body.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="18" fill="{colour}"/>')
            x += length
        held = f"{estimate.peak / GIB:.1f} of {topology.chip.usable / GIB:.1f} GiB"
        body.append(text(max(x, left + width) + 6, y + 13, held, 10))
    full, bottom = left + width, top + len(plans) * step
    body.append(f'<line x1="{full}" y1="{top - 4}" x2="{full}" y2="{bottom}" stroke="#222" stroke-dasharray="4 3"/>')
    return svg(left + width + 120, bottom + 10, body)


def roofline(chips: Sequence[Chip], plans: Sequence[Plan]) -> str:
    """FLOP/s against FLOP per byte of memory, both logarithmic: what chips can do at most, and where plans stand."""
    left, top, width, height = 60, 20, 560, 330
    low, high, floor, ceiling = 1.0, 4.0, 13.0, 15.2  # decades

    def place(intensity: float, flops: float) -> tuple[float, float]:
        x = left + (math.log10(intensity) - low) / (high - low) * width
        return x, top + (ceiling - math.log10(flops)) / (ceiling - floor) * height

    body = [
        text(left + width / 2, top + height + 34, "FLOP for each byte of memory that is read or written", 12, "middle")
    ]
    body.append(text(left - 6, 14, "FLOP/s"))
    for decade in range(int(low), int(high) + 1):
        x, _ = place(10.0**decade, 1e14)
        body.append(f'<line x1="{x:.0f}" y1="{top}" x2="{x:.0f}" y2="{top + height}" stroke="#ddd"/>')
        body.append(text(x, top + height + 16, f"{10**decade:,}", 11, "middle"))
    for decade in range(int(floor), int(ceiling) + 1):
        _, y = place(10, 10.0**decade)
        body.append(f'<line x1="{left}" y1="{y:.0f}" x2="{left + width}" y2="{y:.0f}" stroke="#ddd"/>')
        body.append(text(left - 6, y + 4, f"1e{decade}", 11, "end"))
    for chip, colour in zip(chips, ("#4477aa", "#228833", "#ee6677", "#aa3377"), strict=False):
        start = max(10.0**low, 10.0**floor / chip.memory_bandwidth)
        ridge = chip.flops / chip.memory_bandwidth
        points = [place(start, start * chip.memory_bandwidth), place(ridge, chip.flops), place(10.0**high, chip.flops)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body.append(text(left + width + 6, points[-1][1] + 4, chip.name, 12))
    for number, (_, topology, estimate) in enumerate(plans, 1):
        intensity = estimate.flops / estimate.accessed
        reached = min(topology.chip.flops, intensity * topology.chip.memory_bandwidth)
        x, y = place(min(intensity, 10.0**high), reached)
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#222"/>')
        body.append(text(x, y - 8 - 11 * (number % 2), str(number), 11, "middle"))
    for number, (name, _, _) in enumerate(plans, 1):
        body.append(text(left, top + height + 40 + number * 16, f"{number}: {name}", 11))
    return svg(left + width + 60, top + height + 60 + len(plans) * 16, body)
