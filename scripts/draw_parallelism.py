"""Draws docs/images/parallelism-*.svg: what each device holds, and what a step moves, from the table and the program.

python scripts/draw_parallelism.py [--output-dir docs/images]

Placements are `parameters.storage_specs` of a small model on dp 4 x mp 2; traffic is what
`planning.program.collectives` finds in its compiled training step.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from mesh_transformer.planning.program import Collective

STAGES = (0, 1, 3)
REPLICAS, SHARDS, MICROBATCHES = 4, 2, 2
CONFIG: dict[str, Any] = {
    "layers": 3, "d_model": 128, "n_heads": 8, "n_vocab": 512, "seq": 16, "cores_per_replica": SHARDS,
    "gradient_accumulation_steps": MICROBATCHES, "compute_dtype": "float32", "remat": "dots", "lr": 1e-3,
    "total_steps": 10, "train_set": "none.index",
}  # fmt: skip
COLOURS = ("#4477aa", "#ee6677")  # of the model-parallel parts
HELD = (("weights", False), ("gradients", False), ("moments", True))  # what, whether placed as moments are
MATRIX = ("causal_transformer_shard/~/transformer_layer_shard", "w1")  # the layer's first feed-forward matrix


def blocks(stage: int, moments: bool) -> Iterator[tuple[int, int, float, float, float, float]]:
    """(replica, shard, left, top, width, height) of the part of the matrix that a device holds, in shares of it."""
    from mesh_transformer import load_config, parameters
    from mesh_transformer.mesh import DP, MP

    model = load_config(CONFIG).model
    module, name = MATRIX
    _, rows, columns = parameters.storage_specs(model, SHARDS, stage, moments)[module][name]
    for replica in range(REPLICAS):
        for shard in range(SHARDS):
            places = []
            for axis in (columns, rows):
                parts, index = {DP: (REPLICAS, replica), MP: (SHARDS, shard)}.get(axis, (1, 0))
                places.append((index / parts, 1 / parts))
            (left, width), (top, height) = places
            yield replica, shard, left, top, width, height


def svg(width: int, height: int, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *body, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="#222">{words}</text>'


def held() -> str:
    """Devices as columns, stages as rows; the dark part of each square is what the device holds of one matrix."""
    side, gap, left, band = 34, 6, 96, 148
    body = []
    for row, stage in enumerate(STAGES):
        top = 44 + row * band
        body.append(text(8, top - 10, f"zero_stage {stage}", 14))
        for line, (what, moments) in enumerate(HELD):
            # A gradient is summed over microbatches as its weights lie; stage 1 cuts it behind the last of them.
            y = top + line * (side + gap)
            body.append(text(left - 10, y + side / 2 + 4, what, anchor="end"))
            for replica, shard, x0, y0, width, height in blocks(stage, moments):
                x = left + (replica * SHARDS + shard) * (side + gap) + replica * 10
                body.append(f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="#eee" stroke="#999"/>')
                body.append(
                    f'<rect x="{x + x0 * side:g}" y="{y + y0 * side:g}" width="{width * side:g}" '
                    f'height="{height * side:g}" fill="{COLOURS[shard]}"/>'
                )
    for replica in range(REPLICAS):
        middle = left + replica * (SHARDS * (side + gap) + 10) + side + gap / 2
        body.append(text(middle, 18, f"replica {replica}", anchor="middle"))
    return svg(left + REPLICAS * (SHARDS * (side + gap) + 10), 44 + len(STAGES) * band, body)


def traffic(stage: int) -> list[Collective]:
    """The collectives of the compiled step."""
    import jax
    import jax.numpy as jnp

    from mesh_transformer import CausalTransformer, load_config, make_mesh, steps
    from mesh_transformer.mesh import find_devices
    from mesh_transformer.planning.program import collectives
    from mesh_transformer.transformer_shard import train_step

    config = load_config({**CONFIG, "zero_stage": stage})
    network = CausalTransformer(config, make_mesh(config, find_devices(count=REPLICAS * SHARDS)))
    ids = jax.ShapeDtypeStruct((MICROBATCHES, REPLICAS, network.model.seq), jnp.int32)
    batch: Any = steps.Batch(ids, ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32))
    step = train_step(network.model, config.optim, network.mesh, network.zero)
    return collectives(step.lower(jax.eval_shape(lambda: network.state), batch).compile().as_text())


def moved(found: dict[int, list[Collective]]) -> str:
    """Bars: bytes of a device and step over dp, for each stage, in units of the matrices' bytes of a device."""
    from mesh_transformer import load_config, parameters

    model = load_config(CONFIG).model
    unit = 4 * sum(math.prod(kind.local_shape(SHARDS)) for kind in parameters.kinds(model, SHARDS) if kind.zero)
    kinds, left, scale, height = ("all-reduce", "reduce-scatter", "all-gather"), 170, 46, 22
    body = [text(8, 20, f"bytes over dp in a step of {MICROBATCHES} microbatches, in times the matrices of a device")]
    y = 34
    for stage in STAGES:
        for kind in kinds:
            total = sum(one.total for one in found[stage] if one.kind == kind and one.group_size == REPLICAS)
            body.append(text(left - 8, y + 15, f"stage {stage}, {kind}", anchor="end"))
            body.append(f'<rect x="{left}" y="{y}" width="{scale * total / unit:.1f}" height="16" fill="#4477aa"/>')
            body.append(text(left + scale * total / unit + 6, y + 13, f"{total / unit:.2f}"))
            y += height
        y += 8
    return svg(480, y, body)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default=str(ROOT / "docs/images"), help="where the pictures go")
    options = parser.parse_args(arguments)
    from mesh_transformer.mesh import choose_platform

    choose_platform("cpu", REPLICAS * SHARDS)
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parallelism-held.svg").write_text(held())
    (folder / "parallelism-moved.svg").write_text(moved({stage: traffic(stage) for stage in STAGES}))
    print(f"{folder}/parallelism-held.svg and {folder}/parallelism-moved.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
