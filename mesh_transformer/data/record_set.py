"""A data set: the record files of an index, checked against the config, read in order or at random."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from mesh_transformer import storage
from mesh_transformer.data import sidecar
from mesh_transformer.data.index import read_index
from mesh_transformer.data.records import RecordFile
from mesh_transformer.errors import DataError

_LOG = logging.getLogger(__name__)
_CHECKERS = 16  # threads; what they wait for is the network
_OPEN_FILES = 256  # at once, when read at random; well below what a process may have
TOKENS, MASK = "text", "mask"


@dataclass(frozen=True)
class Row:
    """One record: tokens int32 [S+1], and float32 [S+1] of 0 where a token is not to be learned, if it has a mask."""

    tokens: np.ndarray
    mask: np.ndarray | None


@dataclass(frozen=True)
class _Facts:
    """What the first look at a record file found."""

    size: int
    first_crc: int | None  # of the first record; None when the file is empty
    has_mask: bool
    description: dict[str, Any] | None


class RecordSet:
    """The record files that an index lists, for one sequence length and vocabulary.

    Opening looks at the first record of every file and at the JSON beside it, and raises DataError for what does not
    fit: missing files, other lengths, ids at or above n_vocab, files that are not record files.
    """

    def __init__(self, index_path: str, seq: int, n_vocab: int) -> None:
        self.index_path = index_path
        self.seq = seq
        self.n_vocab = n_vocab
        self.files = [RecordFile(path) for path in read_index(index_path)]
        with ThreadPoolExecutor(_CHECKERS) as pool:
            paths = list(dict.fromkeys(file.path for file in self.files))
            missing = [path for path, there in zip(paths, pool.map(storage.exists, paths), strict=True) if not there]
            if missing:
                raise DataError(f"{index_path}: lists {len(missing)} files that do not exist: {_some(missing)}")
            self._facts = list(pool.map(self._first_look, self.files))
        if all(facts.first_crc is None for facts in self._facts):
            raise DataError(f"{index_path}: none of its {len(self.files)} files has a record")
        if len({facts.description.get("tokenizer_hash") for facts in self._facts if facts.description}) > 1:
            _LOG.warning(
                "%s: its files were made with different tokenizers, by the descriptions beside them", index_path
            )
        self._open: dict[RecordFile, None] = {}  # read at random; the one used longest ago comes first
        self.has_mask = any(facts.has_mask for facts in self._facts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells whether two data sets are the same: names, sizes and first records, in order; not the folder."""
        lines = [
            f"{storage.name(file.path)} {facts.size} {facts.first_crc}"
            for file, facts in zip(self.files, self._facts, strict=True)
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """int64 [files + 1]: the number of the first record of each file, then the number of records in all."""
        return np.concatenate([[0], np.cumsum([file.count for file in self.files])]).astype(np.int64)

    @property
    def known_count(self) -> int | None:
        """Records in all, if the files' descriptions say so; None where only counting would tell."""
        counts = [facts.description.get("records") if facts.description else None for facts in self._facts]
        return sum(count for count in counts if count is not None) if all(type(n) is int for n in counts) else None

    @property
    def count(self) -> int:
        """Records in all; reads the frames of files that have no description."""
        known = self.known_count
        return int(self.starts[-1]) if known is None else known

    @property
    def records_read(self) -> int:
        """How many records' content was read so far."""
        return sum(file.records_read for file in self.files)

    @property
    def tokenizer_hash(self) -> str | None:
        """The tokenizer that the files say they were made with; None where they do not say, or differ."""
        hashes = {facts.description.get("tokenizer_hash") for facts in self._facts if facts.description}
        return str(hashes.pop()) if len(hashes) == 1 and None not in hashes else None

    def rows_from(self, file_number: int, offset: int, number: int) -> Iterator[tuple[int, Row]]:
        """(offset after it, row) for each record of one file, from a byte offset on; `number` is the first's."""
        file = self.files[file_number]
        before = offset
        for after, features in file.records_from(offset, number):
            yield after, self._row(file, number, before, features, self._facts[file_number].has_mask)
            before, number = after, number + 1
        file.close()

    def row(self, record: int) -> Row:
        """One record by its number in the whole set."""
        file_number = int(np.searchsorted(self.starts, record, side="right")) - 1
        file = self.files[file_number]
        self._make_room(file)
        number = record - int(self.starts[file_number])
        has_mask = self._facts[file_number].has_mask
        return self._row(file, number, int(file.offsets[number]), file.record(number), has_mask)

    def _make_room(self, file: RecordFile) -> None:
        """Note that a file is about to be read at random, and close another if many are open; copies stay."""
        self._open.pop(file, None)
        self._open[file] = None
        while len(self._open) > _OPEN_FILES:
            oldest = next(iter(self._open))
            del self._open[oldest]
            if not oldest.costly:
                oldest.close()

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()

    def _first_look(self, file: RecordFile) -> _Facts:
        size = file.stored_size()
        description = sidecar.read(file.path, size)
        if description is not None:
            self._check_description(file, description)
        first = file.first()
        if first is None:
            _LOG.warning("%s has no record", file.path)
            return _Facts(size, None, False, description)
        content, features = first
        self._row(file, 0, 0, features, MASK in features)
        return _Facts(size, google_crc32c.value(content), MASK in features, description)

    def _check_description(self, file: RecordFile, description: dict[str, Any]) -> None:
        seq, largest = description.get("seq"), description.get("max_id")
        if type(seq) is int and seq != self.seq:
            raise DataError(
                f"{file.path}: its records hold {seq + 1} tokens (made with seq {seq}), expected {self.seq + 1} "
                f"for the config's seq {self.seq}; make the records again with --seq {self.seq}, or change seq"
            )
        if type(largest) is int and largest >= self.n_vocab:
            raise DataError(
                f"{file.path}: its largest token id is {largest}, but n_vocab is {self.n_vocab}; "
                f"raise n_vocab above it, or use the tokenizer that the model was made for"
            )

    def _row(
        self, file: RecordFile, number: int, offset: int, features: dict[str, np.ndarray], mask_expected: bool
    ) -> Row:
        tokens = features.get(TOKENS)
        if tokens is None or tokens.dtype.kind != "i":
            found = ", ".join(f"{name} {values.dtype}" for name, values in sorted(features.items())) or "none"
            raise DataError(
                f"{file.where(number, offset)} has no integer feature `{TOKENS}` (features: {found}); "
                f"make the records with create_finetune_tfrecords.py"
            )
        if len(tokens) != self.seq + 1:
            raise DataError(
                f"{file.where(number, offset)} holds {len(tokens)} tokens, expected {self.seq + 1} "
                f"(seq {self.seq} + 1); make the records with --seq {self.seq}, or change seq"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.n_vocab:
            at = int(np.flatnonzero((tokens < 0) | (tokens >= self.n_vocab))[0])
            raise DataError(
                f"{file.where(number, offset)} has token id {int(tokens[at])} at position {at}, expected 0 to "
                f"{self.n_vocab - 1} (n_vocab {self.n_vocab}); raise n_vocab, or use the model's tokenizer"
            )
        return Row(tokens.astype(np.int32), self._mask(file, number, offset, features, mask_expected))

    def _mask(
        self, file: RecordFile, number: int, offset: int, features: dict[str, np.ndarray], expected: bool
    ) -> np.ndarray | None:
        mask = features.get(MASK)
        if (mask is not None) != expected:
            have = "has a mask, but the first record of its file has none" if mask is not None else "has no mask"
            raise DataError(f"{file.where(number, offset)} {have}; a file's records either all have one or none has")
        if mask is not None and len(mask) != self.seq + 1:
            raise DataError(
                f"{file.where(number, offset)} has a mask of {len(mask)} numbers for {self.seq + 1} tokens; "
                f"expected one for each"
            )
        return None if mask is None else mask.astype(np.float32)


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
