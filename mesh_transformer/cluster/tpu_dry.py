"""`--dry-run`: the Cloud TPU API that shows every request and sends none, and answers as a zone with capacity would."""

from __future__ import annotations

import json
from typing import IO
from urllib.parse import parse_qs, urlsplit

from mesh_transformer.cluster.accelerators import Accelerator
from mesh_transformer.cluster.tpu_api import ENDPOINT, Body, Reply, TPUApi


class DryTransport:
    """`there`: whether the TPU is taken to exist already; `accelerator`: what it is then."""

    def __init__(self, out: IO[str], accelerator: Accelerator, there: bool) -> None:
        self._out, self._accelerator = out, accelerator
        self._nodes: dict[str, Body] = {}
        self._queued: dict[str, Body] = {}
        self._there = there

    def __call__(self, method: str, url: str, body: Body | None) -> Reply:
        self._out.write(f"{method} {url}\n")
        if body is not None:
            self._out.writelines(f"    {line}\n" for line in json.dumps(body, indent=2).splitlines())
        parts = urlsplit(url)
        kind, _, name = parts.path.split("/locations/")[1].partition("/")[2].partition("/")
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if method == "POST" and kind == "nodes" and body is not None and ":" not in name:
            self._make(query["nodeId"], body)
        elif method == "POST" and kind == "queuedResources" and body is not None:
            spec = body["tpu"]["nodeSpec"][0]
            self._queued[spec["nodeId"]] = {"name": spec["nodeId"], "state": {"state": "ACTIVE"}}
            self._make(spec["nodeId"], spec["node"])
        elif method == "DELETE":
            self._nodes.pop(name, None)
            self._queued.pop(name, None)
            self._there = False
        elif method == "GET" and kind == "operations":
            return Reply(200, {"name": name, "done": True})
        elif method == "GET" and kind in ("acceleratorTypes", "runtimeVersions"):
            return Reply(200, {"name": name})
        elif method == "GET":
            return self._get(kind, name)
        else:
            return Reply(200, {})
        return Reply(200, {"name": f"{parts.path.partition('/v2/')[2].partition('/' + kind)[0]}/operations/OPERATION"})

    def _get(self, kind: str, name: str) -> Reply:
        if not name:
            return Reply(200, {})
        if kind == "nodes" and self._there and name not in self._nodes:
            self._make(name, {"acceleratorType": self._accelerator.name, "runtimeVersion": self._accelerator.runtime})
        found = (self._nodes if kind == "nodes" else self._queued).get(name)
        return Reply(200, found) if found else Reply(404, {"error": {"message": "none yet"}})

    def _make(self, name: str, body: Body) -> None:
        hosts = range(self._accelerator.usual_hosts)
        self._nodes[name] = body | {
            "name": name,
            "state": "READY",
            "networkEndpoints": [
                {"ipAddress": f"HOST-{host}", "accessConfig": {"externalIp": f"PUBLIC-{host}"}} for host in hosts
            ],
        }


def connect(zone: str, project: str | None, out: IO[str], accelerator: Accelerator, there: bool) -> TPUApi:
    """An API that is only shown."""
    transport = DryTransport(out, accelerator, there)
    return TPUApi(project or "PROJECT", zone, transport, endpoint=ENDPOINT, sleep=lambda seconds: None)
