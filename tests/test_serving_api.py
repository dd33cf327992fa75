"""What the server answers over HTTP: /complete, refusals, limits, headers, /health, /metrics. One real process."""

from __future__ import annotations

import json
import math
import re

import httpx
import pytest
from serving_tools import MAX_BATCH, MAX_QUEUE, MAX_TOKENS, SEQ, begin, error_of, in_parallel, wait_until

HUGE = "9" * 5000


@pytest.fixture(scope="module")
def http(server):
    with server.client() as client:
        yield client


def test_complete_has_the_2021_fields_body_and_default_length(server):
    before = server.metric("generated_tokens_total")
    assert server.complete(context="def ", top_p=0.9, temp=0.75)
    # 256 tokens by default, or what the server allows.
    assert server.metric("generated_tokens_total") - before <= MAX_TOKENS
    assert server.complete(context="def ", temp=0) == server.complete(context="def ", top_p=0.0, temp=0.75)
    assert server.complete(context="def ", seed=3) == server.complete(context="def ", seed=3, top_p=0.9, temp=0.75)
    assert len({server.complete(context="def ") for _ in range(3)}) > 1, "without a seed every answer is a new one"


BAD_BODIES = [
    ({}, "context"),
    ({"context": None}, "context"),
    ({"context": ["def "]}, "context"),
    ({"context": 5}, "context"),
    ({"context": "a", "temp": -1}, "temp"),
    ({"context": "a", "temp": "hot"}, "temp"),
    ({"context": "a", "temp": math.nan}, "temp"),
    ({"context": "a", "temp": math.inf}, "temp"),
    ({"context": "a", "temp": True}, "temp"),
    ({"context": "a", "top_p": 1.5}, "top_p"),
    ({"context": "a", "top_p": math.nan}, "top_p"),
    ({"context": "a", "top_k": 0}, "top_k"),
    ({"context": "a", "max_tokens": 0}, "max_tokens"),
    ({"context": "a", "max_tokens": MAX_TOKENS + 1}, "max_tokens"),
    ({"context": "a", "stop": [""]}, "stop"),
    ({"context": "a", "length": 5}, "length"),
    ({"context": "x" * (SEQ * 4 * 64 + 1)}, "context"),
    ({"context": "\u0001" * (SEQ * 4 + 1)}, "context"),
]


@pytest.mark.parametrize(("body", "field"), BAD_BODIES, ids=lambda x: str(x)[:40])
def test_what_does_not_fit_is_refused_and_the_field_named(server, http, body, field):
    reply = http.post("/complete", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert error_of(reply, 400, field)["type"] == "invalid_request_error"
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", b"[1, 2]", b'"text"', b'{"context": "a"', b"\xff\xfe\x00", b'{"context": "\\ud800"}',
     b'{"context": "a", "\\ud800": 1}', b'{"context": "a", "temp": ' + HUGE.encode() + b"}",
     b'{"context": "a", "seed": ' + HUGE.encode() + b"}", b"[" * 100_000],
    ids=lambda content: content[:25],
)  # fmt: skip
def test_what_is_no_request_is_refused(server, http, content):
    error_of(http.post("/complete", content=content, headers={"Content-Type": "application/json"}), 400)
    assert http.get("/health").status_code == 200


def test_a_body_that_is_not_said_to_be_json_is_refused(http):
    """A form of another site's page could send it without asking."""
    error_of(http.post("/complete", content=b'{"context": "a"}', headers={"Content-Type": "text/plain"}), 400)


def test_a_large_body_is_refused_before_it_is_read(server, http):
    error_of(http.post("/complete", json={"context": "x" * 10_000_000}), 413)
    # Nor does it help not to tell the size.
    pieces = (b"x" * 100_000 for _ in range(100))
    with server.client() as client:
        try:
            reply = client.post("/complete", content=pieces, headers={"Content-Type": "application/json"})
        except httpx.WriteError:
            pass  # refused while it was still being sent
        else:
            error_of(reply, 413)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/complete", 405), ("GET", "/complete/1", 404), ("POST", "/", 405), ("GET", "/docs", 404),
     ("GET", "/../../etc/passwd", 404), ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404), ("GET", "/v1/models/../../x", 404),
     ("DELETE", "/v1/models", 405), ("PUT", "/metrics", 405)],
)  # fmt: skip
def test_other_paths_and_methods_are_errors_of_the_same_form(http, method, path, status):
    error_of(http.request(method, path), status)


def test_a_long_prompt_is_cut_on_the_left_and_that_is_said(server, http):
    ids = [100 + i % 150 for i in range(SEQ + 20)]
    body = {"max_tokens": 8, "temperature": 0, "logprobs": 0}
    long = http.post("/v1/completions", json=body | {"prompt": ids})
    short = http.post("/v1/completions", json=body | {"prompt": ids[-SEQ:]})
    assert long.json()["choices"] == short.json()["choices"]
    assert long.json()["usage"]["prompt_tokens"] == SEQ
    assert long.headers["warning"] == f'299 - "only the last {SEQ} of the prompt\'s {SEQ + 20} tokens were read"'
    assert "warning" not in short.headers
    other = http.post("/v1/completions", json=body | {"prompt": ids[: SEQ - 1] + ids[-1:]})
    assert other.json()["choices"] != short.json()["choices"], "the prompt does matter"


def test_an_empty_prompt_is_one_end_of_text_token(server, http):
    asked = {"max_tokens": 12, "temperature": 1, "seed": 5, "logprobs": 1}
    answers = [
        http.post("/v1/completions", json=asked | {"prompt": prompt}).json()["choices"]
        for prompt in ("", None, [0], "<|endoftext|>", "a")
    ]
    assert answers[0] == answers[1] == answers[2] == answers[3] != answers[4]
    assert all(math.isfinite(x) for x in answers[0][0]["logprobs"]["token_logprobs"])
    assert server.complete(context="", seed=5, temp=1, top_p=1, max_tokens=12) == answers[0][0]["text"]


def test_padding_ids_are_never_drawn(http):
    reply = http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": MAX_TOKENS, "n": 4, "logprobs": 5, "seed": 1}
    )
    found = [choice["logprobs"] for choice in reply.json()["choices"]]
    tokens = [token for logprobs in found for token in logprobs["tokens"]]
    # 84 of the 384 ids have no token, and would decode to nothing.
    assert len(tokens) > 100 and all(tokens)
    assert all(all(listed) for logprobs in found for listed in logprobs["top_logprobs"])


ORIGIN = "http://127.0.0.1:{}"


def test_every_reply_carries_the_cors_headers(server, http):
    origin = ORIGIN.format(server.port)
    replies = [
        http.get("/health"),
        http.get("/nowhere"),
        http.post("/complete", json={}),
        http.post("/complete", json={"context": "x" * 2_000_000}),
        http.post("/complete", json={"context": "a", "max_tokens": 2}),
        http.request("OPTIONS", "/complete"),
    ]
    assert [reply.status_code for reply in replies] == [200, 404, 400, 413, 200, 405]
    with_origin = [http.get("/health", headers={"Origin": each}) for each in (origin, "http://evil.example", "null")]
    for reply in replies + with_origin:
        allowed = reply.headers["access-control-allow-origin"]
        # Never the stranger's own: his browser keeps the answer from his page.
        assert allowed in (origin, f"http://localhost:{server.port}") and reply.headers["vary"] == "Origin"
    assert with_origin[0].headers["access-control-allow-origin"] == origin
    preflight = http.request(
        "OPTIONS", "/v1/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 204 and "Content-Type" in preflight.headers["access-control-allow-headers"]
    assert "POST" in preflight.headers["access-control-allow-methods"]


def test_a_full_queue_is_429_and_says_when_to_come_again(server, http):
    held = []
    try:
        for _ in range((MAX_BATCH + MAX_QUEUE) // 4):
            held.append(
                begin(server, "/v1/completions", prompt="a", n=4, max_tokens=MAX_TOKENS, logit_bias={"0": -100})
            )
        reply = http.post("/complete", json={"context": "a", "max_tokens": MAX_TOKENS})
        # On a fast machine some of them may have been answered by now.
        if reply.status_code == 429:
            assert error_of(reply, 429)["code"] == "queue_full"
            assert int(reply.headers["retry-after"]) >= 1 and "access-control-allow-origin" in reply.headers
        replies = in_parallel(*[lambda: httpx.post(
            server.url + "/v1/completions", json={"prompt": "a", "n": 4, "max_tokens": MAX_TOKENS}, timeout=60
        ) for _ in range(12)])  # fmt: skip
        refused = [reply for reply in replies if reply.status_code == 429]
        assert refused and all(reply.status_code in (200, 429) for reply in replies)
        for reply in refused:
            error_of(reply, 429)
            assert int(reply.headers["retry-after"]) >= 1
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: http.get("/health").json()["running"] == 0)
    assert server.complete(context="a", max_tokens=2) is not None


def test_one_more_than_the_batch_are_all_answered(server):
    asked = [{"context": "def ", "seed": i, "max_tokens": 24} for i in range(MAX_BATCH + 1)]
    alone = [server.complete(**body) for body in asked]
    together = in_parallel(*[lambda body=body: server.complete(**body) for body in asked])
    assert together == alone and len(set(alone)) == len(alone)


def test_health_and_metrics(server, http):
    assert http.get("/health").json() == {"status": "ready", "model": "tiny", "running": 0, "waiting": 0}
    before = {name: server.metric(name) for name in ("generated_tokens_total", "prompt_tokens_total", "finished_total")}
    reply = http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 9, "logit_bias": {"0": -100}})
    assert reply.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert server.metric("generated_tokens_total") - before["generated_tokens_total"] == 9
    assert server.metric("prompt_tokens_total") - before["prompt_tokens_total"] == 3
    assert server.metric("finished_total") - before["finished_total"] == 1
    text = http.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=")
    for name in ("waiting", "running", "queue_seconds_bucket", "first_token_seconds_count", "text_seconds_sum",
                 "step_seconds_count", "http_requests_total", "engine_failures_total"):  # fmt: skip
        assert re.search(rf"^mesh_transformer_{name}[ {{]", text.text, flags=re.MULTILINE), name
    http.get("/made/up/by/a/client")
    assert "made" not in http.get("/metrics").text, "clients cannot make up series"


def test_the_description_says_what_is_there(http):
    schema = http.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/complete", "/v1/completions", "/v1/models", "/v1/models/{model_id}", "/health",
                                    "/metrics"}  # fmt: skip
    for path in schema["paths"].values():
        for operation in path.values():
            assert {"400", "429", "500", "503"} <= set(operation["responses"]) and "422" not in operation["responses"]
    assert set(schema["components"]["schemas"]["CompleteRequest"]["required"]) == {"context"}
