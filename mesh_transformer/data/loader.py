"""The loader that training and validation read: batches of token ids from record files, stoppable at any record.

Batches run across file boundaries; what is left at the end of an epoch and does not fill a batch is dropped, and
logged. A position costs no replay: the loader seeks to the record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mesh_transformer.data import position as positions
from mesh_transformer.data.permutation import Permutation
from mesh_transformer.data.position import Position
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.record_set import RecordSet, Row
from mesh_transformer.errors import DataError

_LOG = logging.getLogger(__name__)
Batch = dict[str, np.ndarray]


class RecordLoader:
    """Iterator of {"obs": int32 [*batch, S], "target": int32 [*batch, S]}, and "mask": float32 if records have one.

    `batch` is (A, B) in training, (B,) in validation. The record's first S tokens are `obs`, its last S `target`; the
    mask belongs to the targets. With `shuffle`, each epoch has its own order by `seed`; `epochs` None is endless.
    Opening checks all files (see RecordSet); a fault further in is raised at `next`, as a DataError.
    """

    def __init__(
        self,
        index_path: str,
        batch: Sequence[int],
        seq: int,
        n_vocab: int,
        position: dict[str, Any] | None = None,
        shuffle: bool = False,
        seed: int = 42,
        epochs: int | None = None,
        reset_data: bool = False,
        prefetch: int = 4,
    ) -> None:
        self.batch = tuple(batch)
        self.epochs = epochs
        self.records = RecordSet(str(index_path), seq, n_vocab)
        self._shuffle_seed = seed if shuffle else None
        self._depth = prefetch
        self._position = Position()
        self._require(self.records.known_count)
        if position is not None and not reset_data:
            self._position = positions.from_json(position, self.records, self._shuffle_seed, self.batch_records)
        self._start = self._position
        self._ahead = Prefetch(self._batches(self._start), prefetch)

    @property
    def batch_records(self) -> int:
        """Records in one batch."""
        return int(np.prod(self.batch))

    @property
    def position(self) -> dict[str, Any]:
        """After the last batch that was handed out, for a checkpoint's JSON; what was read ahead does not count."""
        return positions.to_json(self._position, self.records, self._shuffle_seed, self.batch_records)

    @property
    def records_consumed(self) -> int:
        """Records handed out since the run began, over all epochs and resumes."""
        return self._position.records

    @property
    def fingerprint(self) -> str:
        """Tells whether two data sets are the same."""
        return self.records.fingerprint

    @property
    def has_mask(self) -> bool:
        """Whether batches have a mask."""
        return self.records.has_mask

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in an epoch; reads the frames of files that have no description beside them."""
        return self.records.count // self.batch_records

    def __iter__(self) -> RecordLoader:
        return self

    def __next__(self) -> Batch:
        """The next batch. Raises StopIteration after `epochs`, DataError for a record that is not as it should be."""
        batch, self._position = next(self._ahead)
        return batch

    def rewind(self) -> None:
        """Go back to where this loader started."""
        self._ahead.close()
        self._position = self._start
        self._ahead = Prefetch(self._batches(self._start), self._depth)

    def close(self) -> None:
        """Stop reading ahead and close the files."""
        self._ahead.close()
        self.records.close()

    def __enter__(self) -> RecordLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require(self, count: int | None) -> None:
        if count is not None and count < self.batch_records:
            raise DataError(
                f"{self.records.index_path}: {count} records do not fill one batch of {self.batch_records} "
                f"({' x '.join(map(str, self.batch))}); use more data, or a smaller batch "
                f"(per_replica_batch, gradient_accumulation_steps, val_batch_multiplier)"
            )

    def _batches(self, at: Position) -> Iterator[tuple[Batch, Position]]:
        while self.epochs is None or at.epoch < self.epochs:
            whole_epoch = at.epoch_records == 0
            rows: list[Row] = []
            for row, after in self._epoch(at):
                rows.append(row)
                if len(rows) == self.batch_records:
                    at = after
                    yield self._assemble(rows), at
                    rows = []
            if whole_epoch and at.epoch_records == 0:
                self._require(len(rows))
            if rows:
                _LOG.info("end of epoch %d: %d records did not fill a batch and were left out", at.epoch, len(rows))
            at = at.next_epoch()

    def _epoch(self, at: Position) -> Iterator[tuple[Row, Position]]:
        """The rest of an epoch's records, each with the position after it."""
        if self._shuffle_seed is not None:
            order = Permutation(self.records.count, self._shuffle_seed, at.epoch)
            for number in range(at.epoch_records, order.n):
                at = at.after_record(None)
                yield self.records.row(int(order(np.array([number]))[0])), at
            return
        while at.file < len(self.records.files):
            for offset, row in self.records.rows_from(at.file, at.offset, at.file_records):
                at = at.after_record(offset)
                yield row, at
            at = at.next_file()

    def _assemble(self, rows: list[Row]) -> Batch:
        seq = self.records.seq
        tokens = np.stack([row.tokens for row in rows]).reshape(*self.batch, seq + 1)
        batch = {"obs": np.ascontiguousarray(tokens[..., :-1]), "target": np.ascontiguousarray(tokens[..., 1:])}
        if self.has_mask:
            ones = np.ones(seq + 1, np.float32)
            masks = np.stack([ones if row.mask is None else row.mask for row in rows])
            batch["mask"] = np.ascontiguousarray(masks.reshape(*self.batch, seq + 1)[..., 1:])
        return batch
