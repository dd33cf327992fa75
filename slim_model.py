"""Write a checkpoint without its optimizer and in 16 bits: a sixth of the size, for sampling, serving and export.

    python slim_model.py --config configs/6B_roto_256.json
    python slim_model.py --config configs/quickstart.json --ckpt-step best --output runs/quickstart_slim

The new folder stands beside the config's model_dir, as MODEL_DIR_slim (or _slim_f16), and every other script reads it.
Needs no accelerator, and memory for about two of the model's largest tensors. docs/weights.md tells the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer.command_line import add_version, complain, log_lines, which_step
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="JSON config, a path or URL")
    add_version(parser)
    parser.add_argument(
        "--ckpt-step", type=which_step, default="latest", metavar="N", help="a step, latest or best (latest)"
    )
    parser.add_argument(
        "--f16", action="store_true", help="float16 instead of bfloat16; refused where a value is above 65504"
    )
    parser.add_argument("--output", metavar="PATH", help="the folder for step_N and meta.json (MODEL_DIR_slim[_f16])")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # Imported after parsing, so that --help and mistakes on the command line show at once.
    from mesh_transformer.checkpoint import convert
    from mesh_transformer.checkpoint.casting import FLOAT_TYPES
    from mesh_transformer.checkpoint.store import CheckpointStore
    from mesh_transformer.config import load_config

    try:
        with log_lines():
            config = load_config(options.config, version=options.version)
            run = config.run
            store = CheckpointStore(run.directory, run.keep_n, run.keep_every, run.keep_best)
            source = store.path(store.resolve(options.ckpt_step))
            out = options.output or store.model_dir + ("_slim_f16" if options.f16 else "_slim")
            done = convert.slim(source, out, FLOAT_TYPES["f16" if options.f16 else "bf16"], config)
    except MeshTransformerError as error:
        return complain(error)
    print(f"wrote {done}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
