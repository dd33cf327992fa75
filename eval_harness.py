"""Score a checkpoint on tasks of lm-evaluation-harness.

    python eval_harness.py --config configs/quickstart.json --tasks data/eval/python_order.yaml

Tasks are the harness's names or YAML files; without --tasks they are what the 2021 library evaluated. A table goes to
the output, everything else to the error stream. docs/evaluation.md tells the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer.cluster.host_options import add_hosts
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.command_line import (
    add_devices,
    add_version,
    add_weights,
    complain,
    ending_at_once,
    log_lines,
    natural,
    positive,
)
from mesh_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_KEYBOARD, MeshTransformerError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="JSON config, a path or URL")
    add_version(parser)
    add_weights(parser)
    parser.add_argument(
        "--tasks", type=names, default=(), metavar="A,B", help="harness names and YAML files (the 2021 library's set)"
    )
    parser.add_argument(
        "--num-fewshot", type=natural, metavar="K", help="examples in front of a question (the task's own number)"
    )
    parser.add_argument("--limit", type=amount, metavar="N", help="documents of each task, below 1 a share (all)")
    parser.add_argument(
        "--batch-size",
        type=batch_size,
        default="auto",
        metavar="N",
        help="contexts at once (auto: by tokens and memory)",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="results.json and results.md; what was scored is kept, so a rerun goes on"
    )
    parser.add_argument(
        "--add-bos-token", action="store_true", help="begin every context with end-of-text, as the 2021 library did"
    )
    parser.add_argument("--ftfy", action="store_true", help="clean texts up with ftfy, as the 2021 library did")
    add_devices(parser)
    add_hosts(parser, required=False)
    parser.set_defaults(dry_run=False)
    options = parser.parse_args(arguments)
    if (options.tpu or options.hosts_file) and (options.platform or options.devices):
        parser.error("--platform and --devices are of this machine: leave them out with --tpu or --hosts-file")
    return options


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them, at least one."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise argparse.ArgumentTypeError("it names no task")
    return found


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0 or (value >= 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{text} must be an integer of at least 1, or a share between 0 and 1")
    return int(value) if value >= 1 else value


def batch_size(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # Imported after parsing, so that --help and mistakes on the command line show at once.
    with ending_at_once():
        from mesh_transformer.cluster import harness
        from mesh_transformer.evaluation import command
        from mesh_transformer.evaluation.opening import Source

    weights = (
        "config",
        "version",
        "ckpt",
        "ckpt_step",
        "random_init",
        "strict",
        "platform",
        "devices",
        "batch_size",
        "ftfy",
    )
    source = Source(**{name: getattr(options, name) for name in (*weights, "add_bos_token")})
    request = command.Request(
        source=source, tasks=options.tasks, shots=options.num_fewshot, limit=options.limit, output=options.output
    )
    with log_lines():
        try:
            elsewhere = options.tpu or options.hosts_file
            print((harness.evaluate(request, options) if elsewhere else command.evaluate(request))["table"])
        except HostError as error:
            complain(error)
            return EXIT_FAILED
        except MeshTransformerError as error:
            return complain(error)
        except KeyboardInterrupt:
            print("stopped; with --output, the same command goes on from here", file=sys.stderr)
            return EXIT_KEYBOARD
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
