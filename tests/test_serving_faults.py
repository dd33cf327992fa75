"""What goes wrong around a server: clients that leave or do not read, steps that fail, ports, signals, keys."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
from collections import Counter

import httpx
import pytest
from serving_tools import (
    MAX_BATCH,
    MAX_TOKENS,
    Server,
    begin,
    error_of,
    in_parallel,
    serving,
    wait_until,
)  # fmt: skip

import device_serve

LONG = {"prompt": "a", "max_tokens": MAX_TOKENS, "logit_bias": {"0": -100}}


def idle(server):
    health = httpx.get(server.url + "/health").json()
    return health["running"] == health["waiting"] == 0


def hang_up(connection):
    """Ends a connection with a reset, as a client does that is killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def disconnects(server, times):
    """Clients that leave: at once, in the queue, while their answer streams; each way in turn."""
    files = server.open_files
    for i in range(times):
        connection = begin(server, "/v1/completions", **LONG, stream=i % 2 == 0)
        if i % 4 == 0:
            assert connection.recv(64).startswith(b"HTTP/1.1 200") or True
        elif i % 4 == 1:
            time.sleep(0.01)
        hang_up(connection)
    wait_until(lambda: idle(server))
    wait_until(lambda: server.open_files <= files + 1)


def test_clients_that_leave_free_their_rows_at_once(server):
    before = server.metric("generated_tokens_total"), server.metric("finished_total")
    disconnects(server, 24)
    assert server.metric("finished_total") - before[1] <= 24
    # Most of the work was not done.
    assert server.metric("generated_tokens_total") - before[0] < 24 * MAX_TOKENS * 0.8
    assert server.complete(context="def ", seed=1) == server.complete(context="def ", seed=1)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def faulty(served_model, faults):
    with serving(
        served_model, "--timeout", "4", "--api-key", "first-key", "--api-key", "second-key", "--cors-origin", "*",
        "--drain", "30", "--max-tokens", "300", program="tests/faulty_server.py", env={"FAULTS": str(faults)},
    ) as server:  # fmt: skip
        yield server


KEY = {"Authorization": "Bearer first-key"}


def ask(server, headers=KEY, **body):
    body = {"prompt": "def ", "seed": 1, "max_tokens": 8} | body
    return httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60)


def test_a_row_is_free_while_its_request_still_runs_elsewhere(faulty, faults):
    """With slow steps it can be seen: the row of a client that left is given to the next one."""
    in_parallel(*[lambda: ask(faulty, **LONG)] * MAX_BATCH)  # compiles all, which is not to take of the 2 s
    (faults / "slow").touch()
    try:
        held = [begin_with_key(faulty, **LONG, stream=True) for _ in range(MAX_BATCH)]
        wait_until(lambda: httpx.get(faulty.url + "/health").json()["running"] == MAX_BATCH)
        hang_up(held[0])
        wait_until(lambda: httpx.get(faulty.url + "/health").json()["running"] == MAX_BATCH - 1, 2)
        assert ask(faulty, max_tokens=2).status_code == 200
        for connection in held[1:]:
            hang_up(connection)
        wait_until(lambda: idle(faulty), 2)
    finally:
        (faults / "slow").unlink()


def test_a_row_does_not_wait_for_the_longest_of_its_batch(faulty, faults):
    """Short requests that come while long ones run are answered before these."""
    order = []

    def timed(name, tokens):
        assert ask(faulty, max_tokens=tokens, logit_bias={"0": -100}).status_code == 200
        order.append(name)

    (faults / "slow").touch()
    try:
        long = [lambda: timed("long", 60) for _ in range(MAX_BATCH - 1)]
        in_parallel(*long, lambda: [timed("short", 1) for _ in range(4)])
    finally:
        (faults / "slow").unlink()
    assert order == ["short"] * 4 + ["long"] * 3


def begin_with_key(server, **body):
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first-key\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    )  # fmt: skip
    return connection


def test_a_step_that_raises_is_500_for_its_requests_and_the_next_is_answered(faulty, faults):
    expected = ask(faulty).json()["choices"]
    (faults / "raise").touch()
    reply = ask(faulty)
    error = error_of(reply, 500)
    assert error["code"] == "failed" and "secret" not in reply.text
    assert reply.headers["access-control-allow-origin"] == "*"
    assert ask(faulty).json()["choices"] == expected
    assert httpx.get(faulty.url + "/health").status_code == 200
    assert "a secret of the server's" in faulty.said and faulty.metric("engine_failures_total") == 1


def test_a_stream_that_fails_ends_with_an_error_event(faulty, faults):
    (faults / "slow").touch()
    try:
        body = LONG | {"stream": True}
        with httpx.stream("POST", faulty.url + "/v1/completions", json=body, headers=KEY, timeout=60) as reply:
            assert reply.status_code == 200
            lines = iter(line for line in reply.iter_lines() if line)
            assert next(lines).startswith("data: {")
            (faults / "raise").touch()
            *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "failed"
    finally:
        (faults / "slow").unlink()


@pytest.mark.long
def test_a_hundred_steps_that_raise_under_load(faulty, faults, record_property):
    """Each answer is its request's own right text, or 500; none is missing, and nothing stays behind."""
    expected = [ask(faulty, seed=seed).json()["choices"] for seed in range(MAX_BATCH)]
    before, memory = faulty.metric("engine_failures_total"), faulty.resident
    statuses: Counter[int] = Counter()
    ended = threading.Event()

    def client(seed):
        while not ended.is_set():
            reply = ask(faulty, seed=seed)
            assert (reply.json()["choices"] == expected[seed]) if reply.status_code == 200 else error_of(reply, 500)
            statuses[reply.status_code] += 1

    def break_steps():
        try:
            for _ in range(100):
                answered = statuses[200]
                (faults / "raise").touch()
                wait_until(lambda: not (faults / "raise").exists() and statuses[200] > answered)  # noqa: B023
        finally:
            ended.set()

    in_parallel(break_steps, *[lambda seed=seed: client(seed) for seed in range(MAX_BATCH)])
    assert faulty.metric("engine_failures_total") - before == 100 <= statuses[500]
    wait_until(lambda: idle(faulty))
    record_property("statuses", json.dumps(statuses, sort_keys=True))
    record_property("grown_mib", f"{faulty.resident - memory:.1f}")
    assert faulty.resident - memory < 30


def test_an_answer_that_takes_too_long_is_given_up(faulty, faults):
    (faults / "slow").touch()
    try:
        began = time.monotonic()
        replies = in_parallel(*[lambda: ask(faulty, **LONG) for _ in range(2 * MAX_BATCH)])
        assert {reply.status_code for reply in replies} <= {200, 504} and time.monotonic() - began < 12
        late = [reply for reply in replies if reply.status_code == 504]
        assert late and "within 4 seconds" in error_of(late[0], 504)["message"]
        wait_until(lambda: idle(faulty), 2)
    finally:
        (faults / "slow").unlink()


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer first-kez", "Bearer first-key2", "Bearer first", "Basic first-key",
               "Bearer \xff\xfe"]
)  # fmt: skip
def test_a_wrong_key_is_refused_wherever_work_is_done(faulty, header):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    with faulty.client(headers=headers) as client:
        for method, path in (
            ("POST", "/complete"),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/x"),
        ):
            reply = client.request(method, path, json={} if method == "POST" else None)
            assert error_of(reply, 401)["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer" and "access-control-allow-origin" in reply.headers
        assert client.get("/health").status_code == client.get("/").status_code == 200


def test_complete_gives_256_tokens_where_the_server_allows_as_many(faulty):
    """The 2021 library's number; a greedy text of this model goes on for ever."""
    before = faulty.metric("generated_tokens_total")
    assert faulty.client(headers=KEY).post("/complete", json={"context": "def ", "temp": 0}).status_code == 200
    assert faulty.metric("generated_tokens_total") - before == 256


def test_each_of_several_keys_opens(faulty):
    for key in ("first-key", "second-key"):
        assert ask(faulty, {"Authorization": f"bearer {key}"}).status_code == 200


def test_sigterm_under_load_finishes_what_was_begun(faulty, faults):
    """The last test of this process: eight answers are under way when it is told to end; none is lost or cut."""
    expected = ask(faulty, max_tokens=24).json()["choices"][0]["text"]
    (faults / "slow").touch()
    works = [lambda: ask(faulty, max_tokens=24) for _ in range(2 * MAX_BATCH)]

    def end():
        wait_until(lambda: httpx.get(faulty.url + "/health").json()["waiting"] == MAX_BATCH)
        faulty.ask_to_end()
        wait_until(lambda: httpx.get(faulty.url + "/health").json()["status"] == "draining", 2)
        refused = ask(faulty)
        error_of(refused, 503)
        assert "retry-after" in refused.headers

    *replies, _ = in_parallel(*works, end)
    assert [reply.status_code for reply in replies] == [200] * len(works)
    assert all(reply.json()["choices"][0]["text"] == expected for reply in replies)
    assert faulty.wait() == 0 and faulty.said.rstrip().endswith("ended")


def test_a_dead_engine_fails_health_and_ends_the_process(served_model, tmp_path):
    with serving(served_model, program="tests/faulty_server.py", env={"FAULTS": str(tmp_path)}) as server:
        (tmp_path / "raise-always").touch()
        for _ in range(3):
            error_of(httpx.post(server.url + "/complete", json={"context": "a"}), 500)
        reply = httpx.get(server.url + "/health")
        assert reply.status_code == 503 and reply.json()["status"] == "failed"
        error_of(httpx.post(server.url + "/complete", json={"context": "a"}), 503)
        assert server.wait(20) == 1
        assert "the engine has failed" in server.said


def test_a_slow_reader_holds_up_nobody(server):
    """It asks for streams and reads nothing; its rows run to their end, and others are answered meanwhile."""
    with_little_room = []
    for _ in range(MAX_BATCH):
        connection = begin(server, "/v1/completions", **LONG, stream=True, n=2, logprobs=5)
        with_little_room.append(connection)
    began = time.monotonic()
    assert server.complete(context="def ", max_tokens=8) is not None
    wait_until(lambda: idle(server))
    assert time.monotonic() - began < 20
    for connection in with_little_room:
        # Nothing of the answer was lost while it waited to be read.
        content = b""
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(1 << 16)
        connection.close()
        assert content.count(b'"finish_reason":"length"') == 2 and b"data: [DONE]" in content


@pytest.fixture
def main(capsys):
    """Runs the script in this process, for mistakes that end it: (exit code, error stream)."""

    def run(*arguments):
        code = device_serve.main(arguments)
        return code, capsys.readouterr().err

    return run


def test_the_health_of_a_server_that_loads_is_503(served_model, main):
    server = Server(served_model)
    try:
        reply = httpx.get(server.url + "/health")
        assert reply.status_code == 503 and reply.json()["status"] == "loading"
        refused = httpx.post(server.url + "/complete", json={"context": "a"})
        error_of(refused, 503)
        assert int(refused.headers["retry-after"]) > 0
        # A second one on its port is refused at once; the first can be told to end while it loads.
        code, said = main("--config", str(served_model), "--random-init", "--port", str(server.port))
        assert code == 2 and f"cannot listen on 127.0.0.1, port {server.port}" in said and "--port" in said
        server.ask_to_end()
        assert server.wait(30) == 0
    finally:
        server.close()


def test_the_default_is_this_machine_alone():
    options = device_serve.parse(["--config", "x"])
    assert (options.host, options.port) == ("127.0.0.1", 5000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "holds no complete checkpoint"),
        (["--random-init", "--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--random-init", "--platform", "tpu"], "platform 'tpu' was asked for, but JAX"),
        (["--random-init", "--devices", "1", "--platform", "cpu"], "cores_per_replica (8)"),
        (["--random-init", "--api-key", ""], "--api-key is empty"),
        (["--random-init", "--api-key-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(served_model, main, tmp_path, arguments, message):
    """A wrong platform is an error, never a silent fallback; so are too few devices."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(json.loads(served_model.read_text()) | {"cores_per_replica": 8 if "--devices" in arguments else 1})
    )
    code, said = main("--config", str(config), "--port", "0", *arguments)
    assert code == 2, said
    assert said.splitlines()[-1].startswith("error: ") and message in said


def test_ctrl_c_ends_an_idle_server(served_model):
    server = Server(served_model)
    try:
        server.wait_ready()
        os.kill(server.process.pid, signal.SIGINT)
        assert server.wait(20) == 0
    finally:
        server.close()
