"""device_serve.py on a host, and its port here, for as long as this side holds on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mesh_transformer import storage
from mesh_transformer.cluster import code_archive, remote_setup
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.cluster.remote_setup import Ready
from mesh_transformer.cluster.ssh import Machine, Shell, lease, remote
from mesh_transformer.errors import ConfigError

logger = logging.getLogger(__name__)

HOST_PORT, SENDING = "choosing a port", "sending the config"
QUICK_SECONDS = 60.0
ENDING = 70  # seconds that the server may take to finish what it has begun
_FREE_PORT = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"


@dataclasses.dataclass(frozen=True)
class Server:
    """`arguments`: more for device_serve.py; `keys`: API keys, which are sent apart; `port`: on this machine."""

    config: str
    arguments: Sequence[str]
    keys: Sequence[str]
    port: int
    platform: str = "tpu"


def prepare(machines: Sequence[Machine], shell: Shell, logs: Path, platform: str) -> Ready:
    """The one host, with code and packages. Raises ConfigError for several: a server runs on one."""
    if len(machines) != 1:
        raise ConfigError(
            f"this TPU has {len(machines)} hosts, and device_serve.py runs on one: serve from a TPU of one host, such "
            "as v3-8, v4-8, v5litepod-8 or v6e-8"
        )
    code, packages = code_archive.code(), code_archive.packages(platform)
    found = remote_setup.probe(shell, machines, code, logs)
    return remote_setup.prepare(shell, found, code, packages, logs)[0]


def command(ready: Ready, server: Server, shell: Shell, log: Path) -> list[str]:
    """Sends the config, the tokenizer it names, and the keys; the ssh command line that serves and forwards."""
    run = f"{ready.folder}/r/serve-{secrets.token_hex(4)}"
    files = _files(server, run)
    sizes = " ".join(f"{shlex.quote(name)} {len(content)}" for name, content in files.items())
    script = f"""
set -eu
umask 077
D={shlex.quote(run)}
mkdir -p "$D"
set -- {sizes}
while [ $# -gt 0 ]; do head -c "$2" > "$D/$1"; shift 2; done
"""
    shell.run(ready.machine, script, SENDING, send=b"".join(files.values()), log=log, seconds=QUICK_SECONDS)
    said = shell.run(
        ready.machine, f"{shlex.quote(ready.python)} -c {shlex.quote(_FREE_PORT)}", HOST_PORT, log=log,
        seconds=QUICK_SECONDS,
    ).strip()  # fmt: skip
    port = said or "PORT"
    words = [
        ready.python, "device_serve.py", "--config", f"{run}/config.json", "--host", "127.0.0.1", "--port", port,
        "--platform", server.platform, *server.arguments,
    ]  # fmt: skip
    if "keys" in files:
        words += ["--api-key-file", f"{run}/keys"]
    serving = lease(shlex.join(words), f"rm -f {shlex.quote(run)}/keys", ENDING)
    place = f"cd {shlex.quote(ready.code)} && export TMPDIR={shlex.quote(run)} && {{\n{serving}}}"
    forward = ["-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{server.port}:127.0.0.1:{port}"]
    return [*ready.machine.ssh(*forward), remote(place)]


def _files(server: Server, run: str) -> dict[str, bytes]:
    """What the host needs beside the code: the config, leading to the tokenizer's file there, and the keys."""
    content = storage.read_bytes(server.config)
    keys = json.loads(content)
    files = {}
    tokenizer = keys.get("tokenizer")
    if isinstance(tokenizer, str) and os.path.isfile(tokenizer):
        files["tokenizer.json"] = Path(tokenizer).read_bytes()
        keys["tokenizer"] = f"{run}/tokenizer.json"
        content = json.dumps(keys).encode()
    files["config.json"] = content
    if server.keys:
        files["keys"] = "".join(f"{key}\n" for key in server.keys).encode()
    return files


def run(words: Sequence[str], ready: Ready, log: Path) -> int:
    """Serves until Ctrl-C, or until the server ends by itself; its exit code. What it says is shown and kept."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()
        except KeyboardInterrupt:
            logger.info("ending the server on %s", ready.machine.name)
            raise
        finally:
            # Its standard input ends: the host tells the server to finish.
            if process.stdin:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            try:
                code = process.wait(75)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
    if code == 255:
        raise HostError(f"host {ready.machine.name}: the connection was lost, or the port is taken here (log: {log})")
    return code
