"""Look into a checkpoint: are all files there and whole, and which names, shapes, types and step do they hold? Or write
it again in the other layout.

    python -m mesh_transformer.checkpoint inspect runs/quickstart          # the newest step of a model_dir
    python -m mesh_transformer.checkpoint inspect step_383500 --config configs/6B_roto_256.json --leaves
    python -m mesh_transformer.checkpoint verify gs://bucket/run/step_500  # reads everything, compares checksums
    python -m mesh_transformer.checkpoint convert runs/v2 runs/v2_shards --format shards

Needs no accelerator and starts none: a checkpoint saved on many devices can be looked at anywhere.
Exit codes: 0 all is well, 1 something is missing, damaged, or not what --config says, 2 another mistake.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer import storage
from mesh_transformer.checkpoint import convert, inspect, manifest
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.inspect import Inspection
from mesh_transformer.checkpoint.store import find_step
from mesh_transformer.command_line import add_version, complain, log_lines, positive
from mesh_transformer.config import load_config
from mesh_transformer.errors import EXIT_DONE, CheckpointError, MeshTransformerError

EXIT_DAMAGED = 1

_MODEL_KEYS = ("version", "layers", "d_model", "n_heads", "n_vocab", "seq", "norm", "pe", "pe_rotary_dims")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mesh_transformer.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "action", choices=("inspect", "verify", "convert"), help="verify also reads every byte; convert writes a copy"
    )
    parser.add_argument("path", help="a step_N folder, or a model_dir (its newest step); local, gs:// or another URL")
    parser.add_argument("out", nargs="?", help="convert: the folder for step_N and meta.json, or step_N itself")
    parser.add_argument("--config", metavar="FILE", help="also check that the step holds this config's model")
    add_version(parser)
    parser.add_argument("--leaves", action="store_true", help="list every leaf: name, shape, type")
    parser.add_argument("--format", choices=("shards", "orbax"), help="convert: the layout of the copy")
    parser.add_argument(
        "--shards", type=positive, metavar="M", help="convert: shards of the copy (the source's number)"
    )
    options = parser.parse_args(arguments)
    if (options.action == "convert") != (options.out is not None and options.format is not None):
        parser.error("convert takes two folders and --format, the other actions one folder and no --format")
    return options


def report(found: Inspection, leaves: bool) -> str:
    """The text for a person."""
    kind = "full (with optimizer)" if found.full else "slim (parameters alone)"
    types = sorted({leaf.dtype for leaf in found.leaves if leaf.shape})
    lines = [
        f"{found.path}",
        f"  layout          {found.layout}, {kind}, {'with' if found.described else 'without'} manifest",
        f"  step            {found.step}",
        f"  {found.parts[0]:<16}{found.parts[1]}",
        f"  parameters      {found.parameters:,}",
        f"  bytes           {found.bytes:,} in {' and '.join(types)}",
    ]
    lines += [
        f"  {name.rpartition('/')[2].replace('_', ' '):<16}{value}"
        for name, value in found.counters.items()
        if name != "step"
    ]
    if found.config is not None:
        known = [f"{key} {found.config[key]}" for key in _MODEL_KEYS if key in found.config]
        lines.append(f"  config          {', '.join(known)}")
    else:
        for model in found.models:
            sizes = f"layers {model.layers}, d_model {model.d_model}, n_vocab {model.n_vocab}"
            lines.append(f"  model           {sizes}, norm {model.norm}, pe {model.pe} (by its shapes)")
        if len(found.models) > 1:
            lines.append("                  (shapes do not tell these apart; --config settles it)")
    if leaves:
        each = "on a shard" if found.layout.startswith("published") else "in a chunk"
        lines += [
            f"  {leaf.name}  {list(leaf.shape)} {leaf.dtype}, {list(leaf.shard_shape)} {each}" for leaf in found.leaves
        ]
    return "\n".join(lines)


def outline(path: str) -> str:
    """What can be said of a step that is not whole."""
    lines = [path]
    try:
        described = manifest.read(path)
    except CheckpointError:
        described = None
    if described is not None:
        lines.append(f"  step            {described.details.get('step', 'unknown')}")
        lines.append(f"  shards          {described.shards}, {len(described.files)} files in all")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    problems: list[str] = []
    try:
        config = load_config(options.config, version=options.version) if options.config else None
        path = find_step(options.path)
        if options.action == "convert":
            with log_lines():
                done = convert.convert(path, options.out, options.format, options.shards, config)
            print(f"wrote {done}")
            return EXIT_DONE
        model = config.model if config else None
        try:
            print(report(inspect.inspect(path, model), options.leaves))
        except CheckpointError as error:
            print(outline(path))
            problems += error.problems if isinstance(error, DamagedError) else [str(error)]
        if options.action == "verify" and storage.listdir(path):
            problems += _verify(path, problems)
    except CheckpointError as error:
        problems.append(str(error))
    except MeshTransformerError as error:
        return complain(error)
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    return EXIT_DAMAGED if problems else EXIT_DONE


def _verify(path: str, known: Sequence[str]) -> list[str]:
    """What reading everything finds besides what is known; says so if that is nothing."""
    try:
        how = inspect.verify(path)
    except DamagedError as error:
        files = {line.split()[0] for line in known}
        return [line for line in error.problems if line.split()[0] not in files]
    if not known:
        print(f"  verified        {how}")
    return []


if __name__ == "__main__":
    sys.exit(main())
