"""The loader that training and validation read: batches of token ids from record files, stoppable at any record.

Batches run across the ends of files and of epochs, so that every record is used equally often; what does not fill a
batch at the end of the last epoch is dropped, and logged. A position costs no replay: the loader seeks to the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from mesh_transformer.data import position as positions
from mesh_transformer.data.batches import Batch, BatchStream
from mesh_transformer.data.position import Position
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.record_set import RecordSet


class RecordLoader:
    """Iterator of {"obs": int32 [*batch, S], "target": int32 [*batch, S]}, and "mask": float32 if records have one.

    `batch` is (A, B) in training, (B,) in validation. The record's first S tokens are `obs`, its last S `target`; the
    mask belongs to the targets. With `shuffle`, each epoch has its own order by `seed`; `epochs` None is endless.
    `position` continues where a loader left off; with `reset_data` only its count of records is kept.
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
        self.records = RecordSet(str(index_path), seq, n_vocab)
        self._stream = BatchStream(self.records, tuple(batch), epochs, seed if shuffle else None)
        self._stream.require(self.records.known_count)
        self._start = Position()
        if position is not None and reset_data:
            self._start = positions.at_beginning(position)
        elif position is not None:
            self._start = positions.from_json(position, self.records, self._stream.shuffle_seed, self.batch_records)
        self._position = self._start
        self._depth = prefetch
        self._ahead = Prefetch(self._stream.batches_from(self._start), prefetch)

    @property
    def batch_records(self) -> int:
        """Records in one batch."""
        return self._stream.size

    @property
    def position(self) -> dict[str, Any]:
        """After the last batch that was handed out, for a checkpoint's JSON; what was read ahead does not count."""
        return positions.to_json(self._position, self.records, self._stream.shuffle_seed, self.batch_records)

    @property
    def records_consumed(self) -> int:
        """Records handed out since the run began, over all epochs and resumes."""
        return self._position.records

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
        self._ahead = Prefetch(self._stream.batches_from(self._start), self._depth)

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
