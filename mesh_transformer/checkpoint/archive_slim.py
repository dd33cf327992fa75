"""The parameters of a full archive, stored as a slim step while it passes: the moments never touch the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from typing import TYPE_CHECKING

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import inventory, layout, manifest
from mesh_transformer.checkpoint.archive import Archive, Member, open_archive
from mesh_transformer.checkpoint.casting import cast
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.manifest import FileEntry, LeafEntry, Manifest
from mesh_transformer.checkpoint.npz import CHUNK, Header, NpzReader, NpzWriter
from mesh_transformer.checkpoint.publish import new_step
from mesh_transformer.errors import CheckpointError

if TYPE_CHECKING:
    from mesh_transformer.config import Config, ModelConfig


def unpack_slim(path: storage.PathLike, out: storage.PathLike, config: Config, dtype: np.dtype | None = None) -> str:
    """Store the parameters of an archive's step as a slim step of as many shards; returns its folder.

    `out`: as in `write_weights`. `config`: of the model, since a stream does not say where its parameters begin.
    `dtype`: of the parameters (None: as they are). Beside the result, one file of the archive at a time is on the
    disk (more, where a shard's files are packed out of order).
    Raises DamagedError, CheckpointError and StorageError as `archive.unpack` does, and CheckpointError where a value
    is too large for `dtype`.
    """
    needed = layout.step_bytes(config.model, config.mesh.cores_per_replica, False, dtype.itemsize if dtype else 2)
    with (
        open_archive(path) as archive,
        tempfile.TemporaryDirectory(prefix="unpack-") as spool,
        new_step(out, archive.step, needed) as step_dir,
        contextlib.ExitStack() as stack,
    ):
        shards = _pass(archive, config.model, step_dir, spool, dtype, stack)
        entries = {name: entry for each in shards.values() for name, entry in each.entries.items()}
        found = inventory.take(step_dir, config.model)
        described = [
            LeafEntry(leaf.label, leaf.whole_shape, header.shape, str(header.dtype))
            for leaf, header in zip(inventory.match(found, config.model, found.shards), found.headers, strict=True)
        ]
        details = {"step": archive.step, "config": config.to_dict(), "agreement": config.agreement()}
        manifest.write(step_dir, Manifest(found.shards, described, entries, details))
    return step_dir


def _pass(
    archive: Archive, model: ModelConfig, step_dir: str, spool: str, dtype: np.dtype | None, stack: contextlib.ExitStack
) -> dict[int, _Shard]:
    """Let an archive pass, and store the parameters of every shard."""
    shards: dict[int, _Shard] = {}
    places: list[tuple[int, int]] = []
    for member in archive.members():
        if places and member.file not in {file for file, _ in places}:
            continue
        path = os.path.join(spool, member.name.replace("/", "_"))
        with storage.errors(path, "write"), open(path, "wb") as file:
            shutil.copyfileobj(member.content, file, CHUNK)
        if not places:
            places = _places(archive, member, path, model)
        if member.shard not in shards:
            labels = [leaf.label for leaf in layout.state_leaves(model, 1, full=False)]
            shards[member.shard] = _Shard(step_dir, member.shard, dict(zip(labels, places, strict=True)), dtype)
            stack.callback(shards[member.shard].abandon)
        shards[member.shard].add(member, path)
    lacking = [f"shard_{m}/{j}.npz" for m, each in sorted(shards.items()) for j in each.lacking()]
    if lacking:
        raise DamagedError(f"{archive.path} lacks {', '.join(lacking)}; fetch it again", lacking)
    return shards


def _places(archive: Archive, member: Member, path: str, model: ModelConfig) -> list[tuple[int, int]]:
    """Where the leaves of a slim step are in the archive's files, full or slim, going by one of them."""
    slim = len(layout.state_leaves(model, 1, full=False))
    totals = (len(layout.state_leaves(model, 1, full=True)), slim)
    with contextlib.closing(NpzReader(path)) as reader:
        count = len(reader)
    for total in totals:
        if layout.runs(total)[member.file] == count:
            return layout.places(total)[total - slim :]  # the parameters and step come last
    expected = " or ".join(str(layout.runs(total)[member.file]) for total in totals)
    raise CheckpointError(
        f"{archive.path}: {member.name} holds {count} arrays, the config's model has {expected} there; use the config "
        "it was trained with"
    )


class _Shard:
    """One shard of the slim step, written front to back as its files come; `entries` describes what is written."""

    def __init__(
        self, step_dir: str, shard: int, sources: dict[str, tuple[int, int]], dtype: np.dtype | None
    ) -> None:  # fmt: skip
        self.entries: dict[str, FileEntry] = {}
        self._step_dir, self._shard, self._dtype = step_dir, shard, dtype
        self._labels, self._sources = list(sources), list(sources.values())
        self._targets = layout.places(len(sources))
        self._waiting: dict[int, str] = {}
        self._done = 0  # leaves
        self._writer: NpzWriter | None = None

    def add(self, member: Member, path: str) -> None:
        """Take the file at `path`, one of the archive's, and remove it when all its arrays are written."""
        self._waiting[member.file] = path
        while self._done < len(self._sources) and self._sources[self._done][0] in self._waiting:
            file = self._sources[self._done][0]
            with contextlib.closing(NpzReader(self._waiting[file])) as reader:
                while self._done < len(self._sources) and self._sources[self._done][0] == file:
                    self._copy(reader, self._sources[self._done][1])
            os.remove(self._waiting.pop(file))

    def lacking(self) -> list[int]:
        """The archive's files that have not come."""
        return sorted({file for file, _ in self._sources[self._done :]} - self._waiting.keys())

    def abandon(self) -> None:
        """Close what an error left open."""
        if self._writer is not None:
            self._writer.__exit__(RuntimeError, None, None)
            self._writer = None

    def _copy(self, reader: NpzReader, number: int) -> None:
        """Append the next leaf, which is array `number` of `reader`."""
        target = self._targets[self._done][0]
        if self._writer is None:
            path = layout.shard_file(self._step_dir, self._shard, target)
            storage.makedirs(storage.parent(path))
            self._writer = NpzWriter(path)
        writer, header = self._writer, reader.header(number)
        label = self._labels[self._done]
        dtype = header.dtype if self._dtype is None or label == layout.STEP else self._dtype
        with storage.errors(writer.path, "write"):
            writer.add(Header(header.shape, dtype), (cast(rows, dtype, label) for _, rows in reader.pieces(number)))
            self._done += 1
            if self._done == len(self._targets) or self._targets[self._done][0] != target:
                writer.__exit__(None, None, None)
                self.entries[f"shard_{self._shard}/{target}.npz"] = FileEntry(writer.size, writer.crc32c)
                self._writer = None
