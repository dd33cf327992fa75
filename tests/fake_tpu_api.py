"""A server on this machine that speaks the Cloud TPU API, with Google's token exchange in front of it.

Real HTTP, real google-auth: a service account's key file signs, `/token` hands out tokens that run out, and what comes
without a good one is 401. Nodes take `ready_after` looks to be READY; if that is 1, operations are done at once.
`refuse` holds answers for the next requests.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROJECT, ZONE = "a-project", "us-central2-b"
PARENT = f"projects/{PROJECT}/locations/{ZONE}"
TYPES = ("v2-8", "v3-8", "v4-8", "v4-16", "v4-32", "v5litepod-16", "v6e-8")
IMAGES = ("tpu-ubuntu2204-base", "v2-alpha-tpuv5-lite", "v2-alpha-tpuv6e")


class FakeTPU:
    """`hosts`: addresses that nodes of two or more hosts get; `log`: (method, path, body) of every request."""

    def __init__(self, hosts=("10.0.0.2", "10.0.0.3"), token_seconds=3600):
        self.hosts, self.token_seconds = list(hosts), token_seconds
        self.nodes, self.queued, self.operations, self.log = {}, {}, {}, []
        self.tokens, self.refuse, self.host_keys = {}, [], []
        self.ready_after, self.queue_after, self.count = 2, 2, 0
        self.on_delete = self.on_create = lambda node: None
        self.lock = threading.RLock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # header and body in one piece: the second would wait 40 ms for an acknowledgement

            def do(self):
                length = int(self.headers.get("Content-Length") or 0)
                content = self.rfile.read(length)
                with fake.lock:
                    status, body, headers = fake.answer(self.command, self.path, content, self.headers)
                if status == 0:  # the connection is lost
                    self.close_connection = True
                    return
                said = json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", "Content-Length": len(said), **headers}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST = do_DELETE = do  # noqa: N815

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def credentials(self, path):
        """Writes a service account's key file whose tokens come from here."""
        path.write_text(json.dumps({
            "type": "service_account", "project_id": PROJECT, "private_key_id": "1", "private_key": private_key(),
            "client_email": f"robot@{PROJECT}.example", "client_id": "1", "token_uri": self.url + "/token",
        }))  # fmt: skip
        return path

    def environment(self, folder):
        """The variables that lead programs here."""
        return {
            "GOOGLE_APPLICATION_CREDENTIALS": str(self.credentials(folder / "credentials.json")),
            "MESH_TRANSFORMER_TPU_ENDPOINT": self.url,
        }

    def requests(self, method):
        return [path for asked, path, _ in self.log if asked == method]

    def answer(self, method, path, content, headers):
        parts = urllib.parse.urlsplit(path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        if parts.path == "/token":
            token = f"secret-token-{len(self.tokens)}"
            self.tokens[token] = time.monotonic() + self.token_seconds
            return 200, {"access_token": token, "expires_in": self.token_seconds, "token_type": "Bearer"}, {}
        body = json.loads(content) if content else None
        self.log.append((method, parts.path.removeprefix(f"/v2/{PARENT}/"), body))
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        if self.tokens.get(token, 0) < time.monotonic():
            return *error(401, "UNAUTHENTICATED", "Request had invalid authentication credentials"), {}
        if self.refuse and (method == self.refuse[0][0] or self.refuse[0][0] == "*"):
            _, status, word, message, *more = self.refuse.pop(0)
            if status == 0:
                if more:
                    self.handle(method, parts.path, query, body)
                return 0, {}, {}
            return *error(status, word, message, *more[:1]), (more[1] if len(more) > 1 else {})
        return *self.handle(method, parts.path, query, body), {}

    def handle(self, method, path, query, body):
        if not path.startswith(f"/v2/{PARENT}/"):
            return error(404, "NOT_FOUND", f"Location {path} is not found")
        kind, _, name = path.removeprefix(f"/v2/{PARENT}/").partition("/")
        if name.endswith(":getGuestAttributes"):
            keys = self.host_keys[int(body["workerIds"][0])] if self.host_keys else []
            items = [dict(zip(("namespace", "key", "value"), ("hostkeys", *key.split()), strict=True)) for key in keys]
            return 200, {"guestAttributes": [{"queryPath": "hostkeys/", "queryValue": {"items": items}}]}
        store = {
            "nodes": self.nodes, "queuedResources": self.queued, "operations": self.operations,
            "acceleratorTypes": {type_: {"name": f"{PARENT}/acceleratorTypes/{type_}"} for type_ in TYPES},
            "runtimeVersions": {image: {"name": f"{PARENT}/runtimeVersions/{image}"} for image in IMAGES},
        }[kind]  # fmt: skip
        if method == "GET" and not name:
            names = sorted(store)
            start = int(query.get("pageToken", 0))
            page = {kind: [store[found] for found in names[start : start + 2]]}  # pages of two
            return 200, page | ({"nextPageToken": str(start + 2)} if start + 2 < len(names) else {})
        if method == "POST":
            return self.create_node(query["nodeId"], body) if kind == "nodes" else self.create_queued(query, body)
        if name not in store:
            return error(404, "NOT_FOUND", f"Resource {name} was not found")
        if method == "DELETE":
            return self.delete(kind, name, query)
        self.advance(kind, store[name])
        return 200, store[name]

    def advance(self, kind, found):
        """Time passes with every look."""
        found["looks"] = found.get("looks", 0) + 1
        if kind == "nodes" and found["state"] == "CREATING" and found["looks"] >= self.ready_after:
            found["state"] = "READY"
            found["networkEndpoints"] = [{"ipAddress": host, "port": 8470} for host in found.pop("hosts")]
        elif kind == "operations" and found["looks"] >= 2:
            found["done"] = True
        elif kind == "queuedResources" and found["looks"] >= self.queue_after:
            found["state"] = {"state": {"ACCEPTED": "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES": "ACTIVE"}.get(
                found["state"]["state"], found["state"]["state"])}  # fmt: skip
            spec = found["tpu"]["nodeSpec"][0]
            if found["state"]["state"] == "ACTIVE" and spec["nodeId"] not in self.nodes:
                self.create_node(spec["nodeId"], spec["node"] | {"queuedResource": found["name"]})

    def operation(self, **more):
        self.count += 1
        made = {"name": f"{PARENT}/operations/operation-{self.count}", "done": self.ready_after == 1, **more}
        self.operations[f"operation-{self.count}"] = made
        return 200, made

    def create_node(self, name, body):
        if name in self.nodes:
            return error(409, "ALREADY_EXISTS", f"Resource {name} already exists")
        assert not {"name", "state"} & set(body), body
        self.count += 1
        count = len(self.hosts) if int(body["acceleratorType"].split("-")[1]) > 8 else 1
        self.nodes[name] = body | {
            "name": f"{PARENT}/nodes/{name}", "state": "CREATING", "id": str(self.count), "hosts": self.hosts[:count],
        }  # fmt: skip
        self.on_create(self.nodes[name])
        return self.operation()

    def create_queued(self, query, body):
        name = query["queuedResourceId"]
        if name in self.queued:
            return error(409, "ALREADY_EXISTS", f"Resource {name} already exists")
        self.queued[name] = body | {"name": f"{PARENT}/queuedResources/{name}", "state": {"state": "ACCEPTED"}}
        return self.operation()

    def delete(self, kind, name, query):
        if kind == "queuedResources":
            node = self.queued[name]["tpu"]["nodeSpec"][0]["nodeId"]
            if node in self.nodes and query.get("force") != "true":
                return error(400, "FAILED_PRECONDITION", "the queued resource has nodes: use force")
            del self.queued[name]
            kind, name = "nodes", node
        elif self.nodes[name].get("queuedResource"):
            return error(400, "FAILED_PRECONDITION", "the node belongs to a queued resource: delete that")
        if kind == "nodes" and name in self.nodes:
            self.on_delete(self.nodes.pop(name))
        return self.operation()

    def preempt(self, name):
        with self.lock:
            self.nodes[name]["state"] = "PREEMPTED"
            if name in self.queued:
                self.queued[name]["state"] = {"state": "SUSPENDED"}
        assert re.search("PREEMPTED", json.dumps(self.nodes[name]))


@functools.cache
def private_key():
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def error(status, word, message, reason=None):
    details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason}] if reason else []
    return status, {"error": {"code": status, "status": word, "message": message, "details": details}}
