"""Write a checkpoint step again in another number of shards, and if asked another float type.

    python scripts/reshard.py step_383500_slim gptj_1 --shards 1
    python scripts/reshard.py gs://bucket/run gs://bucket/run_16 --shards 16 --dtype bf16

Needs no accelerator, and memory for about two of the model's largest tensors. Training and sampling read any number of
shards, so only the 2021 library and programs like it need this. docs/weights.md tells the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mesh_transformer.checkpoint import convert  # noqa: E402
from mesh_transformer.checkpoint.casting import FLOAT_TYPES  # noqa: E402
from mesh_transformer.command_line import add_version, complain, log_lines  # noqa: E402
from mesh_transformer.config import load_config  # noqa: E402
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN", help="a step_N folder, or a model_dir (its newest step)")
    parser.add_argument("out", metavar="OUT", help="the folder for step_N and meta.json, or that step_N itself")
    parser.add_argument("--shards", type=int, required=True, metavar="N", help="how many shards to write")
    parser.add_argument(
        "--dtype", choices=("f32", "bf16", "f16"), help="of the parameters (default: as they are; moments stay)"
    )
    parser.add_argument("--config", metavar="FILE", help="the model's config, for files that do not tell their norm")
    add_version(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with log_lines():
            config = load_config(options.config, version=options.version) if options.config else None
            dtype = FLOAT_TYPES[options.dtype] if options.dtype else None
            done = convert.reshard(options.source, options.out, options.shards, dtype, config)
    except MeshTransformerError as error:
        return complain(error)
    print(f"wrote {done}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
