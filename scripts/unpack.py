"""Turn a published archive into a checkpoint folder, in one pass; the tar file itself is never stored.

    python scripts/unpack.py step_383500_slim.tar.zstd gptj --config configs/6B_roto_256.json
    python scripts/unpack.py step_383500.tar.zstd gptj --config configs/6B_roto_256.json --params-only --dtype bf16

The first stores all 12 GB (of the full archive 73 GB); the second leaves the optimizer out as it passes, and stores 12
GB of the full one. Either is local or a URL, of zstd, gzip, xz or plain tar. docs/weights.md tells the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mesh_transformer.checkpoint import archive, archive_slim  # noqa: E402
from mesh_transformer.checkpoint.casting import FLOAT_TYPES  # noqa: E402
from mesh_transformer.command_line import add_version, complain, log_lines  # noqa: E402
from mesh_transformer.config import load_config  # noqa: E402
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", help="a .tar.zstd, .tar.gz, .tar.xz or .tar file with one step in it")
    parser.add_argument("out", metavar="OUT", help="the folder for step_N and meta.json, or that step_N itself")
    parser.add_argument("--config", metavar="FILE", help="the model's config: checks the step, and is recorded with it")
    parser.add_argument("--params-only", action="store_true", help="leave the optimizer out; needs --config")
    parser.add_argument("--dtype", choices=("f32", "bf16", "f16"), help="with --params-only: of the parameters")
    add_version(parser)
    options = parser.parse_args(arguments)
    if options.params_only and not options.config:
        parser.error("--params-only needs --config, which tells where in the files the parameters begin")
    if options.dtype and not options.params_only:
        parser.error("--dtype needs --params-only; a whole archive is stored as it is")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with log_lines():
            config = load_config(options.config, version=options.version) if options.config else None
            if config is not None and options.params_only:
                dtype = FLOAT_TYPES[options.dtype] if options.dtype else None
                path = archive_slim.unpack_slim(options.archive, options.out, config, dtype)
            else:
                path = archive.unpack(options.archive, options.out, config)
    except MeshTransformerError as error:
        return complain(error)
    print(f"wrote {path}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
