"""Train or fine-tune on many hosts, driven from this machine through Ray, or continue a run.

    python train.py --tpu local --hosts 2 --devices-per-host 4 --config configs/quickstart.json

Hosts may die: the run goes on from its last checkpoint on those that are there again. Run the same command again to
continue a run that was stopped. docs/pods.md tells the rest.
Exit codes: 0 done, 1 hosts failed too often, 2 something to correct, 3 stopped by values that are not finite,
75 interrupted and saved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer.cluster.host_options import add_hosts
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.command_line import add_training, check_training, complain, ending_at_once, exit_of_training
from mesh_transformer.errors import EXIT_FAILED


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the command that a stopped run prints leaves options out by their whole names
    )
    add_training(parser)
    add_hosts(parser)
    return check_training(parser, parser.parse_args(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    # Imported after parsing, so that --help and mistakes on the command line show at once.
    with ending_at_once():
        from mesh_transformer.cluster import command

    def run() -> int:
        try:
            return command.train(options, command=["train.py", *words])
        except HostError as error:
            complain(error)
            return EXIT_FAILED

    return exit_of_training(run)


if __name__ == "__main__":
    sys.exit(main())
