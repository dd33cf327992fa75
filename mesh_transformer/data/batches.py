"""Batches out of a record set: the stream that a loader's thread runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mesh_transformer.data.permutation import Permutation
from mesh_transformer.data.position import Position
from mesh_transformer.data.record_set import RecordSet, Row
from mesh_transformer.errors import DataError

_LOG = logging.getLogger(__name__)
Batch = dict[str, np.ndarray]
_AT_ONCE = 1024  # records whose places in the shuffled order are computed together


@dataclass(frozen=True)
class BatchStream:
    """How records become batches. `batch`: their leading axes; `shuffle_seed` None: in the files' own order.

    It knows nothing of the loader, so that a thread which runs it does not keep a forgotten loader alive.
    """

    records: RecordSet
    batch: tuple[int, ...]
    epochs: int | None
    shuffle_seed: int | None

    @property
    def size(self) -> int:
        """Records in one batch."""
        return int(np.prod(self.batch))

    def require(self, count: int | None) -> None:
        """Refuse a set that does not fill one batch; None: not known yet."""
        if count is not None and count < self.size:
            raise DataError(
                f"{self.records.index_path}: {count} records do not fill one batch of {self.size} "
                f"({' x '.join(map(str, self.batch))}); use more data, or a smaller batch "
                f"(per_replica_batch, gradient_accumulation_steps, val_batch_multiplier)"
            )

    def batches_from(self, at: Position) -> Iterator[tuple[Batch, Position]]:
        """Each batch from a position on, with the position after it.

        A batch that an epoch's end leaves unfilled is filled from the next; only behind the last epoch is it dropped.
        """
        rows: list[Row] = []
        while self.epochs is None or at.epoch < self.epochs:
            begun_here = at.epoch_records == 0
            for row, after in self._epoch(at):
                at = after
                rows.append(row)
                if len(rows) == self.size:
                    yield self._assemble(rows), at
                    rows = []
            if begun_here:
                self.require(at.epoch_records)
            at = at.next_epoch()
        if rows:
            _LOG.info("end of epoch %d: %d records did not fill a batch and were left out", at.epoch - 1, len(rows))

    def _epoch(self, at: Position) -> Iterator[tuple[Row, Position]]:
        """The rest of an epoch's records, each with the position after it."""
        if self.shuffle_seed is not None:
            order = Permutation(self.records.count, self.shuffle_seed, at.epoch)
            for first in range(at.epoch_records, order.n, _AT_ONCE):
                for record in order(np.arange(first, min(first + _AT_ONCE, order.n))).tolist():
                    at = at.after_record(None)
                    yield self.records.row(record), at
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
        if self.records.has_mask:
            ones = np.ones(seq + 1, np.float32)
            masks = np.stack([ones if row.mask is None else row.mask for row in rows])
            batch["mask"] = np.ascontiguousarray(masks.reshape(*self.batch, seq + 1)[..., 1:])
        return batch
