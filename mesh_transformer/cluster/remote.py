"""Hosts beyond this machine, as the options of train.py name them: a list of machines, or a TPU VM."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

from mesh_transformer.cluster import tpu_options
from mesh_transformer.errors import ConfigError

if TYPE_CHECKING:
    from mesh_transformer.cluster.hosts import Hosts
    from mesh_transformer.config import Config
    from mesh_transformer.training.executor import Hardware

DRY_ADDRESS = "DRIVER"  # what a dry run calls this machine


def add_remote(parser: argparse.ArgumentParser) -> None:
    """What --tpu NAME and --hosts-file need besides; for `hosts_of`."""
    group = parser.add_argument_group("hosts by ssh, and TPU VMs")
    tpu_options.add_place(group, required=False)
    tpu_options.add_request(group)
    tpu_options.add_login(group)
    group.add_argument(
        "--driver-address", metavar="IP", help="this machine's address, as hosts reach it (default: found by routing)"
    )


def hosts_of(options: argparse.Namespace, config: Config, out: IO[str] | None = None) -> Hosts:
    """The hosts of --hosts-file or of --tpu NAME, which is made where there is none. Nothing is installed yet.

    `out`: show every request and command there, and do nothing. Raises ConfigError, TPUError, HostError.
    """
    from mesh_transformer.cluster import hosts_file, ssh_hosts, tpu_hosts, tpu_nodes

    if options.hosts is not None:
        raise ConfigError(f"--hosts {options.hosts} is for --tpu local: others are as many as there are")
    dry = argparse.Namespace(**vars(options) | {"dry_run": out is not None})
    stream, check = out or sys.stdout, checker(config)
    address = DRY_ADDRESS if out is not None else options.driver_address
    if options.hosts_file is not None:
        machines = hosts_file.read(options.hosts_file)
        sizes = ssh_hosts.Sizes(options.devices_per_host, check=check)
        shell, logs = tpu_options.shell(dry, stream), tpu_options.logs(dry, config.run.name)
        return ssh_hosts.SSHHosts(machines, shell, logs, sizes, address=address)
    if options.tpu_region is None:
        raise ConfigError(f"--tpu {options.tpu} needs --tpu_region ZONE; or --tpu local for processes of this machine")
    tpu_nodes.check_name(options.tpu)
    login = tpu_options.login(dry)
    request = tpu_options.request(dry, login)
    if request is not None and request.accelerator.devices is not None and options.devices_per_host is None:
        check([request.accelerator.devices])  # before it is paid for
    return tpu_hosts.from_tpu(
        tpu_options.api(dry, stream, there=request is None), options.tpu, request, login,
        tpu_options.shell(dry, stream), tpu_options.logs(dry, options.tpu), options.tpu_wait,
        per_host=options.devices_per_host, check=check, address=address,
    )  # fmt: skip


def expected(options: argparse.Namespace) -> Hardware | None:
    """The devices of the TPU that --tpu_type names. Of other hosts none are known before they answer.

    Raises ConfigError for a type that cannot be.
    """
    from mesh_transformer.cluster.accelerators import accelerator
    from mesh_transformer.planning.chips import CHIPS
    from mesh_transformer.training.executor import Hardware

    kind = accelerator(options.tpu_type) if options.tpu_type and options.devices_per_host is None else None
    if options.tpu is None or kind is None or kind.devices is None:
        return None
    return Hardware(CHIPS[kind.generation].kinds[0], kind.devices)


def checker(config: Config) -> Callable[[Sequence[int]], None]:
    """Refuses hosts whose devices, a number for each, do not fit the config, with ConfigError or DeviceError."""
    from mesh_transformer.config import check_mesh

    def check(devices: Sequence[int]) -> None:
        total, size = sum(devices), config.mesh.tpu_size
        if len(set(devices)) > 1:
            raise ConfigError(f"the hosts have {', '.join(map(str, devices))} devices: all must have as many")
        if size is not None and size != total:
            raise ConfigError(
                f"tpu_size is {size} in the config, and these hosts have {total} devices: change tpu_size, leave it "
                "out, or use other hosts"
            )
        check_mesh(config, total)

    return check


def show(options: argparse.Namespace, config: Config, out: IO[str]) -> None:
    """What `--dry-run` does with such hosts: every request and command, in order, and none is sent."""
    from mesh_transformer.cluster.ray_session import RaySession

    class Session(RaySession):
        address = f"{DRY_ADDRESS}:PORT"
        token = "0" * 64

        def connect(self) -> None:
            pass

        def wait_for(self, names: object, seconds: float) -> set[str]:
            return set()

    logger = logging.getLogger("mesh_transformer")
    before = logger.level
    logger.setLevel(logging.WARNING)  # what the log would tell has not happened
    try:
        hosts_of(options, config, out).start(Session(DRY_ADDRESS))
    finally:
        logger.setLevel(before)
