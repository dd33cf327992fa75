"""The Cloud TPU API: plain REST, Application Default Credentials by google-auth, and every answer checked.

What may pass by itself (429 for the rate, 5xx, a lost connection) is asked again, with growing pauses, until a
deadline; everything else is a `TPUError` at once, which says what was asked, what came back and what to do. Nothing
waits for ever. MESH_TRANSFORMER_TPU_ENDPOINT replaces the address, for a server of the same interface on this machine.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mesh_transformer.errors import ConfigError, MeshTransformerError

logger = logging.getLogger(__name__)

ENDPOINT = "https://tpu.googleapis.com"
ENDPOINT_VARIABLE = "MESH_TRANSFORMER_TPU_ENDPOINT"
PROJECT_VARIABLE = "GOOGLE_CLOUD_PROJECT"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
CALL_SECONDS = 120.0  # for one question, its repetitions included
REPLY_SECONDS = 60.0  # for one answer
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PASSING = (500, 502, 503, 504)
NO_CAPACITY = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")

Body = dict[str, Any]


class TPUError(MeshTransformerError):
    """The API refused, or a TPU is not what it should be. `status`: HTTP's or 0; `reason`: the API's own word."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def may_pass(self) -> bool:
        """Whether waiting can help: no capacity now, a quota in use, or a service that is down."""
        return self.status in (429, *_PASSING) or self.reason in NO_CAPACITY


@dataclasses.dataclass(frozen=True)
class Reply:
    status: int
    body: Body
    retry_after: float | None = None  # seconds


class ConnectionLostError(Exception):
    """No answer came."""


class Transport(Protocol):
    """Sends one request. Raises ConnectionLostError where no answer came, TPUError where credentials fail."""

    def __call__(self, method: str, url: str, body: Body | None) -> Reply: ...


class GoogleTransport:
    """Requests with an access token, which google-auth renews before it expires and when the API calls it invalid."""

    def __init__(self) -> None:
        try:
            import google.auth
            import requests
            from google.auth.exceptions import DefaultCredentialsError
            from google.auth.transport.requests import AuthorizedSession
        except ImportError as error:
            raise ConfigError(
                f"TPUs need the package {error.name}: pip install 'mesh-transformer[tpu]'; or give machines by "
                "--hosts-file"
            ) from error
        try:
            credentials, self.project = google.auth.default(scopes=[SCOPE])
        except DefaultCredentialsError as error:
            raise TPUError(
                "no Google credentials found: run `gcloud auth application-default login`, or run on a machine whose "
                f"service account may use TPUs ({str(error).splitlines()[0]})"
            ) from error
        self._session = AuthorizedSession(credentials)
        self._lost = (requests.ConnectionError, requests.Timeout)

    def __call__(self, method: str, url: str, body: Body | None) -> Reply:
        from google.auth.exceptions import GoogleAuthError

        try:
            answer = self._session.request(method, url, json=body, timeout=REPLY_SECONDS)
        except self._lost as error:
            raise ConnectionLostError(str(error).splitlines()[0]) from error
        except GoogleAuthError as error:
            if getattr(error, "retryable", False):
                raise ConnectionLostError(str(error).splitlines()[0]) from error
            raise TPUError(
                f"no access token: {str(error).splitlines()[0]}; renew the credentials: gcloud auth "
                "application-default login", 401,
            ) from error  # fmt: skip
        after = answer.headers.get("Retry-After", "")
        try:
            content = answer.json() if answer.content else {}
        except ValueError:
            content = {"error": {"message": answer.text[:200]}}
        return Reply(answer.status_code, content, float(after) if after.isdigit() else None)


class TPUApi:
    """The nodes and queued resources of one project and zone. `clock` and `sleep`: for tests."""

    def __init__(
        self,
        project: str,
        zone: str,
        transport: Transport,
        *,
        endpoint: str = ENDPOINT,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        self.project, self.zone = project, zone
        self.parent = f"projects/{project}/locations/{zone}"
        self.clock, self.sleep = clock, sleep
        self._transport, self._endpoint, self._call_seconds = transport, endpoint, call_seconds

    def get(self, path: str) -> Body | None:
        """A resource under the zone, such as `nodes/NAME`; None where there is none."""
        try:
            return self.ask("GET", path)
        except TPUError as error:
            if error.status == 404:
                return None
            raise

    def every(self, kind: str) -> list[Body]:
        """All resources of a kind (`nodes`, `queuedResources`, `acceleratorTypes`, `runtimeVersions`), every page."""
        found: list[Body] = []
        token = ""
        while True:
            query = {"pageSize": "200"} | ({"pageToken": token} if token else {})
            page = self.ask("GET", f"{kind}?{urllib.parse.urlencode(query)}")
            found += page.get(kind, [])
            token = page.get("nextPageToken", "")
            if not token:
                return found

    def ask(self, method: str, path: str, body: Body | None = None) -> Body:
        """One request under the zone, repeated while that can help; its answer. Raises TPUError."""
        url = f"{self._endpoint}/v2/{self.parent}/{path}"
        deadline = self.clock() + self._call_seconds
        pauses = Pauses(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            wait: float | None = None
            try:
                reply = self._transport(method, url, body)
            except ConnectionLostError as error:
                failure = TPUError(f"{method} {url}: no answer ({error}); is this machine on the network?", 503)
            else:
                if reply.status < 400:
                    return reply.body
                failure = refusal(method, url, self.project, self.zone, reply)
                wait = reply.retry_after
                if reply.status not in _PASSING and not (reply.status == 429 and failure.reason == RATE):
                    raise failure
            pause = pauses.next(wait)
            if self.clock() + pause > deadline:
                raise failure
            logger.info("%s; asking again in %.0f s", failure, pause)
            self.sleep(pause)

    def finish(self, operation: Body, what: str, seconds: float) -> None:
        """Waits until a long-running operation is done. Raises TPUError where it failed or takes longer than that."""
        deadline, pauses = self.clock() + seconds, Pauses(FIRST_PAUSE, 15.0)
        name = str(operation.get("name", "")).removeprefix(self.parent + "/")
        while not operation.get("done"):
            if not name:
                raise TPUError(f"{what}: the API's answer names no operation: {json.dumps(operation)[:200]}")
            if self.clock() > deadline:
                raise TPUError(f"{what} has not ended after {seconds:.0f} s: look with scripts/tpu.py status")
            self.sleep(pauses.next())
            operation = self.ask("GET", name)
        if "error" in operation:
            raise refusal("", what, self.project, self.zone, Reply(200, operation))


class Pauses:
    """How long to wait before each next try: doubling, shortened at random so that many do not ask at the same time."""

    def __init__(self, first: float, longest: float) -> None:
        self._next, self._longest = first, longest

    def next(self, at_least: float | None = None) -> float:
        pause = self._next * random.uniform(0.75, 1.0)
        self._next = min(2 * self._next, self._longest)
        return max(pause, at_least or 0.0)


RATE = "RATE_LIMIT_EXCEEDED"
_CODES = {3: "INVALID_ARGUMENT", 5: "NOT_FOUND", 6: "ALREADY_EXISTS", 7: "PERMISSION_DENIED", 8: "RESOURCE_EXHAUSTED",
          10: "ABORTED", 13: "INTERNAL", 14: "UNAVAILABLE"}  # fmt: skip


def refusal(method: str, what: str, project: str, zone: str, reply: Reply) -> TPUError:
    """The error for an answer of the API, with what to do about it."""
    error = reply.body.get("error")
    error = error if isinstance(error, Mapping) else {"message": str(error or "no explanation")}
    message = str(error.get("message", "")).strip().rstrip(".") or "no explanation"
    code = error.get("code")
    # An operation's error has the number of a gRPC status; a refused request has HTTP's, and the status as a word.
    status = reply.status if reply.status >= 400 else 0
    reason = str(error.get("status") or (_CODES.get(int(code), "") if isinstance(code, int) and not status else ""))
    details = {str(detail.get("reason", "")) for detail in error.get("details", []) if isinstance(detail, Mapping)}
    remedy = _remedy(status, reason, details, message.lower(), project, zone)
    if status == 429 and (RATE in details or (not details and "per minute" in message.lower())):
        reason = RATE
    where = f"{method} {what}".strip()
    number = f" {status}" if status else ""
    return TPUError(f"{where}: the TPU API answers{number} {reason}: {message}; {remedy}", status, reason)


def _remedy(status: int, reason: str, details: set[str], message: str, project: str, zone: str) -> str:
    if "SERVICE_DISABLED" in details:
        return f"switch it on: gcloud services enable tpu.googleapis.com --project {project}"
    if RATE in details:
        return "too many requests: wait a minute"
    if "quota" in message and (status in (403, 429) or reason == "RESOURCE_EXHAUSTED"):
        return (
            f"the project {project} has no quota left for this in {zone}: delete what is not needed (scripts/tpu.py "
            "list), choose another type or zone, or ask for more (console, IAM > Quotas)"
        )
    if status == 401:
        return "the credentials are not accepted: gcloud auth application-default login"
    if status == 403 or reason == "PERMISSION_DENIED":
        return f"this account needs the role roles/tpu.admin in {project}, or another account"
    if status == 404 or reason == "NOT_FOUND":
        return f"check the name, the zone {zone} and the project {project}"
    if status == 409 or reason == "ALREADY_EXISTS":
        return "that name is in use: choose another, or delete it (scripts/tpu.py delete)"
    if status == 429 or reason == "RESOURCE_EXHAUSTED":
        return f"{zone} has no such TPU free now: try later, with --queued, or in another zone"
    if status in _PASSING or reason in ("UNAVAILABLE", "INTERNAL", "ABORTED"):
        return "the service has trouble: try again later"
    return "correct the request"


def endpoint() -> str:
    """The API's address. Raises ConfigError for one that would carry the token over the network in the clear."""
    chosen = os.environ.get(ENDPOINT_VARIABLE, ENDPOINT).rstrip("/")
    parts = urllib.parse.urlsplit(chosen)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise ConfigError(
            f"{ENDPOINT_VARIABLE} {chosen!r} must be https, or http on this machine: access tokens are sent there"
        )
    return chosen


def connect(zone: str, project: str | None) -> TPUApi:
    """The API with this machine's credentials. `project`: default GOOGLE_CLOUD_PROJECT, or what the credentials name.

    Raises TPUError without credentials, ConfigError without a project.
    """
    address = endpoint()
    transport = GoogleTransport()
    chosen = project or os.environ.get(PROJECT_VARIABLE) or transport.project
    if not chosen:
        raise ConfigError(f"which cloud project? Give --project, or set {PROJECT_VARIABLE}")
    return TPUApi(chosen, zone, transport, endpoint=address)
