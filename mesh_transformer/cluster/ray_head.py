"""The process that owns a session's head and the nodes of this machine: it ends them when its driver is gone.

`head_process.HeadProcess` starts it; its argument is the session's folder. It reads one JSON object a line from its
standard input, does what it says, each in a thread of its own, and answers with one line. Where the input ends, for
whatever reason, so does everything here, and the session's folder is removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable
from typing import IO, Any

from mesh_transformer.cluster.ports import free_ports
from mesh_transformer.cluster.ray_session import LOOPBACK

AGENT_PORTS = ("runtime_env_agent_port", "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
TAKEN = "already occupied"  # what Ray says of a dashboard's port: here it is meant
TRIES = 2  # a node's start: on a busy machine Ray gives up at times, and the next try is well


class Head:
    """A head at `address`, with its nodes by name."""

    def __init__(self, address: str, object_store: int, folder: str) -> None:
        from ray.cluster_utils import Cluster

        without_dashboard()
        logging.getLogger("ray._private.services").addFilter(lambda record: TAKEN not in record.getMessage())
        self._host, self._object_store, self._folder = address, object_store, folder
        with socket.socket() as taken:
            taken.bind((LOOPBACK, 0))
            taken.listen()
            # No hooks of Ray's own: they would want the main thread, and the signals of the process.
            self._cluster = Cluster(
                initialize_head=True, shutdown_at_exit=False,
                head_node_args={
                    "node_ip_address": address, "num_cpus": 0, "include_log_monitor": False,
                    "no_monitor": True,  # of the autoscaler, which has nothing to do
                    # Even then Ray starts one, for statistics that are off, and waits for it; but not where it cannot.
                    "include_dashboard": False, "dashboard_host": LOOPBACK, "dashboard_port": taken.getsockname()[1],
                    "object_store_memory": object_store, **agent_ports(address),
                },
            )  # fmt: skip
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str, resources: dict[str, float]) -> None:
        """Start a node, without waiting until the head knows it."""
        self.remove(name)
        for tries in range(TRIES, 0, -1):
            try:
                self._nodes[name] = self._cluster.add_node(
                    wait=False, node_ip_address=self._host, num_cpus=1, num_gpus=0,
                    object_store_memory=self._object_store, resources=resources,
                    temp_dir=tempfile.mkdtemp(dir=self._folder), **agent_ports(self._host),
                )  # fmt: skip
                return
            except Exception:
                if tries == 1:
                    raise

    def remove(self, name: str) -> None:
        """End what is left of a node, if anything."""
        node = self._nodes.pop(name, None)
        if node is not None:
            with contextlib.suppress(Exception):  # parts of it may be gone already
                self._cluster.remove_node(node, allow_graceful=False)

    def running(self) -> list[str]:
        """The nodes of which every process lives."""
        return [name for name, node in list(self._nodes.items()) if node.remaining_processes_alive()]

    def stop(self) -> None:
        for name in list(self._nodes):
            self.remove(name)
        self._cluster.shutdown()


def without_dashboard() -> None:
    """Tell Ray, in this process, that it has no dashboard, whether it is installed or not.

    It imports what one needs at every node's start. Of two threads that import at once what fails, Python (3.11 to
    3.13) may tell one alone; the other one's node, started as if there were a dashboard, ends, which takes Ray half a
    minute to notice.
    """
    sys.modules["ray.dashboard.optional_deps"] = None  # type: ignore[assignment]  # so its import fails at once


def agent_ports(address: str) -> dict[str, int]:
    """Ports for a node's agents. Left to choose them, a node waits until its agents have, and gives up where a busy
    machine takes long to start them."""
    return dict(zip(AGENT_PORTS, free_ports(address, len(AGENT_PORTS)), strict=True))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this one
    orders, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")  # for this process alone
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a child that held the orders' pipe would hide that this one ended
    os.dup2(2, 1)  # what Ray prints goes to the log
    folder = sys.argv[1]
    try:
        run(folder, orders, replies)
    except BaseException:  # noqa: BLE001 - whatever it is, what this process began has to end
        traceback.print_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a driver that was killed does not, and the token lies there
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # what is left of a start that failed, or that the end met half way
        os._exit(1)  # not through Ray's own exit handlers, which wait for what is gone


def run(folder: str, orders: IO[str], replies: IO[str]) -> None:
    """Start the head that the first order asks for, and do what the others say until they end."""
    line = orders.readline()
    if not line:
        return  # the driver is gone already
    order = json.loads(line)
    answer = {"number": order["number"], "error": ""}
    try:
        head = Head(order["address"], order["object_store"], folder)
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - told to the driver
        print(json.dumps(answer | {"error": f"{type(failure).__name__}: {failure}"}), file=replies, flush=True)
        return
    try:
        print(json.dumps(answer | {"address": head.address}), file=replies, flush=True)
        serve(head, orders, replies)
    finally:
        head.stop()


def serve(head: Head, orders: Iterable[str], replies: IO[str]) -> None:
    """Do what the orders say, each in a thread of its own, until they end."""
    writing = threading.Lock()

    def say(reply: dict[str, Any]) -> None:
        with writing, contextlib.suppress(OSError):
            print(json.dumps(reply), file=replies, flush=True)

    def do(order: dict[str, Any]) -> None:
        reply = {"number": order["number"], "error": "", "running": []}
        try:
            if order["do"] == "add":
                head.add(order["name"], order["resources"])
            elif order["do"] == "remove":
                head.remove(order["name"])
            else:
                reply["running"] = head.running()
        except Exception as failure:  # noqa: BLE001 - told to the driver
            reply["error"] = f"{type(failure).__name__}: {failure}"
        say(reply)

    for line in orders:
        threading.Thread(target=do, args=(json.loads(line),), daemon=True).start()


if __name__ == "__main__":
    main()
