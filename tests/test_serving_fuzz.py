"""Requests made up from the server's own description: whatever comes, each has an answer of the promised form."""

from __future__ import annotations

import functools
import itertools
import json
import random

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.specs.openapi.checks import response_schema_conformance
from serving_tools import in_parallel, wait_until
from test_serving_faults import disconnects, idle

SHORT, LONG = 200, 10_000
THREADS = 4
MODES = {"valid": schemathesis.GenerationMode.POSITIVE, "broken": schemathesis.GenerationMode.NEGATIVE}


def fuzz(server, count):
    """`count` requests or a few more over all operations and both modes; returns how many had each status."""
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    schema.config.max_stream_events = 10_000  # by itself it hangs up on a stream after twenty
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == 6
    # Most of them to where there is most to go wrong.
    weights = {"/v1/completions": 5, "/complete": 3}
    shares = [weights.get(operation.path, 0.5) for operation in operations]
    seen: dict[int, int] = {}

    def run(seed, missing):
        for operation, share in zip(operations, shares, strict=True):
            for mode in MODES.values():
                if operation.method.upper() == "GET":
                    mode = schemathesis.GenerationMode.POSITIVE  # nothing of these can be wrong
                examples = max(1, round(missing * share / sum(shares) / len(MODES) / THREADS))
                _ask(operation, mode, examples, seed, seen)

    seeds = itertools.count()
    # The tool ends early where it finds nothing new to ask, so that one round may give fewer than it was told to.
    while (missing := count - sum(seen.values())) > 0:
        works = [functools.partial(run, next(seeds), missing) for _ in range(THREADS)]
        in_parallel(*works, seconds=3600)
    return seen


def _ask(operation, mode, examples, seed, seen):
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def one(case):
        if isinstance(case.body, dict) and sum(seen.values()) % 8:
            case.body.pop("stream_options", None)  # refused without `stream`, which would be most of the requests
        reply = case.call(timeout=300)
        status = reply.status_code
        seen[status] = seen.get(status, 0) + 1
        told = (case.method, case.path, status, reply.text[:300])
        # A header that HTTP itself does not allow is refused by the HTTP parser, before this server's own code.
        if reply.text == "Invalid HTTP request received.":
            return
        assert status in (200, 400, 401, 404, 405, 408, 413, 429, 503, 504), told
        assert "access-control-allow-origin" in reply.headers, told
        assert "Traceback" not in reply.text and "site-packages" not in reply.text, told
        kind = reply.headers["content-type"][0].split(";")[0]
        if kind == "text/event-stream":
            assert not reply.stream_cut_short and reply.text.rstrip().endswith("data: [DONE]"), told
        elif kind == "application/json":
            if status == 405:  # which is no answer to this operation, and so not in its description
                assert set(json.loads(reply.content)["error"]) == {"message", "type", "param", "code"}, told
            else:
                case.validate_response(reply, checks=[response_schema_conformance])

    one()


def check_after(server):
    """It is as if nothing had been: the same answer as ever, nothing running, no failure, nothing in the log."""
    wait_until(lambda: idle(server))
    assert httpx.get(server.url + "/health").json()["status"] == "ready"
    assert server.metric("engine_failures_total") == 0 and "Traceback" not in server.said


def test_made_up_requests(server):
    before = server.complete(context="def ", seed=1)
    seen = fuzz(server, SHORT)
    assert seen[200] > 20 and seen[400] > 20, seen
    check_after(server)
    assert server.complete(context="def ", seed=1) == before


@pytest.mark.long
def test_ten_thousand_made_up_requests(server, record_property):
    before = server.complete(context="def ", seed=1)
    fuzz(server, SHORT)
    memory, files = server.resident, server.open_files
    seen = fuzz(server, LONG)
    record_property("requests", sum(seen.values()))
    record_property("statuses", json.dumps(seen, sort_keys=True))
    record_property("grown_mib", f"{server.resident - memory:.1f}")
    assert sum(seen.values()) >= LONG and seen[200] > 1000 and seen[400] > 1000
    check_after(server)
    assert server.complete(context="def ", seed=1) == before
    assert server.open_files <= files + 2 and server.resident - memory < 60


@pytest.mark.long
def test_two_hundred_disconnects(server, record_property):
    before = server.complete(context="def ", seed=1)
    disconnects(server, 40)
    memory = server.resident
    disconnects(server, 200)
    record_property("grown_mib", f"{server.resident - memory:.1f}")
    check_after(server)
    assert server.complete(context="def ", seed=1) == before and server.resident - memory < 30


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_requests_leave_memory_flat(server, record_property, count):
    def some(count, seed):
        rng = random.Random(seed)
        with server.client() as client:
            for _ in range(count):
                body = {"prompt": [rng.randrange(1, 280)] * rng.randrange(1, 60), "max_tokens": rng.randrange(1, 30)}
                assert client.post("/v1/completions", json=body).status_code == 200

    some(count // 5, 0)
    memory, files = server.resident, server.open_files
    in_parallel(*[lambda seed=seed: some(count // 4, seed) for seed in range(4)], seconds=600)
    record_property("grown_mib", f"{server.resident - memory:.1f}")
    assert server.resident - memory < 20
    wait_until(lambda: server.open_files <= files + 1)
    check_after(server)
