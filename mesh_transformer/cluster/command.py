"""A training run on the hosts of a cluster: what train.py does."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence

from mesh_transformer.cluster import host_options, pod, ray_session, remote
from mesh_transformer.cluster.pod import Pod
from mesh_transformer.config import Config, load_config
from mesh_transformer.errors import EXIT_DONE
from mesh_transformer.training import session
from mesh_transformer.training.session import Ask, Request, ask_on_terminal


def train(options: argparse.Namespace, *, ask: Ask = ask_on_terminal, command: Sequence[str] = ("train.py",)) -> int:
    """Runs what the options of train.py ask for and returns the exit code; see `session.train`.

    Raises HostError besides, where faults are more than --max-restarts.
    """
    ray_session.check_installed()
    if options.dry_run and options.tpu != host_options.LOCAL:
        config, hardware = load_config(options.config, version=options.version), host_options.expected(options)
        if hardware and not options.no_plan:
            session.check_hardware(config, hardware)
        remote.show(options, config, sys.stdout)
        return EXIT_DONE

    @contextlib.contextmanager
    def start_devices(config: Config) -> Iterator[Pod]:
        hosts = host_options.hosts_of(options, config)
        with pod.started(hosts, config, host_options.patience_of(options)) as found:
            yield found

    return session.train(
        request_of(options), start_devices, ask=ask, command=command, elastic=True,
        expected=host_options.expected(options),
    )  # fmt: skip


def request_of(options: argparse.Namespace) -> Request:
    """The part of the options that every command that trains has."""
    return Request(**{name: getattr(options, name) for name in Request.__dataclass_fields__})
