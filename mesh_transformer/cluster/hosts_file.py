"""`--hosts-file`: machines that are reached by ssh, one a line.

# user@address:port  and what ssh's defaults do not say
me@10.0.0.2
me@10.0.0.3:2222 key=~/.ssh/pod inside=192.168.0.3
10.0.0.4 python=/opt/venv/bin/python known_hosts=~/pod_hosts folder=/scratch/mesh-transformer
"""

from __future__ import annotations

import difflib
import os
import re
import shlex

from mesh_transformer import storage
from mesh_transformer.cluster.ssh import FOLDER, Machine
from mesh_transformer.errors import ConfigError

_TARGET = re.compile(r"(?:(?P<user>[\w.-]+)@)?(?P<address>\[[0-9a-fA-F:]+\]|[\w.-]+)(?::(?P<port>\d+))?")
KEYS = ("user", "port", "key", "inside", "known_hosts", "python", "folder")
_PATHS = ("key", "known_hosts")  # of this machine


def read(path: str) -> list[Machine]:
    """The machines of a file, in its order. Raises ConfigError naming the file, the line, and what is wrong."""
    lines = storage.read_bytes(path).decode().splitlines()
    machines: list[Machine] = []
    for number, line in enumerate(lines, 1):
        words = shlex.split(line, comments=True)
        if words:
            machines.append(_machine(words, f"{path}, line {number}"))
    if not machines:
        raise ConfigError(f"{path} names no host: put one on each line, as user@address:port")
    seen: set[tuple[str, int]] = set()
    for machine in machines:
        place = (machine.address, machine.port)
        if place in seen:
            raise ConfigError(f"{path} names {machine.name} twice: a host holds one part of the model")
        seen.add(place)
    return machines


def _machine(words: list[str], where: str) -> Machine:
    target, *settings = words
    found = _TARGET.fullmatch(target)
    if found is None or target.startswith("-"):
        raise ConfigError(
            f"{where}: {target!r} is not a host; expected user@address:port (user and port may be left out)"
        )
    values = {key: value for key, value in found.groupdict().items() if value is not None}
    values["address"] = values["address"].strip("[]")
    for word in settings:
        key, _, value = word.partition("=")
        if key not in KEYS or not value:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"; did you mean {near[0]}?" if near and near[0] != key else ""
            raise ConfigError(f"{where}: {word!r}: expected KEY=VALUE with a key of {', '.join(KEYS)}{hint}")
        values[key] = os.path.expanduser(value) if key in _PATHS else value
    port = values.pop("port", "22")
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{where}: port {port} must be from 1 to 65535")
    for key in _PATHS:
        if key in values and not os.path.isfile(values[key]):
            raise ConfigError(f"{where}: {key} {values[key]} does not exist")
    address = values["address"]
    return Machine(
        address, values.get("inside", address), values.get("user"), int(port), values.get("key"),
        values.get("known_hosts"), folder=values.get("folder", FOLDER), python=values.get("python"),
    )  # fmt: skip
