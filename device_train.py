"""Train or fine-tune on this machine's devices, or continue a run.

    python device_train.py --config configs/quickstart.json --platform cpu --devices 8

Run the same command again to continue a run that was stopped. docs/training.md tells the rest.
Exit codes: 0 done, 2 something to correct, 3 stopped by values that are not finite, 75 interrupted and saved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer.command_line import add_version, complain, ending_at_once, log_lines, positive
from mesh_transformer.errors import EXIT_KEYBOARD, EXIT_NONFINITE, MeshTransformerError, NonFiniteError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the command that a stopped run prints leaves options out by their whole names
    )
    parser.add_argument("--config", required=True, help="JSON config, a path or URL")
    parser.add_argument(
        "--tune-model-path", metavar="PATH", help="fine-tune from this checkpoint: a step_N folder, or a model_dir"
    )
    parser.add_argument(
        "--fresh-opt", action="store_true", help="with --tune-model-path: do not load Adam's moments, start with zeros"
    )
    parser.add_argument("--new", action="store_true", help="delete the run in model_dir and start over; asks first")
    parser.add_argument("--yes", action="store_true", help="answer yes to what --new asks")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="refuse to run on any other (default: any)")
    parser.add_argument(
        "--devices", type=positive, metavar="N", help="use N devices (default: all); with --platform cpu, simulate N"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, compile, take one step, leave nothing behind"
    )
    add_version(parser)
    parser.add_argument(
        "--strict", action="store_true", help="refuse a damaged newest checkpoint instead of using the one before"
    )
    parser.add_argument(
        "--reset-data", action="store_true", help="continue the run at the beginning of train_set, which may be another"
    )
    options = parser.parse_args(arguments)
    if options.fresh_opt and not options.tune_model_path:
        parser.error("--fresh-opt needs --tune-model-path: it says what to leave out of that checkpoint")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(words)
    # Imported after parsing, so that --help and mistakes on the command line show at once.
    with ending_at_once():
        from mesh_transformer.training import local

    with log_lines():
        try:
            return local.train(local.Request(**vars(options)), command=["device_train.py", *words])
        except NonFiniteError as error:
            complain(error)
            return EXIT_NONFINITE
        except MeshTransformerError as error:
            return complain(error)
        except KeyboardInterrupt:
            print("stopped at once; what was saved before stays", file=sys.stderr)
            return EXIT_KEYBOARD


if __name__ == "__main__":
    sys.exit(main())
