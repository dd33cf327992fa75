"""Train or fine-tune on this machine's devices, or continue a run.

    python device_train.py --config configs/quickstart.json --platform cpu --devices 8

Run the same command again to continue a run that was stopped. docs/training.md tells the rest.
Exit codes: 0 done, 2 something to correct, 3 stopped by values that are not finite, 75 interrupted and saved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer.command_line import (
    add_devices,
    add_training,
    check_training,
    ending_at_once,
    exit_of_training,
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the command that a stopped run prints leaves options out by their whole names
    )
    add_training(parser)
    add_devices(parser)
    return check_training(parser, parser.parse_args(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    # Imported after parsing, so that --help and mistakes on the command line show at once.
    with ending_at_once():
        from mesh_transformer.training import local

    return exit_of_training(lambda: local.train(local.Request(**vars(options)), command=["device_train.py", *words]))


if __name__ == "__main__":
    sys.exit(main())
