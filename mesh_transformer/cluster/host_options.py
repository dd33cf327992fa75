"""Options that say where hosts come from, and what they mean."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mesh_transformer.cluster import remote
from mesh_transformer.command_line import natural, positive

if TYPE_CHECKING:
    from mesh_transformer.cluster.hosts import Hosts
    from mesh_transformer.cluster.pod import Patience
    from mesh_transformer.config import Config
    from mesh_transformer.training.executor import Hardware

LOCAL = "local"
LOCAL_HOSTS, LOCAL_DEVICES = 2, 4


def add_hosts(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Where hosts come from, for `hosts_of`, and what is done when they fail, for `patience_of`."""
    group = parser.add_argument_group("hosts")
    where = group.add_mutually_exclusive_group(required=required)
    where.add_argument(
        "--tpu", metavar="NAME",
        help=f"a TPU VM's name; `{LOCAL}`: processes of this machine, with simulated devices",
    )  # fmt: skip
    where.add_argument(
        "--hosts-file", metavar="F", help="machines reached by ssh, one a line: user@address:port key=FILE ..."
    )
    group.add_argument("--hosts", type=positive, metavar="N", help=f"with --tpu {LOCAL}: how many ({LOCAL_HOSTS})")
    group.add_argument(
        "--devices-per-host", type=positive, metavar="D",
        help=f"simulate D CPU devices on each (with --tpu {LOCAL}: {LOCAL_DEVICES}; else what is there is used)",
    )  # fmt: skip
    group.add_argument(
        "--max-restarts", type=natural, default=10, metavar="N",
        help="faults in a row, with no new checkpoint between them, that are borne (10)",
    )  # fmt: skip
    group.add_argument(
        "--step-deadline", type=seconds, metavar="SECONDS",
        help="when a step counts as hanging (default: 20 times the slowest so far, at least 120)",
    )  # fmt: skip
    remote.add_remote(parser)


def seconds(text: str) -> float:
    """An option's value that is a time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds above 0")
    return value


def hosts_of(options: argparse.Namespace, config: Config) -> Hosts:
    """The hosts that the options of `add_hosts` name, nothing started on them; a TPU is made if there is none.

    Raises ConfigError where they cannot be, TPUError and HostError where a TPU does not come or does not answer.
    """
    if options.tpu == LOCAL:
        from mesh_transformer.cluster.local_hosts import LocalHosts
        from mesh_transformer.config import check_mesh

        count, devices = _local(options)
        check_mesh(config, count * devices)
        return LocalHosts(count, devices)
    return remote.hosts_of(options, config)


def expected(options: argparse.Namespace) -> Hardware | None:
    """The devices that these hosts will have, where the options say so: what can be planned before any host starts."""
    from mesh_transformer.planning.check import simulated_memory
    from mesh_transformer.training.executor import Hardware

    if options.tpu != LOCAL:
        return remote.expected(options)
    count, devices = _local(options)
    return Hardware("cpu", count * devices, simulated_memory(count * devices))


def _local(options: argparse.Namespace) -> tuple[int, int]:
    """How many processes of this machine, and simulated devices of each."""
    return options.hosts or LOCAL_HOSTS, options.devices_per_host or LOCAL_DEVICES


def patience_of(options: argparse.Namespace) -> Patience:
    """What is borne before a run is given up."""
    from mesh_transformer.cluster.pod import Patience

    return Patience(options.max_restarts, options.step_deadline)
