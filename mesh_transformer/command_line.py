"""What the commands share: their lines on the error stream, and options that several have."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from mesh_transformer.errors import EXIT_KEYBOARD, EXIT_NONFINITE, EXIT_USER, MeshTransformerError, NonFiniteError


@contextlib.contextmanager
def log_lines(level: int = logging.INFO) -> Iterator[None]:
    """Shows the package's log on the error stream, one plain line each, while the block runs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("mesh_transformer")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Lets Ctrl-C end the process on the spot while the block runs: where imports are hit, they lose it or trip."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def complain(error: Exception) -> int:
    """Says what the user can correct, a line for each problem and no traceback; returns the exit code for that."""
    sys.stderr.writelines(f"error: {line}\n" for line in str(error).splitlines())
    return EXIT_USER


def exit_of_training(work: Callable[[], int]) -> int:
    """Trains by `work`, with the log shown; its exit code, or that of what it raises, said in a line."""
    with log_lines():
        try:
            return work()
        except NonFiniteError as error:
            complain(error)
            return EXIT_NONFINITE
        except MeshTransformerError as error:
            return complain(error)
        except KeyboardInterrupt:
            sys.stderr.write("stopped at once; what was saved before stays\n")
            return EXIT_KEYBOARD


def positive(text: str) -> int:
    """An option's value that is an integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer of at least 1")
    return int(text)


def natural(text: str) -> int:
    """An option's value that is an integer of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} must be an integer of at least 0")
    return int(text)


def which_step(text: str) -> int | str:
    """An option's value that names a checkpoint: a step's number, `latest` or `best`."""
    if text not in ("latest", "best") and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} must be a step's number, latest or best")
    return int(text) if text.isdigit() else text


def add_weights(parser: argparse.ArgumentParser) -> None:
    """--ckpt, --ckpt-step, --random-init, --strict: which weights, for `inference.choose_steps`."""
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--ckpt", metavar="PATH", help="weights: a step_N folder, or a model_dir (default: the config's)"
    )
    weights.add_argument(
        "--ckpt-step", type=which_step, default="latest", metavar="N", help="a step, `latest` or `best`"
    )
    weights.add_argument("--random-init", action="store_true", help="use weights that were never trained")
    parser.add_argument(
        "--strict", action="store_true", help="refuse a damaged newest checkpoint instead of using the one before"
    )


def add_version(parser: argparse.ArgumentParser) -> None:
    """--version: for `load_config`."""
    parser.add_argument("--version", type=int, choices=(1, 2), help="network version (default: the config's, or 1)")


def add_devices(parser: argparse.ArgumentParser) -> None:
    """--platform, --devices: for `inference.start_mesh`."""
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="refuse to run on any other (default: any)")
    parser.add_argument(
        "--devices", type=positive, metavar="N", help="use N devices (default: all); with --platform cpu, simulate N"
    )


def add_orders(parser: argparse.ArgumentParser) -> None:
    """--filter-order, --window: where the 2021 library and others differ, for `completion.Options`."""
    parser.add_argument(
        "--filter-order", choices=("reference", "huggingface"), default="reference",
        help="temperature behind the filters, or in front of them (reference)",
    )  # fmt: skip
    parser.add_argument(
        "--window", choices=("full", "reference"), default="full",
        help="past the context attend to the newest seq positions, or one fewer (full)",
    )  # fmt: skip


def add_training(parser: argparse.ArgumentParser) -> None:
    """What every command that trains has, for `training.session.Request`; `check_training` looks at the whole."""
    parser.add_argument("--config", required=True, help="JSON config, a path or URL")
    parser.add_argument(
        "--tune-model-path", metavar="PATH", help="fine-tune from this checkpoint: a step_N folder, or a model_dir"
    )
    parser.add_argument(
        "--fresh-opt", action="store_true", help="with --tune-model-path: do not load Adam's moments, start with zeros"
    )
    parser.add_argument("--new", action="store_true", help="delete the run in model_dir and start over; asks first")
    parser.add_argument("--yes", action="store_true", help="answer yes to what --new asks")
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
    parser.add_argument(
        "--no-plan", action="store_true", help="start although, by arithmetic, the step cannot fit the devices' memory"
    )


def check_training(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """The options, if they go together; else the parser says what does not, and ends the program."""
    if options.fresh_opt and not options.tune_model_path:
        parser.error("--fresh-opt needs --tune-model-path: it says what to leave out of that checkpoint")
    return options
