"""A record file in the making: written under a temporary name, then published with its offsets and description."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mesh_transformer import storage
from mesh_transformer.data import sidecar
from mesh_transformer.data.packing import Packed, PackingOptions, pack
from mesh_transformer.data.record_set import MASK, TOKENS
from mesh_transformer.data.records import OFFSETS_SUFFIX, RecordWriter, encode_offsets
from mesh_transformer.data.spool import Spool

_BUFFER = 1 << 20  # bytes


class Draft:
    """The records of one spool, in a file in `folder` that vanishes at the end of the `with` block unless published."""

    def __init__(self, folder: str, spool: Spool, packing: PackingOptions) -> None:
        self.spool = spool
        self.packing = packing
        self.packed = Packed()
        self._folder = folder
        self._path: str | None = None
        self._offsets = b""

    def __enter__(self) -> Draft:
        with storage.errors(self._folder, "make a temporary file in"):
            handle, self._path = tempfile.mkstemp(prefix=".records-", suffix=".partial", dir=self._folder)
            os.close(handle)
            # mkstemp makes a private file; a record file is for whoever the folder's other files are for.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(self._path, 0o666 & ~mask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path)

    def write(self, progress: Callable[[int], None]) -> None:
        """Cut the spool into records and write them; `progress` is called with records done."""
        with storage.errors(self._draft, "write"), open(self._draft, "wb", buffering=_BUFFER) as file:
            writer = RecordWriter(file)
            for ids, mask in pack(self.spool, self.packing, self.packed):
                writer.write({TOKENS: ids} if mask is None else {TOKENS: ids, MASK: mask})
                progress(1)
            storage.sync(file)
        self._offsets = encode_offsets(writer.offsets)

    def facts(self) -> dict[str, Any]:
        """What the description says about this file: written + dropped = epochs x corpus tokens."""
        packed, spool = self.packed, self.spool
        return {
            "records": packed.records,
            "tokens": packed.written_tokens,
            "record_tokens": self.packing.record_tokens,
            "bytes": os.path.getsize(self._draft),
            "max_id": packed.max_id,
            "epochs": self.packing.epochs,
            "records_per_epoch": packed.records_per_epoch,
            "documents": spool.documents,
            "empty_documents": spool.empty_documents,
            "corpus_tokens": spool.tokens,
            "dropped_tail_tokens": packed.dropped_tail_tokens,
            "dropped_repetitive_tokens": packed.dropped_repetitive_tokens,
            "dropped_repetitive_records": packed.dropped_repetitive_records,
        }

    def publish(self, path: str, description: dict[str, Any]) -> None:
        """Put the file, its offsets and its description where they belong; the record file comes last."""
        storage.write_atomic(path + OFFSETS_SUFFIX, self._offsets)
        sidecar.write(path, description)
        if not storage.is_url(path):
            storage.rename(self._draft, path)
            return
        with storage.errors(path, "write"), open(self._draft, "rb") as source:
            target = storage.open_file(path, "wb")
            try:
                shutil.copyfileobj(source, target, _BUFFER)
                target.close()
            except BaseException:
                storage.abandon(target)
                raise

    @property
    def _draft(self) -> str:
        if self._path is None:
            raise RuntimeError("a Draft is used in a `with` block")
        return self._path


def unpublish(path: str) -> None:
    """Remove a record file with what belongs to it; not there is fine. The record file, which is looked for, first."""
    for suffix in ("", OFFSETS_SUFFIX, sidecar.SUFFIX):
        storage.remove(path + suffix)
