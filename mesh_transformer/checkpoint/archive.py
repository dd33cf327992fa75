"""Published archives (`step_383500.tar.zstd`) read as a stream into a step folder; the tar itself is never stored.

A tar has one order, that in which its files were packed, and what comes later cannot be looked up. So either every file
is stored as it passes, or, to leave the optimizer out, the arrays of the parameters as they pass, shard by shard.
"""

from __future__ import annotations

import contextlib
import re
import tarfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, NamedTuple, cast

import google_crc32c

from mesh_transformer import storage
from mesh_transformer.checkpoint import inventory, layout, manifest
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.manifest import FileEntry, LeafEntry, Manifest
from mesh_transformer.checkpoint.npz import CHUNK
from mesh_transformer.checkpoint.publish import new_step
from mesh_transformer.data import compression
from mesh_transformer.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from mesh_transformer.config import Config

_MEMBER = re.compile(r"(?:^|/)shard_(\d+)/(\d+)\.npz$")
_STEP = re.compile(r"step_(\d+)")


class Member(NamedTuple):
    """One file of a step in an archive; `content` can be read until the next member is asked for."""

    shard: int
    file: int
    content: IO[bytes]

    @property
    def name(self) -> str:
        return f"shard_{self.shard}/{self.file}.npz"


class Archive:
    """A tar archive of one step, open; `step` is the N of its folder, or else of its own name."""

    def __init__(self, path: storage.PathLike, stream: IO[bytes]) -> None:
        self.path = storage.normalise(path)
        self._tar = tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20)
        self._seen: set[str] = set()
        found = self._next()
        if found is None:
            raise CheckpointError(f"{path} holds no checkpoint step; expected files shard_0/0.npz, shard_0/1.npz, ...")
        self._first: Member | None = found[1]
        number = _STEP.search(found[0]) or _STEP.search(storage.name(path))
        if number is None:
            raise CheckpointError(f"{path}: neither it nor the folder in it is named step_N; rename it to say the step")
        self.step = int(number[1])

    def members(self) -> Iterator[Member]:
        """The files of the step, in the order of the archive; once."""
        member = self._first
        while member is not None:
            if member.name in self._seen:
                raise CheckpointError(f"{self.path} holds {member.name} twice, so several steps; pack one alone")
            self._seen.add(member.name)
            yield member
            found = self._next()
            member = None if found is None else found[1]

    def _next(self) -> tuple[str, Member] | None:
        """The next file of a step: its path in the archive, and itself."""
        while (info := self._tar.next()) is not None:
            found = _MEMBER.search(info.name)
            if info.isfile() and found is not None and int(found[2]) < layout.FILES:
                content = cast(IO[bytes], self._tar.extractfile(info))
                return info.name, Member(int(found[1]), int(found[2]), content)
        return None


@contextlib.contextmanager
def open_archive(path: storage.PathLike) -> Iterator[Archive]:
    """An archive (.tar, packed with zstd, gzip, xz or not at all; recognised by its bytes), local or a URL.

    What is wrong with it in the block becomes DamagedError.
    """
    target = storage.normalise(path)
    with storage.open_file(target) as file:
        with storage.errors(target, "read"):
            codec = compression.detect(file.read(compression.HEAD_BYTES))
            file.seek(0)
        try:
            with compression.errors(target, codec or "tar"):
                yield Archive(target, compression.open_stream(file, codec) if codec else file)
        except DataError as error:
            raise DamagedError(str(error)) from error
        except tarfile.TarError as error:
            raise DamagedError(f"{target} is no whole tar archive ({error}); fetch it again") from error


def unpack(path: storage.PathLike, out: storage.PathLike, config: Config | None = None) -> str:
    """Store the step of an archive as it is, with meta.json; returns its folder.

    `out`: as in `write_weights`. With `config`, of the model, the step is checked against it and gets a manifest.
    Raises DamagedError where the archive is cut short or lacks files, CheckpointError where it holds no step or
    another model's, StorageError.
    """
    with open_archive(path) as archive, new_step(out, archive.step, storage.size(path)) as step_dir:
        entries = {each.name: _store(each.content, storage.join(step_dir, each.name)) for each in archive.members()}
        for shard in {name.partition("/")[0] for name in entries}:
            storage.sync_folder(storage.join(step_dir, shard))
        found = inventory.take(step_dir, config.model if config else None)
        if config is not None:
            leaves = inventory.match(found, config.model, found.shards)
            described = [
                LeafEntry(leaf.label, leaf.whole_shape, header.shape, str(header.dtype))
                for leaf, header in zip(leaves, found.headers, strict=True)
            ]
            details = {"step": archive.step, "config": config.to_dict(), "agreement": config.agreement()}
            manifest.write(step_dir, Manifest(found.shards, described, entries, details))
    return step_dir


def _store(content: IO[bytes], path: str) -> FileEntry:
    """Copy one file, and return its size and checksum."""
    storage.makedirs(storage.parent(path))
    size = checksum = 0
    with storage.open_file(path, "wb") as file:
        while chunk := content.read(CHUNK):
            with storage.errors(path, "write"):
                file.write(chunk)
            size += len(chunk)
            checksum = google_crc32c.extend(checksum, chunk)
        with storage.errors(path, "write"):
            storage.sync(file)
    return FileEntry(size, f"{checksum:08x}")
