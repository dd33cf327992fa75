"""A corpus as tokens in unnamed temporary files on disk, so that memory does not grow with it.

Two files: the tokens of all documents one after the other (2 bytes each if ids fit, else 4), and per document where
it starts, how long it is, and how much of it is prompt. They vanish when closed, or when the process dies.
"""

from __future__ import annotations

import os
import tempfile
from types import TracebackType

import numpy as np

from mesh_transformer import storage

ROW = np.dtype([("start", "<u8"), ("length", "<u8"), ("prompt", "<u8")])  # in tokens
_BUFFER = 1 << 20  # bytes
_ROWS_AT_ONCE = 4096


class Spool:
    """Documents of token ids, appended once and then read at random."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self.tokens = 0  # all that were added
        self.documents = 0
        self.empty_documents = 0
        self._folder = folder
        self._length = self._prompt = 0  # of the document that is being added
        self._waiting: list[bytes] = []  # tokens that are not in the file yet
        self._waiting_bytes = 0
        self._pending: list[tuple[int, int, int]] = []
        with storage.errors(folder, "make a temporary file in"):
            self._file = tempfile.TemporaryFile(dir=folder)
            self._rows = tempfile.TemporaryFile(dir=folder)

    def add(self, ids: np.ndarray, prompt: bool) -> None:
        """Append ids to the current document; its prompt, if any, comes first."""
        content = ids.astype(self.dtype).tobytes()
        self._waiting.append(content)
        self._waiting_bytes += len(content)
        if self._waiting_bytes >= _BUFFER:
            self._write_tokens()
        self._length += len(ids)
        self._prompt += len(ids) if prompt else 0

    def end_document(self, eot_id: int) -> None:
        """Close the current document with the end-of-text token; one without any token is only counted."""
        if self._length == 0:
            self.empty_documents += 1
            return
        self.add(np.array([eot_id]), prompt=False)
        self._pending.append((self.tokens, self._length, self._prompt))
        self.tokens += self._length
        self.documents += 1
        self._length = self._prompt = 0
        if len(self._pending) >= _ROWS_AT_ONCE:
            self._write_rows()

    def finish(self) -> None:
        """After the last document, before reading."""
        self._write_tokens()
        self._write_rows()

    def rows(self, documents: np.ndarray) -> np.ndarray:
        """ROW [N] of documents by their numbers, int64 [N]."""
        if not self.documents:
            return np.zeros(0, ROW)
        table = np.memmap(self._rows, dtype=ROW, mode="r", shape=(self.documents,))
        return np.asarray(table[documents])

    def read(self, start: int, count: int) -> np.ndarray:
        """Token ids [count] from a position in the whole corpus on."""
        size = self.dtype.itemsize
        content = os.pread(self._file.fileno(), count * size, start * size)
        return np.frombuffer(content, dtype=self.dtype)

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()
        self._rows.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_tokens(self) -> None:
        with storage.errors(self._folder, "write temporary files in"):
            self._file.write(b"".join(self._waiting))
            self._file.flush()
        self._waiting, self._waiting_bytes = [], 0

    def _write_rows(self) -> None:
        with storage.errors(self._folder, "write temporary files in"):
            self._rows.write(np.array(self._pending, dtype=ROW).tobytes())
            self._rows.flush()
        self._pending = []
