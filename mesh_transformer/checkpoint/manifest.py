"""manifest.json of a step: its leaves, its files with sizes and checksums, and what a resume needs to know.

Written after the data files and before meta.json names the step. Steps of the 2021 library have none.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

import google_crc32c

from mesh_transformer import gcs, storage
from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.npz import file_crc32c
from mesh_transformer.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "mesh-transformer step, npz shards"
ORBAX = "mesh-transformer step, orbax"
VERSION = 1

_WORKERS = 4
_PACKAGES = ("mesh-transformer", "jax", "jaxlib", "numpy", "dm-haiku", "optax", "orbax-checkpoint")


class FileEntry(NamedTuple):
    """One data file: bytes, and CRC-32C of all of them in hexadecimal."""

    bytes: int
    crc32c: str


class LeafEntry(NamedTuple):
    """One leaf, in the order of the files: `shape` whole, of one layer; `shard_shape` of one shard's part.

    In the layout "orbax": `shape` of all layers, `shard_shape` of one chunk.
    """

    name: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """`format`: FORMAT or ORBAX; `shards`: M of the files, or in the latter of the mesh that it was saved on.

    `details` are JSON values: step, config, agreement, mesh, aux (data position, run, validation losses).
    """

    shards: int
    leaves: list[LeafEntry]
    files: dict[str, FileEntry]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    format: str = FORMAT

    @property
    def full(self) -> bool:
        """Whether the optimizer's state is there."""
        return any(leaf.name == layout.COUNT for leaf in self.leaves)


def write(step_dir: str, manifest: Manifest) -> None:
    """Write manifest.json, durable when this returns. Raises StorageError."""
    body = {
        "format": manifest.format,
        "version": VERSION,
        **manifest.details,
        "shards": manifest.shards,
        "versions": versions(),
        "leaves": [leaf._asdict() for leaf in manifest.leaves],
        "files": {name: entry._asdict() for name, entry in sorted(manifest.files.items())},
    }
    body["checksum"] = _checksum(body)
    storage.write_atomic(storage.join(step_dir, NAME), json.dumps(body, indent=1).encode())


def read(step_dir: str) -> Manifest | None:
    """A step's manifest; None where there is none. Raises DamagedError if it was altered or cut short."""
    path = storage.join(step_dir, NAME)
    try:
        content = storage.read_bytes(path)
    except storage.StorageError:
        if not storage.exists(path):
            return None
        raise
    try:
        body = json.loads(content)
        checksum = body.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{path} is corrupt: {error}") from error
    if checksum != _checksum(body):
        raise DamagedError(f"{path} is corrupt: its own checksum does not match")
    if body["format"] not in (FORMAT, ORBAX) or body["version"] > VERSION:
        raise CheckpointError(
            f"{path} is {body['format']!r} version {body['version']}; this release reads {FORMAT!r} and {ORBAX!r} up "
            f"to version {VERSION}: use the release that wrote it, or a newer one"
        )
    leaves = [LeafEntry(e["name"], tuple(e["shape"]), tuple(e["shard_shape"]), e["dtype"]) for e in body["leaves"]]
    files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
    known = ("format", "version", "shards", "versions", "leaves", "files")
    details = {key: value for key, value in body.items() if key not in known}
    return Manifest(body["shards"], leaves, files, details, body["format"])


def verify(step_dir: str, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """Check sizes and checksums of a step's data files (of `names`, else all).

    Raises one DamagedError naming every file that is missing or differs.
    """

    def problem(item: tuple[str, FileEntry]) -> str | None:
        name, entry = item
        path = storage.join(step_dir, name)
        if not storage.exists(path):
            return f"{name} is missing"
        if (size := storage.size(path)) != entry.bytes:
            return f"{name} has {size} bytes, expected {entry.bytes}"
        found = _crc32c(path)
        return None if found == entry.crc32c else f"{name} has checksum {found}, expected {entry.crc32c}"

    wanted = [(name, entry) for name, entry in manifest.files.items() if names is None or name in names]
    with ThreadPoolExecutor(_WORKERS) as pool:
        problems = [line for line in pool.map(problem, wanted) if line]
    if problems:
        raise DamagedError(f"{step_dir} was altered or cut short: {'; '.join(problems)}; use another step", problems)


def entries_of(step_dir: str, names: Collection[str]) -> dict[str, FileEntry]:
    """Sizes and checksums of files, named from the step's folder on, as they lie there."""

    def look(name: str) -> tuple[str, FileEntry]:
        path = storage.join(step_dir, name)
        return name, FileEntry(storage.size(path), _crc32c(path))

    with ThreadPoolExecutor(_WORKERS) as pool:
        return dict(pool.map(look, names))


def _crc32c(path: str) -> str:
    """A bucket keeps the checksum itself; nothing needs to be read there."""
    return gcs.crc32c(path) if gcs.owns(path) else file_crc32c(path)


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of Python and of `packages`, by default those whose arithmetic or formats matter to a checkpoint."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _checksum(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return f"{google_crc32c.value(canonical):08x}"
