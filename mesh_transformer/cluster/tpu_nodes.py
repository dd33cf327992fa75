"""The life of one TPU VM by name: made, waited for, found preempted, made again, deleted.

What is made carries the label `mesh-transformer`; nothing else is ever deleted without being told to.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
import urllib.parse
from typing import Any

from mesh_transformer.cluster.accelerators import Accelerator, accelerator
from mesh_transformer.cluster.tpu_api import Body, Pauses, TPUApi, TPUError
from mesh_transformer.errors import ConfigError

logger = logging.getLogger(__name__)

LABEL = "mesh-transformer"
READY_SECONDS = 1800.0  # from asking to READY where the zone has capacity
WAIT_SECONDS = 24 * 3600.0  # for capacity: a queued request, or a preempted TPU that is made again
DELETE_SECONDS = 900.0
# States of a node. In those that are not named here it is on its way to another.
READY, LOST = "READY", ("PREEMPTED", "TERMINATED")
RESTING = ("STOPPED", "SUSPENDED")
GOING = ("DELETING",)
FAILED_QUEUE = ("FAILED", "SUSPENDED")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to ask for. `network`: full or short names, None for the project's default; `spot` and `preemptible`:
    cheaper, may be taken away; `queued`: by a queued resource, which waits for capacity."""

    accelerator: Accelerator
    runtime: str
    spot: bool = False
    preemptible: bool = False
    queued: bool = False
    network: str | None = None
    subnetwork: str | None = None
    external_ips: bool = True
    service_account: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()

    def node(self, nonce: str) -> Body:
        """The node's description, as the API takes it."""
        network = {"network": self.network, "subnetwork": self.subnetwork, "enableExternalIps": self.external_ips}
        body: Body = {
            "acceleratorType": self.accelerator.name,
            "runtimeVersion": self.runtime,
            "networkConfig": {key: value for key, value in network.items() if value is not None},
            "labels": {LABEL: nonce},
            "metadata": dict(self.metadata),
        }
        if not self.queued and (self.spot or self.preemptible):  # a queued resource says so itself
            body["schedulingConfig"] = {"spot": True} if self.spot else {"preemptible": True}
        if self.service_account:
            body["serviceAccount"] = {
                "email": self.service_account, "scope": ["https://www.googleapis.com/auth/cloud-platform"]
            }  # fmt: skip
        return body


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One host of a node: its address inside the network and, where it has one, outside."""

    internal: str
    external: str | None


def endpoints(node: Body) -> list[Endpoint]:
    """The hosts that are there, in their order. Raises TPUError for a node that tells of none."""
    found = [
        Endpoint(str(entry.get("ipAddress", "")), (entry.get("accessConfig") or {}).get("externalIp"))
        for entry in node.get("networkEndpoints", [])
    ]
    if not found or not all(endpoint.internal for endpoint in found):
        raise TPUError(f"TPU {short(node)} is READY but names no address: look with scripts/tpu.py status")
    return found


def short(resource: Body) -> str:
    """A resource's name without its path."""
    return str(resource.get("name", "")).rsplit("/", 1)[-1]


def check_offered(api: TPUApi, request: Request) -> None:
    """Raises ConfigError where the zone has no such type or image, listing what it has."""
    for kind, wanted, flag in (
        ("acceleratorTypes", request.accelerator.name, "--tpu_type"),
        ("runtimeVersions", request.runtime, "--runtime-version"),
    ):
        if api.get(f"{kind}/{wanted}") is None:
            has = ", ".join(sorted(short(entry) for entry in api.every(kind))) or "none"
            raise ConfigError(f"{flag} {wanted}: the zone {api.zone} does not offer it; it offers {has}")


def new_nonce() -> str:
    """What the label of the next node will say, by which its maker knows it again."""
    return secrets.token_hex(8)


def create(api: TPUApi, name: str, request: Request, nonce: str, seconds: float = READY_SECONDS) -> Body:
    """Makes a node, labelled `nonce`, and waits for READY; the node. Raises TPUError, with the API's reason."""
    kind = "spot" if request.spot else "preemptible" if request.preemptible else "on demand"
    logger.info(
        "TPU %s: asking for a %s, %s, in %s (%s)",
        name, request.accelerator.name, kind, api.zone, "queued" if request.queued else "at once",
    )  # fmt: skip
    if request.queued:
        _queue(api, name, request, nonce)
        await_queue(api, name, seconds)
    else:
        operation = _post(api, f"nodes?nodeId={urllib.parse.quote(name)}", request.node(nonce), f"nodes/{name}", nonce)
        if operation is not None:
            api.finish(operation, f"making TPU {name}", seconds)
    return await_ready(api, name, seconds)


def _post(api: TPUApi, path: str, body: Body, resource: str, nonce: str) -> Body | None:
    """Asks for a resource; the operation, or None where an attempt whose answer was lost has made it already."""
    try:
        return api.ask("POST", path, body)
    except TPUError as error:
        there = api.get(resource) if error.status == 409 else None
        if there is None or nonce not in str(there):
            raise
        return None


def _queue(api: TPUApi, name: str, request: Request, nonce: str) -> None:
    body: Body = {
        "tpu": {"nodeSpec": [{"parent": api.parent, "nodeId": name, "node": request.node(nonce)}]},
        "spot" if request.spot or request.preemptible else "guaranteed": {},
    }
    operation = _post(
        api, f"queuedResources?queuedResourceId={urllib.parse.quote(name)}", body, f"queuedResources/{name}", nonce
    )
    if operation is not None:
        api.finish(operation, f"queueing TPU {name}", READY_SECONDS)


def await_queue(api: TPUApi, name: str, seconds: float) -> None:
    """Until the queued resource is ACTIVE."""
    deadline, pauses, said = api.clock() + seconds, Pauses(2.0, 60.0), ""
    while True:
        queued = api.get(f"queuedResources/{name}")
        state = str(((queued or {}).get("state") or {}).get("state", "gone"))
        if state == "ACTIVE":
            return
        if queued is None or state in FAILED_QUEUE:
            detail = str(((queued or {}).get("state") or {}).get("failedData", {}).get("error", {}).get("message", ""))
            raise TPUError(
                f"the queued request for TPU {name} is {state}{': ' + detail if detail else ''}; delete it "
                "(scripts/tpu.py delete) and ask for another type, zone or time", reason=state,
            )  # fmt: skip
        if state != said:
            logger.info("TPU %s: the request is %s", name, state)
            said = state
        if api.clock() > deadline:
            raise TPUError(
                f"TPU {name}: its request is still {state} after {seconds:.0f} s; it stays in the queue: run the same "
                "again to go on waiting, or scripts/tpu.py delete to give up"
            )
        api.sleep(pauses.next())


def await_ready(api: TPUApi, name: str, seconds: float = READY_SECONDS) -> Body:
    """The node once it is READY. Raises TPUError where it is lost, stopped, gone, or takes longer than that."""
    deadline, pauses, said = api.clock() + seconds, Pauses(1.0, 15.0), ""
    while True:
        node = api.get(f"nodes/{name}")
        state = str((node or {}).get("state", "gone"))
        if node is not None and state == READY:
            return node
        if node is None or state in LOST:
            raise TPUError(f"TPU {name} is {state} before it was READY: ask for it again", reason=state)
        if state in RESTING:
            raise TPUError(
                f"TPU {name} is {state}: gcloud compute tpus tpu-vm start {name} --zone {api.zone}, or delete it",
                reason=state,
            )
        if state != said:
            logger.info("TPU %s is %s", name, state)
            said = state
        if api.clock() > deadline:
            raise TPUError(f"TPU {name} is still {state} after {seconds:.0f} s: look with scripts/tpu.py status {name}")
        api.sleep(pauses.next())


def delete(api: TPUApi, name: str, seconds: float = DELETE_SECONDS) -> bool:
    """Deletes a node, and the queued resource that it came by, and waits until they are gone; False if none was."""
    node, queued = api.get(f"nodes/{name}"), api.get(f"queuedResources/{name}")
    if node is not None and node.get("queuedResource"):
        queued = {"name": node["queuedResource"]}
    if node is None and queued is None:
        return False
    # A queued resource that is forced takes its nodes with it, and its node cannot be deleted by itself.
    path = f"queuedResources/{short(queued)}?force=true" if queued else f"nodes/{name}"
    try:
        if node is None or node.get("state") not in GOING or queued:
            api.finish(api.ask("DELETE", path), f"deleting TPU {name}", seconds)
    except TPUError as error:
        if error.status != 404:
            raise
    deadline, pauses = api.clock() + seconds, Pauses(1.0, 15.0)
    while api.get(f"nodes/{name}") is not None:
        if api.clock() > deadline:
            raise TPUError(f"TPU {name} is still there {seconds:.0f} s after it was deleted: scripts/tpu.py status")
        api.sleep(pauses.next())
    return True


def recreate(api: TPUApi, name: str, request: Request, nonce: str, seconds: float = WAIT_SECONDS) -> Body:
    """Deletes what is left of a node and makes it again, trying until there is capacity; the READY node.

    Raises TPUError for what waiting does not help, or when the time is over.
    """
    deadline, pauses = api.clock() + seconds, Pauses(5.0, 300.0)
    while True:
        try:
            if delete(api, name):
                logger.info("TPU %s: what was left of it is deleted", name)
            return create(api, name, request, nonce, max(60.0, deadline - api.clock()))
        except TPUError as error:
            pause = pauses.next()
            if not (error.may_pass or error.reason in LOST) or api.clock() + pause > deadline:
                raise
            logger.info("TPU %s: %s; trying again in %.0f s", name, error, pause)
            api.sleep(pause)


def request_of(node: Body, queued: bool | None = None) -> Request:
    """What would make the same node again. `queued`: None as the node was made."""
    network: dict[str, Any] = node.get("networkConfig") or {}
    scheduling: dict[str, Any] = node.get("schedulingConfig") or {}
    return Request(
        accelerator(str(node["acceleratorType"])),
        str(node["runtimeVersion"]),
        spot=bool(scheduling.get("spot")),
        preemptible=bool(scheduling.get("preemptible")),
        queued=bool(node.get("queuedResource")) if queued is None else queued,
        network=network.get("network"),
        subnetwork=network.get("subnetwork"),
        external_ips=bool(network.get("enableExternalIps")),
        service_account=(node.get("serviceAccount") or {}).get("email"),
        metadata=tuple(sorted((node.get("metadata") or {}).items())),
    )


def host_keys(api: TPUApi, name: str, count: int) -> list[list[str]]:
    """For each host its public SSH keys as the machine itself reported them to the API: `ssh-ed25519 AAAA...`.

    Empty lists where the image does not report them.
    """
    keys: list[list[str]] = []
    for worker in range(count):
        try:
            said = api.ask("POST", f"nodes/{name}:getGuestAttributes",
                           {"queryPath": "hostkeys/", "workerIds": [str(worker)]})  # fmt: skip
        except TPUError as error:
            if error.status not in (400, 404, 501):
                raise
            said = {}
        keys.append([
            f"{item['key']} {item['value']}"
            for entry in said.get("guestAttributes", [])
            for item in (entry.get("queryValue") or {}).get("items", [])
            if item.get("namespace") == "hostkeys" and "key" in item and "value" in item
        ])  # fmt: skip
    return keys


def check_name(name: str) -> None:
    """Raises ConfigError for a name that the API would refuse."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise ConfigError(
            f"TPU name {name!r}: lower-case letters, digits and hyphens, a letter first, at most 63 of them"
        )
