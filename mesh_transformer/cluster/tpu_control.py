"""What is done with a TPU VM by name: made or reused, reached, described, deleted."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from mesh_transformer.cluster import tpu_machines, tpu_nodes
from mesh_transformer.cluster.accelerators import accelerator
from mesh_transformer.cluster.ssh import Machine, Shell
from mesh_transformer.cluster.tpu_api import Body, Pauses, TPUApi, TPUError
from mesh_transformer.cluster.tpu_machines import Login, Trust
from mesh_transformer.cluster.tpu_nodes import Request
from mesh_transformer.errors import ConfigError

logger = logging.getLogger(__name__)

GREETING_SECONDS = 300.0  # a machine that is READY may need a little until its sshd answers
GREETING = "greeting"


def ensure(api: TPUApi, name: str, request: Request | None, login: Login, seconds: float) -> Body:
    """The READY node of that name: as it is, waited for, or made. What was preempted is deleted and made again.

    `request`: what to make where there is none; `seconds`: for capacity. Raises TPUError, ConfigError.
    """
    tpu_nodes.check_name(name)
    node = api.get(f"nodes/{name}")
    if node is None and api.get(f"queuedResources/{name}") is not None:
        logger.info("TPU %s is in the queue already", name)
        tpu_nodes.await_queue(api, name, seconds)
        return tpu_nodes.await_ready(api, name)
    if node is None:
        if request is None:
            raise TPUError(
                f"there is no TPU {name} in {api.zone} of {api.project}: give --tpu_type to have it made, or see "
                "scripts/tpu.py list"
            )
        tpu_nodes.check_offered(api, request)
        wait = seconds if request.queued else min(seconds, tpu_nodes.READY_SECONDS)
        return tpu_nodes.create(api, name, request, Trust(api, name, login.dry).begin(), wait)
    _check_same(name, node, request)
    if node.get("state") in tpu_nodes.LOST:
        return again(api, name, node, login, seconds)
    logger.info("TPU %s is there: %s, %s", name, node.get("acceleratorType"), node.get("state"))
    try:
        return tpu_nodes.await_ready(api, name)
    except TPUError as error:
        if error.reason not in tpu_nodes.LOST:
            raise
        return again(api, name, node, login, seconds)


def again(api: TPUApi, name: str, node: Body, login: Login, seconds: float) -> Body:
    """Deletes what is left of a preempted node and makes the same again; the READY node."""
    logger.info("TPU %s is %s: deleting it and asking for the same again", name, node.get("state"))
    request = tpu_nodes.request_of(node)
    return tpu_nodes.recreate(api, name, request, Trust(api, name, login.dry).begin(), seconds)


def _check_same(name: str, node: Body, request: Request | None) -> None:
    there = str(node.get("acceleratorType", ""))
    if request is not None and there and there != request.accelerator.name:
        raise ConfigError(
            f"TPU {name} is a {there}, and --tpu_type asks for a {request.accelerator.name}: leave --tpu_type out to "
            "use it, or choose another name"
        )


def reach(api: TPUApi, name: str, node: Body, login: Login, shell: Shell) -> list[Machine]:
    """The node's hosts, each of which has answered by ssh; from then on its host key is the one that it showed."""
    from mesh_transformer.cluster.hosts import HostError
    from mesh_transformer.cluster.remote_setup import on_all

    found = tpu_machines.machines(api, name, node, login)
    deadline, pauses = api.clock() + GREETING_SECONDS, Pauses(1.0, 15.0)
    while True:
        try:
            on_all(found, lambda machine: shell.run(machine, "true", GREETING, seconds=60))
            break
        except HostError as error:
            final = "its host key is not" in str(error) or "the host key is not" in str(error)
            if final or api.clock() > deadline:
                raise
            logger.info("TPU %s: %s; trying again", name, str(error).splitlines()[0])
            api.sleep(pauses.next())
    return found if login.dry else tpu_machines.machines(api, name, node, login)


def delete(api: TPUApi, name: str, login: Login, others: bool) -> bool:
    """Deletes a TPU; False if there is none. `others`: also one that this project did not make, else ConfigError."""
    node = api.get(f"nodes/{name}")
    if node is not None and tpu_nodes.LABEL not in (node.get("labels") or {}) and not (others or login.dry):
        raise ConfigError(f"TPU {name} was not made by this project: give --yes to delete it all the same")
    gone = tpu_nodes.delete(api, name)
    Trust(api, name, login.dry).forget()
    return gone


def describe(api: TPUApi, name: str) -> Iterator[str]:
    """What there is under a name, a line each. Raises TPUError where there is nothing."""
    node, queued = api.get(f"nodes/{name}"), api.get(f"queuedResources/{name}")
    if node is None and queued is None:
        raise TPUError(f"there is no TPU {name} in {api.zone} of {api.project}: see scripts/tpu.py list")
    if queued is not None:
        yield f"queued request: {(queued.get('state') or {}).get('state', 'unknown')}"
    if node is None:
        return
    yield f"state: {node.get('state')}" + (f", health: {node['health']}" if node.get("health") else "")
    yield f"type: {node.get('acceleratorType')}, image: {node.get('runtimeVersion')}, {pricing(node)}"
    if node.get("createTime"):
        yield f"made: {node['createTime']}"
    kind = accelerator(str(node["acceleratorType"]))
    hosts = node.get("networkEndpoints", [])
    yield f"hosts: {len(hosts)}" + (f", devices: {kind.devices}" if kind.devices else "")
    for number, host in enumerate(hosts):
        outside = (host.get("accessConfig") or {}).get("externalIp")
        yield f"  {number}: {host.get('ipAddress')}" + (f", from outside {outside}" if outside else "")


def overview(api: TPUApi) -> list[tuple[str, ...]]:
    """(name, type, state, price) of every TPU of the zone, and of requests that are still in the queue."""
    nodes = api.every("nodes")
    rows = [
        (tpu_nodes.short(node), str(node.get("acceleratorType")), str(node.get("state")), pricing(node))
        for node in nodes
    ]
    there = {row[0] for row in rows}
    for queued in api.every("queuedResources"):
        if tpu_nodes.short(queued) not in there:
            spec = (queued.get("tpu") or {}).get("nodeSpec") or [{}]
            state = str((queued.get("state") or {}).get("state"))
            kind = str((spec[0].get("node") or {}).get("acceleratorType"))
            rows.append((tpu_nodes.short(queued), kind, state, "spot" if "spot" in queued else "on demand"))
    return sorted(rows)


def pricing(node: Body) -> str:
    scheduling = node.get("schedulingConfig") or {}
    return "spot" if scheduling.get("spot") else "preemptible" if scheduling.get("preemptible") else "on demand"
