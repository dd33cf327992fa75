"""The data sets of a run: checked before devices start, then opened as training batches and as validation sets."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.data.index import read_index
from mesh_transformer.data.loader import RecordLoader
from mesh_transformer.data.record_set import RecordSet
from mesh_transformer.data.records import RecordFile
from mesh_transformer.training.executor import Batch
from mesh_transformer.training.validation import Validation

logger = logging.getLogger(__name__)


def check_data(config: Config) -> RecordSet:
    """Looks at every file of train_set and val_set and at its first record; returns the training records.

    Raises DataError for what is missing or does not fit seq and n_vocab.
    """
    records = RecordSet(config.data.train_path, config.model.seq, config.model.n_vocab)
    for path in config.data.val_paths.values():
        if not _is_empty(path):
            RecordSet(path, config.model.seq, config.model.n_vocab).close()
    return records


def _is_empty(index_path: str) -> bool:
    """Whether no file of an index has a record: such a validation set is left out, not refused."""

    def has_record(path: str) -> bool:
        file = RecordFile(path)
        try:
            return file.first() is not None
        finally:
            file.close()

    return not any(has_record(path) for path in read_index(index_path))


def open_training(
    config: Config, dp: int, position: Mapping[str, Any] | None, reset_data: bool = False
) -> RecordLoader:
    """Training batches [A, B, S] from `position` on, without end, read ahead by a thread.

    `reset_data`: from the beginning of the data, whichever they are; of `position` only the count of records is kept.
    """
    mesh = config.mesh
    return RecordLoader(
        config.data.train_path,
        (mesh.gradient_accumulation_steps, mesh.per_replica_batch * dp),
        config.model.seq,
        config.model.n_vocab,
        position=dict(position) if position is not None else None,
        shuffle=config.data.shuffle,
        seed=config.run.seed,
        reset_data=reset_data,
    )


class ValidationSet:
    """The first `batches` batches of a validation set, from its start each time it is called.

    Batches have `rows` sequences; the last one of a small set is filled up with copies of its last sequence, so that
    every batch has the shape that was compiled, and "real" [B] says which rows count. The files stay open in between.
    """

    def __init__(self, config: Config, index_path: str, rows: int) -> None:
        self._config, self._path, self._rows = config, index_path, rows
        self._batches = config.data.val_batches
        self._loader: RecordLoader | None = None

    def __call__(self) -> Iterator[Batch]:
        if self._batches == 0:
            return
        model = self._config.model
        if self._loader is None:
            if _is_empty(self._path):
                return
            self._loader = RecordLoader(self._path, (1,), model.seq, model.n_vocab, epochs=1, prefetch=2 * self._rows)
        else:
            self._loader.rewind()
        for _ in range(self._batches):
            rows = list(itertools.islice(self._loader, self._rows))
            if rows:
                yield self._batch(rows)
            if len(rows) < self._rows:
                return

    def _batch(self, rows: list[dict[str, np.ndarray]]) -> Batch:
        missing = self._rows - len(rows)
        padded = rows + rows[-1:] * missing
        batch = {name: np.concatenate([row[name] for row in padded]) for name in rows[0]}
        batch["real"] = np.repeat([1.0, 0.0], [len(rows), missing]).astype(np.float32)
        return batch

    def close(self) -> None:
        """Close the files."""
        if self._loader is not None:
            self._loader.close()


def open_validation(config: Config, dp: int, on_close: Callable[[Callable[[], None]], Any]) -> Validation | None:
    """The validation sets of `config`, or None where there are none; `on_close` is told how to close each."""
    rows = config.mesh.per_replica_batch * dp * config.data.val_batch_multiplier
    sets = {name: ValidationSet(config, path, rows) for name, path in config.data.val_paths.items()}
    for opened in sets.values():
        on_close(opened.close)
    return Validation(sets) if sets else None
