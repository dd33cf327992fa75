"""Real server processes on a tiny model, and ways to ask them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from conftest import tiny

from mesh_transformer.data.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ["def test(self):\n    return self.value\n" * 20, "naïve café, 日本語 and 🙂\n" * 20]
V, SEQ = 384, 64
READY_SECONDS = 300
MAX_BATCH, MAX_QUEUE, MAX_TOKENS = 4, 12, 96
LIMITS = [
    "--max-batch", str(MAX_BATCH), "--max-queue", str(MAX_QUEUE), "--max-tokens", str(MAX_TOKENS), "--max-n", "6",
    "--chunk", "16",
]  # fmt: skip


def make_model(folder: Path) -> Path:
    """A config and a tokenizer of fewer ids than the model has; returns the config's path."""
    tokenizer = train_tokenizer(TEXTS, 300, str(folder / "tokenizer.json"))
    assert tokenizer.vocab_size < V
    keys = tiny(n_vocab=V, seq=SEQ, name="tiny", model_dir=str(folder / "model"), tokenizer=tokenizer.source)
    path = folder / "config.json"
    path.write_text(json.dumps(keys))
    return path


class Server:
    """A server process; `url` is known once it is ready. `program`: the script, device_serve.py or one around it."""

    def __init__(
        self,
        config: Path,
        *arguments: str,
        program: str = "device_serve.py",
        env: dict[str, str] | None = None,
        weights: Sequence[str] = ("--random-init",),
    ):
        self.log = config.parent / f"server-{time.monotonic_ns()}.log"
        self._said = self.log.open("w")
        command = [
            sys.executable, program, "--config", str(config), *weights, "--platform", "cpu", "--devices", "1",
            "--port", "0", *LIMITS, *arguments,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=ROOT, stderr=self._said, stdout=self._said, env=os.environ | (env or {})
        )
        self.port = int(self._wait_for("listening on http://").rsplit(":", 1)[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def _wait_for(self, words: str) -> str:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            for line in self.said.splitlines():
                if words in line:
                    return line
            assert self.process.poll() is None, self.said
            time.sleep(0.05)
        raise AssertionError(f"no {words!r} in {self.said}")

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_ready(self) -> Server:
        self._wait_for("compiled:")
        wait_until(lambda: httpx.get(self.url + "/health").status_code == 200)
        return self

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **more)

    def complete(self, **body: Any) -> str:
        reply = httpx.post(self.url + "/complete", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        assert set(reply.json()) == {"completion"}
        text: str = reply.json()["completion"]
        return text

    def metric(self, name: str) -> float:
        """A value of /metrics: the sum over its labels."""
        lines = httpx.get(self.url + "/metrics").text.splitlines()
        found = [line for line in lines if line.startswith((f"mesh_transformer_{name} ", f"mesh_transformer_{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    @property
    def resident(self) -> float:
        """MiB of memory."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def ask_to_end(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._said.close()


@contextlib.contextmanager
def serving(config: Path, *arguments: str, **more: Any) -> Iterator[Server]:
    server = Server(config, *arguments, **more)
    try:
        yield server.wait_ready()
        assert "Traceback" not in server.said or more, server.said
    finally:
        server.close()


def wait_until(condition: Any, seconds: float = 30) -> None:
    """Until `condition()` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def in_parallel(*works: Any, seconds: float = 300) -> list[Any]:
    """What each of the functions returns, all run at once; the first exception is raised again."""
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as error:  # noqa: BLE001
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "an answer never came"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def begin(server: Server, path: str, **body: Any) -> socket.socket:
    """A connection on which a request was sent, and nothing was read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        .encode() + content
    )  # fmt: skip
    return connection


def error_of(reply: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The error object, after checking its form."""
    assert reply.status_code == status, (reply.status_code, reply.text)
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"}
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "Traceback" not in reply.text and ".py" not in reply.text
    if param is not None:
        assert error["param"] == param and param in error["message"], error
    return error
