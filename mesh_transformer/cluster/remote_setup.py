"""Gets the code and its packages onto hosts, all at once; a host that has both already is ready after one question.

Everything lies in one folder of the user there, and nothing outside it is written or removed:

    ~/.mesh-transformer/
      code/HASH/   what git tracks here, unpacked
      env/HASH/    a virtual environment with the packages of this machine
      tools/ python/ cache/ tmp/   uv and the interpreter it brings, where the machine has no fitting one; pip's files
      r/ID/        a session's own: Ray's files, the token (mode 0600)
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import logging
import re
import shlex
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from mesh_transformer.cluster.code_archive import Code, Packages
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.cluster.ssh import Machine, Shell

logger = logging.getLogger(__name__)

PROBE_SECONDS, CODE_SECONDS, INSTALL_SECONDS = 60.0, 600.0, 1800.0
PROBE, UNPACK, INSTALL = "looking around", "unpacking the code", "installing packages"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a host has. `folder`: absolute; `environments`: hashes of packages; `chips`, `gpus`: TPU chips and GPUs;
    `python`: a given interpreter's version and packages, None where none is given."""

    machine: Machine
    folder: str
    has_code: bool
    environments: frozenset[str]
    chips: int
    gpus: int
    python: str | None


@dataclasses.dataclass(frozen=True)
class Ready:
    """A host that can run the code. Paths on that host, absolute."""

    machine: Machine
    folder: str
    code: str
    python: str


def on_all(machines: Sequence[Machine], work: Callable[[Machine], T]) -> list[T]:
    """Does something on every machine at once; the results in order. Raises HostError with a line for each failure."""
    with concurrent.futures.ThreadPoolExecutor(max(1, min(64, len(machines)))) as pool:
        running = [pool.submit(work, machine) for machine in machines]
    failed = [error for task in running if (error := task.exception()) is not None]
    for error in failed:
        if not isinstance(error, HostError):
            raise error
    if failed:
        raise HostError("\n".join(dict.fromkeys(str(error) for error in failed)))
    return [task.result() for task in running]


def probe(shell: Shell, machines: Sequence[Machine], code: Code, logs: Path) -> list[Found]:
    """What every host has; changes nothing there. Raises HostError for hosts that cannot be reached or used."""

    def look(machine: Machine) -> Found:
        said = shell.run(machine, _probe_script(machine, code), PROBE, log=_log(logs, machine), seconds=PROBE_SECONDS)
        told = dict(line.split("=", 1) for line in said.splitlines() if re.match(r"\w+=", line))
        if "folder" not in told:
            raise HostError(
                f"host {machine.name}: {PROBE} gave no answer: does its login shell print or ask something?"
            )
        return Found(
            machine, told["folder"], told.get("code") == "1", frozenset(told.get("environments", "").split()),
            int(told.get("chips") or 0), int(told.get("gpus") or 0), told.get("python"),
        )  # fmt: skip

    return on_all(machines, look)


def _check_python(found: Found, packages: Packages) -> None:
    """Raises HostError where a given interpreter is not like this machine's: Ray and pickles need that."""
    if found.python is None:
        return
    pins = dict(line.split("==") for line in packages.constraints.splitlines() if "==" in line)
    wanted = f"{packages.python} ray {pins.get('ray', 'none')} jax {pins.get('jax', 'none')}"
    if found.python != wanted:
        raise HostError(
            f"host {found.machine.name}: python={found.machine.python} is {found.python or 'not there'}, and this "
            f"machine has {wanted}: give one that is the same, or leave python= out to have one made"
        )


def prepare(
    shell: Shell, found: Sequence[Found], code: Code, packages: Packages, logs: Path,
    clock: Callable[[], float] = time.monotonic,
) -> list[Ready]:  # fmt: skip
    """Brings every host up to date, all at once. Raises HostError with each failing host's line and its log's path."""
    for here in found:
        _check_python(here, packages)
    begin = clock()
    by_machine = {here.machine: here for here in found}

    def work(machine: Machine) -> Ready:
        here, log = by_machine[machine], _log(logs, machine)
        folder = here.folder
        if not here.has_code:
            shell.run(machine, _unpack_script(folder, code.hash), UNPACK, send=code.content, log=log,
                      seconds=CODE_SECONDS)  # fmt: skip
        python = machine.python
        if python is None:
            python = f"{folder}/env/{packages.hash}/venv/bin/python"
            if packages.hash not in here.environments:
                shell.run(machine, _install_script(folder, packages), INSTALL, send=_tar(packages), log=log,
                          seconds=INSTALL_SECONDS)  # fmt: skip
        return Ready(machine, folder, f"{folder}/code/{code.hash}", python)

    stale = sum(not (here.has_code and (here.machine.python or packages.hash in here.environments)) for here in found)
    if stale:
        if not all(here.has_code for here in found):
            code.content  # noqa: B018  packed once, not by each host's thread
        logger.info("setting up %d of %d hosts (logs: %s)", stale, len(found), logs)
    ready = on_all([here.machine for here in found], work)
    names = ", ".join(here.machine.name for here in found)
    logger.info("%s: ready with code %s after %.1f s", names, code.hash, clock() - begin)
    return ready


def _log(logs: Path, machine: Machine) -> Path:
    return logs / f"{machine.name}.log"


def _folder(machine: Machine) -> str:
    """The project's folder as a shell expression."""
    folder = machine.folder.removeprefix("~/")
    return shlex.quote(folder) if folder.startswith("/") else f'"$HOME"/{shlex.quote(folder)}'


def _probe_script(machine: Machine, code: Code) -> str:
    given = shlex.quote(machine.python) if machine.python else ""
    return f"""
F={_folder(machine)}
echo "folder=$F"
[ -e "$F/code/{code.hash}/.ready" ] && echo code=1
echo "environments=$(cd "$F/env" 2> /dev/null && ls -d ./*/.ready 2> /dev/null | cut -d / -f 2 | tr '\\n' ' ')"
count() {{ n=0; for d in "$@"; do [ -e "$d" ] && n=$((n + 1)); done; echo "$n"; }}
echo "chips=$(count /dev/accel[0-9]* /dev/vfio/[0-9]*)"
echo "gpus=$(count /dev/nvidia[0-9]*)"
""" + (f"""echo "python=$({given} -c {shlex.quote(_VERSIONS)} 2>&1 | tail -n 1)"
""" if given else "")  # fmt: skip


_VERSIONS = """
import importlib.metadata as m, sys
def v(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return "none"
print(f"{sys.version_info[0]}.{sys.version_info[1]} ray {v('ray')} jax {v('jax')}")
"""


def _unpack_script(folder: str, code_hash: str) -> str:
    """Beside its place, then renamed: a folder of that name is whole. Two drivers at once do no harm."""
    return f"""
set -eu
umask 077
F={shlex.quote(folder)}
mkdir -p "$F/code"
D=$(mktemp -d "$F/code/draft.XXXXXX")
tar -xzf - -C "$D"
touch "$D/.ready"
mv -T "$D" "$F/code/{code_hash}" 2>/dev/null || [ -e "$F/code/{code_hash}/.ready" ]
rm -rf "$D"
"""


def _install_script(folder: str, packages: Packages) -> str:
    imports = shlex.quote("import " + ", ".join(("sys", *packages.imports)))
    return f"""
set -eu
umask 077
F={shlex.quote(folder)}
E="$F/env/{packages.hash}"
mkdir -p "$F/env" "$F/tmp" "$F/cache"
export TMPDIR="$F/tmp" PIP_CACHE_DIR="$F/cache/pip" UV_CACHE_DIR="$F/cache/uv" UV_PYTHON_INSTALL_DIR="$F/python"
export RUSTUP_HOME="$F/tmp/rustup"  # pip asks rustc for its version, which may leave a folder in the home
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONNOUSERSITE=1
exec 9> "$F/env/lock"
flock 9
[ ! -e "$E/.ready" ] || exit 0
rm -rf "$E"
mkdir "$E"
tar -xf - -C "$E"
P=$(command -v python{packages.python} || true)
if [ -n "$P" ] && "$P" -c 'import ensurepip, venv' 2> /dev/null; then
    "$P" -m venv "$E/venv"
    "$E/venv/bin/python" -m pip install -r "$E/requirements.txt" -c "$E/constraints.txt"
else
    # uv brings the interpreter, and pip, which knows the machine's own settings, the packages.
    [ -x "$F/tools/bin/uv" ] || python3 -m pip install --target "$F/tools" uv pip
    UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1 "$F/tools/bin/uv" venv --no-config --python {packages.python} "$E/venv"
    PYTHONPATH="$F/tools" python3 -m pip --python "$E/venv/bin/python" install \\
        -r "$E/requirements.txt" -c "$E/constraints.txt"
fi
"$E/venv/bin/python" -c {imports}
touch "$E/.ready"
"""


def _tar(packages: Packages) -> bytes:
    """The two requirement files, as the install script takes them."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in (("requirements.txt", packages.requirements), ("constraints.txt", packages.constraints)):
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()
