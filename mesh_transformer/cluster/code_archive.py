"""The code that hosts run: one archive of what git tracks, and the exact packages that this machine has installed.

Equal files give equal bytes, so a hash tells whether a host has them already.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import io
import logging
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import mesh_transformer
from mesh_transformer.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = "mesh-transformer"
HASH_LETTERS = 16
EXTRAS = ("ray", "gcs", "orbax", "serve")  # what hosts may need beside the core
_JAX = {"tpu": "tpu", "cuda": "cuda13"}
_FALLBACK = ("*.py", "requirements.txt", "pyproject.toml", "configs/*.json", "scripts/*.py")


@dataclasses.dataclass(frozen=True)
class Code:
    """`tar`: the archive; `files`: how many; `hash`: of the files' names, modes and contents."""

    tar: bytes
    files: int
    hash: str

    @functools.cached_property
    def content(self) -> bytes:
        """The archive as a .tar.gz, made when the first host asks: that takes longer than all else here."""
        return gzip.compress(self.tar, 6, mtime=0)


@dataclasses.dataclass(frozen=True)
class Packages:
    """What pip installs on a host. `requirements`, `constraints`: texts of files; `python`: 3.x, as here.

    `imports`: modules that have to import there afterwards.
    """

    requirements: str
    constraints: str
    python: str
    imports: tuple[str, ...] = ("jax", "haiku", "optax", "ray")

    @property
    def hash(self) -> str:
        text = f"{self.python}\n{self.requirements}\n{self.constraints}"
        return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]


def root() -> Path:
    """The folder that holds the package."""
    return Path(mesh_transformer.__file__).resolve().parent.parent


def tracked(folder: Path) -> list[str]:
    """The files that git tracks, those deleted since left out; where there is no git, the package's own files."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "-z", "--", "."], capture_output=True, check=False, timeout=60
        )
        names = done.stdout.decode().split("\0") if done.returncode == 0 else []
    except FileNotFoundError:
        names = []
    found = sorted(name for name in names if name and (folder / name).is_file())
    if not any(name.startswith("mesh_transformer/") for name in found):
        paths = {
            path for pattern in _FALLBACK for path in folder.glob(pattern) if folder.joinpath("pyproject.toml").exists()
        }
        paths |= {path for path in (folder / "mesh_transformer").rglob("*") if path.suffix in (".py", ".html")}
        return sorted(str(path.relative_to(folder)) for path in paths)
    return found


def untracked(folder: Path) -> list[str]:
    """Python files that git neither tracks nor ignores: hosts will not have them."""
    done = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py"],
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    return [name for name in done.stdout.decode().split("\0") if name] if done.returncode == 0 else []


@functools.cache
def code(folder: Path | None = None) -> Code:
    """The archive of a folder (default: the one this code came from), as its files are now."""
    folder = folder or root()
    names = tracked(folder)
    packed, digest = io.BytesIO(), hashlib.sha256()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            content = (folder / name).read_bytes()
            entry = tarfile.TarInfo(name)  # owner, time and the like stay at their defaults
            entry.size = len(content)
            entry.mode = 0o755 if (folder / name).stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(content))
            digest.update(f"{name}\0{entry.mode}\0{len(content)}\0".encode() + content)
    return Code(packed.getvalue(), len(names), digest.hexdigest()[:HASH_LETTERS])


def packages(accelerator: str, folder: Path | None = None) -> Packages:
    """The requirements at the versions that are installed here, and what they need in turn as constraints.

    `accelerator`: "tpu", "cuda" or "cpu", whose jax is asked for. Raises ConfigError where jax or ray is not installed
    here.
    """
    wanted = ["ray", *_requirements(folder or root())]
    for name in ("jax", "ray"):
        if _installed(name) is None:
            raise ConfigError(f"hosts get the packages of this machine, and {name} is not installed here: "
                              "pip install 'mesh-transformer[ray]'")  # fmt: skip
    lines, names = [], []
    for line in wanted:
        name, extras = _name(line)
        if name == "jax" and accelerator in _JAX:
            extras = _JAX[accelerator]
        bracket = f"[{extras}]" if extras else ""
        found = _installed(name)
        lines.append(f"{name}{bracket}=={found.version}" if found is not None else line)
        names.append((name, extras))
    needed = {name: version for name, version in _closure(names).items() if name != NAME}
    pins = [f"{name}=={version}" for name, version in sorted(needed.items()) if "+" not in version]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Packages("\n".join(sorted(set(lines))) + "\n", "\n".join(pins) + "\n", version)


@dataclasses.dataclass(frozen=True)
class _Installed:
    version: str
    requires: tuple[str, ...]


@functools.cache
def _installed(name: str) -> _Installed | None:
    """A package of this machine; its metadata is read once, since importlib.metadata reads all of it each time."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return _Installed(found.version, tuple(found.requires or ()))


def _closure(queue: list[tuple[str, str]]) -> dict[str, str]:
    """The installed packages that those named (each with its extras) need, and they themselves, with versions."""
    needed: dict[str, str] = {}
    while queue:
        name, extras = queue.pop()
        found = _installed(name) if name not in needed else None
        if found is None:
            continue
        needed[name] = found.version
        for line in found.requires:
            asked = re.search(r"extra == ['\"]([\w.-]+)['\"]", line)
            if asked is None or asked.group(1) in extras.split(","):
                queue.append(_name(line))
    return needed


def _requirements(folder: Path) -> list[str]:
    """The core's requirement lines and those of EXTRAS."""
    if (folder / "requirements.txt").exists() and (folder / "pyproject.toml").exists():
        lines = (folder / "requirements.txt").read_text().splitlines()
        extras = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        found = lines + [line for extra in EXTRAS for line in extras.get(extra, [])]
    else:
        found = [
            line.split(";")[0]
            for line in importlib.metadata.requires(NAME) or []
            if "extra ==" not in line or re.search(rf"extra == ['\"]({'|'.join(EXTRAS)})['\"]", line)
        ]
    return [line.split("#")[0].strip() for line in found if line.split("#")[0].strip()]


def _name(line: str) -> tuple[str, str]:
    """A requirement's name as pip compares it, and its extras, with commas."""
    match = re.match(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?", line)
    return (_plain(match.group(1)), (match.group(2) or "").replace(" ", "")) if match else ("", "")


def _plain(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
