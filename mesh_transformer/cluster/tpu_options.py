"""Options that scripts/tpu.py and train.py share, and what they mean."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mesh_transformer.command_line import positive

if TYPE_CHECKING:
    from mesh_transformer.cluster.ssh import Shell
    from mesh_transformer.cluster.tpu_api import TPUApi
    from mesh_transformer.cluster.tpu_machines import Login
    from mesh_transformer.cluster.tpu_nodes import Request

WAIT = 24 * 3600
EXAMPLE = "v4-8"  # what a dry run takes a TPU for that it knows nothing of


def add_place(parser: argparse._ArgumentGroup | argparse.ArgumentParser, required: bool = True) -> None:
    """--tpu_region, --project."""
    parser.add_argument("--tpu_region", required=required, metavar="ZONE", help="its zone, such as us-central2-b")
    parser.add_argument("--project", help="cloud project (default: GOOGLE_CLOUD_PROJECT, or the credentials')")


def add_request(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """What to make where there is no TPU of that name."""
    parser.add_argument("--tpu_type", metavar="TYPE", help="make one of this type if there is none: v3-8, v4-32, ...")
    parser.add_argument("--runtime-version", metavar="V", help="its image (default: the usual one of its generation)")
    price = parser.add_mutually_exclusive_group()
    price.add_argument("--spot", action="store_true", help="cheaper; may be taken away at any time")
    price.add_argument("--preemptible", action="store_true", help="as --spot, and for 24 hours at most")
    parser.add_argument("--queued", action="store_true", help="ask by a queued resource, which waits for capacity")
    parser.add_argument("--network", help="VPC network (default: the project's `default`)")
    parser.add_argument("--subnetwork", help="its subnetwork")
    parser.add_argument("--no-external-ips", action="store_true", help="addresses inside the network alone")
    parser.add_argument("--service-account", metavar="EMAIL", help="whose rights the hosts have, on buckets say")
    parser.add_argument(
        "--tpu-wait", type=positive, default=WAIT, metavar="SECONDS", help=f"how long to wait for capacity ({WAIT})"
    )


def add_login(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """How its hosts are reached."""
    parser.add_argument("--ssh-user", metavar="USER", help="user on the hosts (default: this one)")
    parser.add_argument("--ssh-key", metavar="FILE", help="private key (default: one of this project's own)")
    parser.add_argument("--ssh-port", type=positive, default=22, metavar="N", help="port of their sshd (22)")
    parser.add_argument("--external-ip", action="store_true", help="reach them from outside their network")
    parser.add_argument("--remote-python", metavar="PATH", help="an interpreter there that has every package already")


def api(options: argparse.Namespace, out: IO[str], there: bool) -> TPUApi:
    """The Cloud API, or what shows it. `there`: whether a dry run takes the TPU to exist."""
    if options.dry_run:
        from mesh_transformer.cluster import tpu_dry
        from mesh_transformer.cluster.accelerators import accelerator

        kind = accelerator(getattr(options, "tpu_type", None) or EXAMPLE)
        return tpu_dry.connect(options.tpu_region, options.project, out, kind, there)
    from mesh_transformer.cluster import tpu_api

    return tpu_api.connect(options.tpu_region, options.project)


def shell(options: argparse.Namespace, out: IO[str]) -> Shell:
    """What runs scripts on hosts, or shows them."""
    from mesh_transformer.cluster import remote_setup
    from mesh_transformer.cluster.accelerators import HOST_CHIPS
    from mesh_transformer.cluster.ssh import SSH, DryShell

    return (
        DryShell(out, {remote_setup.PROBE: f"folder={DRY_FOLDER}\nchips={HOST_CHIPS}\n"}) if options.dry_run else SSH()
    )


DRY_FOLDER = "/home/USER/.mesh-transformer"


def login(options: argparse.Namespace) -> Login:
    from mesh_transformer.cluster.tpu_machines import Login

    return Login(
        user=getattr(options, "ssh_user", None),
        key=getattr(options, "ssh_key", None),
        port=getattr(options, "ssh_port", 22),
        external=getattr(options, "external_ip", False),
        python=getattr(options, "remote_python", None),
        dry=options.dry_run,
    )


def request(options: argparse.Namespace, login: Login) -> Request | None:
    """What to make; None where no type is given. Raises ConfigError for a type that cannot be."""
    if options.tpu_type is None:
        return None
    from mesh_transformer.cluster import tpu_machines
    from mesh_transformer.cluster.accelerators import accelerator
    from mesh_transformer.cluster.tpu_nodes import Request

    kind = accelerator(options.tpu_type)
    return Request(
        kind, options.runtime_version or kind.runtime, options.spot, options.preemptible, options.queued,
        options.network, options.subnetwork, not options.no_external_ips, options.service_account,
        tpu_machines.metadata(login),
    )  # fmt: skip


def logs(options: argparse.Namespace, name: str) -> Path:
    """A new folder on this machine for the hosts' logs of this call."""
    from mesh_transformer.cluster.tpu_machines import home, make_private

    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = home() / "logs" / f"{stamp}-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"
    return folder if options.dry_run else make_private(folder)
