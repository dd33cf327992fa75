"""Look into a checkpoint: are all files there and whole, and which names, shapes, types and step do they hold?

Needs no accelerator and starts none: a checkpoint saved on many devices can be looked at anywhere.

    python scripts/check_ckpt.py runs/quickstart            # the newest step of a model_dir
    python scripts/check_ckpt.py step_383500 --config configs/6B_roto_256.json --verify --leaves
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mesh_transformer.checkpoint import inspect as inspection  # noqa: E402
from mesh_transformer.checkpoint.inspect import Inspection  # noqa: E402
from mesh_transformer.checkpoint.store import find_step  # noqa: E402
from mesh_transformer.config import load_config  # noqa: E402
from mesh_transformer.errors import EXIT_DONE, EXIT_USER, MeshTransformerError  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a step_N folder, or a model_dir (its newest step); local, gs:// or another URL")
    parser.add_argument("--config", metavar="FILE", help="also check that the step holds this config's model")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare checksums")
    parser.add_argument("--leaves", action="store_true", help="list every leaf: name, shape, type")
    return parser.parse_args(arguments)


def report(found: Inspection, leaves: bool) -> str:
    """The text for a person."""
    files = found.found
    lines = [
        f"{files.path}",
        f"  layout          {files.shards} shards x 16 files, {'full (with optimizer)' if files.full else 'slim'}, "
        f"{'with' if files.manifest else 'without'} manifest",
        f"  parameters      {found.parameters:,} in {sorted({leaf.dtype for leaf in found.leaves if leaf.shape})}",
        *(f"  {name.rpartition('/')[2].replace('_', ' '):<16}{value}" for name, value in found.counters.items()),
    ]
    for model in found.models:
        sizes = f"layers {model.layers}, d_model {model.d_model}, n_vocab {model.n_vocab}"
        lines.append(f"  model           {sizes}, norm {model.norm}, pe {model.pe}")
    if len(found.models) > 1:
        lines.append("                  (files without a manifest do not tell these apart; --config settles it)")
    if leaves:
        lines += [
            f"  {leaf.name}  {list(leaf.shape)} {leaf.dtype}, {list(leaf.shard_shape)} on a shard"
            for leaf in found.leaves
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        model = load_config(options.config).model if options.config else None
        found = inspection.inspect(find_step(options.path), model)
        print(report(found, options.leaves))
        if options.verify:
            print(f"  verified        {inspection.verify(found.found)}")
    except MeshTransformerError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
