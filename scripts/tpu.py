"""TPU VMs by name: make one, look at it, log in, serve a model from it, delete it.

    python scripts/tpu.py create NAME --tpu_region us-central2-b --tpu_type v4-8 --spot
    python scripts/tpu.py list --tpu_region us-central2-b
    python scripts/tpu.py status NAME --tpu_region us-central2-b
    python scripts/tpu.py ssh NAME --tpu_region us-central2-b
    python scripts/tpu.py serve NAME --tpu_region us-central2-b --config F
    python scripts/tpu.py delete NAME --tpu_region us-central2-b

Every one takes --dry-run, which shows each request and command and does nothing. Credentials are Google's Application
Default Credentials. docs/pods.md tells the rest.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mesh_transformer.command_line import complain, log_lines, positive  # noqa: E402
from mesh_transformer.errors import EXIT_DONE, EXIT_KEYBOARD, MeshTransformerError  # noqa: E402

if TYPE_CHECKING:
    from mesh_transformer.cluster.tpu_api import TPUApi
    from mesh_transformer.cluster.tpu_machines import Login

KEYS = "MESH_TRANSFORMER_API_KEYS"
PORT = 5000


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from mesh_transformer.cluster.tpu_options import add_login, add_place, add_request

    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    said = {
        "create": "make a TPU VM and wait until it is ready; one that is there is left as it is",
        "list": "every TPU VM of the zone, and requests in the queue",
        "status": "what it is, its state and its hosts",
        "ssh": "log in to a host, or run a command there: ssh NAME -- COMMAND",
        "serve": "device_serve.py on it, at a port of this machine: serve NAME --config F -- OPTIONS",
        "delete": "delete it, and its request in the queue",
    }
    for command, text in said.items():
        part = commands.add_parser(command, help=text, description=text)
        if command != "list":
            part.add_argument("name", metavar="NAME", help="the TPU VM's name")
        add_place(part)
        part.add_argument("--dry-run", action="store_true", help="show every request and command, do nothing")
        if command == "create":
            add_request(part)
        if command in ("create", "ssh", "serve"):
            add_login(part)
        if command == "ssh":
            part.add_argument("--worker", type=int, default=0, metavar="N", help="which host (0)")
        if command == "serve":
            part.add_argument("--config", required=True, metavar="FILE", help="JSON config, a path or URL")
            part.add_argument("--port", type=positive, default=PORT, help=f"port on this machine ({PORT})")
            part.add_argument("--platform", choices=("tpu", "cpu"), default="tpu", help="of the host (tpu)")
        if command == "delete":
            part.add_argument("--yes", action="store_true", help="also one that this project did not make")
    parser.epilog = "\n".join(part.format_usage().strip() for part in commands.choices.values())
    options = parser.parse_args(words[:split])
    options.rest = words[split + 1 :]
    if options.rest and options.command not in ("ssh", "serve"):
        parser.error(f"{options.command} takes nothing behind --")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with log_lines(logging.WARNING if options.dry_run else logging.INFO):
            return run(options)
    except MeshTransformerError as error:
        return complain(error)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return EXIT_KEYBOARD


def run(options: argparse.Namespace) -> int:
    """Does what is asked for; the exit code. Raises MeshTransformerError for what the user can correct."""
    from mesh_transformer.cluster import tpu_control, tpu_options

    api = tpu_options.api(options, sys.stdout, there=options.command != "create")
    login = tpu_options.login(options)
    if options.command == "list":
        for row in tpu_control.overview(api):
            print("  ".join(row))
        return EXIT_DONE
    if options.command == "status":
        for line in tpu_control.describe(api, options.name):
            print(line)
        return EXIT_DONE
    if options.command == "delete":
        gone = tpu_control.delete(api, options.name, login, options.yes)
        print(f"{options.name} is deleted" if gone else f"there is no TPU {options.name}: nothing to delete")
        return EXIT_DONE
    return {"create": create, "ssh": ssh, "serve": serve}[options.command](options, api, login)


def create(options: argparse.Namespace, api: TPUApi, login: Login) -> int:
    from mesh_transformer.cluster import tpu_control, tpu_options

    node = tpu_control.ensure(api, options.name, tpu_options.request(options, login), login, options.tpu_wait)
    machines = tpu_control.reach(api, options.name, node, login, tpu_options.shell(options, sys.stdout))
    print(f"{options.name} is ready: {len(machines)} hosts, {', '.join(machine.inside for machine in machines)}")
    print(f"it costs money until it is deleted: python scripts/tpu.py delete {options.name} --tpu_region {api.zone}")
    return EXIT_DONE


def ssh(options: argparse.Namespace, api: TPUApi, login: Login) -> int:
    import shlex

    from mesh_transformer.cluster import tpu_machines, tpu_nodes
    from mesh_transformer.errors import ConfigError

    node = tpu_nodes.await_ready(api, options.name)
    machines = tpu_machines.machines(api, options.name, node, login)
    if not 0 <= options.worker < len(machines):
        raise ConfigError(f"--worker {options.worker}: TPU {options.name} has hosts 0 to {len(machines) - 1}")
    words = machines[options.worker].ssh(*(() if options.rest else ("-t",)))
    words = [word.replace("BatchMode=yes", "BatchMode=no") for word in words] + options.rest
    if options.dry_run:
        print(shlex.join(words))
        return EXIT_DONE
    sys.stdout.flush()
    os.execvp(words[0], words)


def serve(options: argparse.Namespace, api: TPUApi, login: Login) -> int:
    import shlex

    from mesh_transformer.cluster import tpu_control, tpu_nodes, tpu_options, tpu_serve
    from mesh_transformer.config import load_config

    load_config(options.config)  # its mistakes show before anything is done
    keys = [key.strip() for key in os.environ.get(KEYS, "").split(",") if key.strip()]
    server = tpu_serve.Server(options.config, options.rest, keys, options.port, options.platform)
    shell, logs = tpu_options.shell(options, sys.stdout), tpu_options.logs(options, options.name)
    node = tpu_nodes.await_ready(api, options.name)
    machines = tpu_control.reach(api, options.name, node, login, shell)
    ready = tpu_serve.prepare(machines, shell, logs, options.platform)
    words = tpu_serve.command(ready, server, shell, logs / "serve.log")
    if options.dry_run:
        print(shlex.join(words))
        return EXIT_DONE
    print(f"http://127.0.0.1:{options.port} leads to the server on {ready.machine.name}, once it is ready", flush=True)
    return tpu_serve.run(words, ready, logs / "serve.log")


if __name__ == "__main__":
    sys.exit(main())
