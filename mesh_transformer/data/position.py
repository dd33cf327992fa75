"""Where in the data a run stands: counted in records, so that it means the same at any batch size and mesh.

As JSON it also has the two keys of the 2021 library, `used` and `file_idx`, and one in that library's form alone is
understood.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mesh_transformer import storage
from mesh_transformer.data.record_set import RecordSet
from mesh_transformer.errors import DataError

_REMEDY = "put the old data back, or start again at its beginning (--reset-data)"


@dataclass(frozen=True)
class Position:
    """The record that comes next."""

    records: int = 0  # consumed since the run began, over all epochs
    epoch: int = 0
    epoch_records: int = 0  # consumed in this epoch
    # Only in the files' own order: which file, how many of its records, and the byte offset after them.
    file: int = 0
    file_records: int = 0
    offset: int = 0

    def next_epoch(self) -> Position:
        """The start of the epoch after this one."""
        return Position(records=self.records, epoch=self.epoch + 1)

    def next_file(self) -> Position:
        """The start of the file after this one."""
        return replace(self, file=self.file + 1, file_records=0, offset=0)

    def after_record(self, offset: int | None) -> Position:
        """One record on; `offset` is where the next one starts, None in shuffled order."""
        in_file = {} if offset is None else {"file_records": self.file_records + 1, "offset": offset}
        return replace(self, records=self.records + 1, epoch_records=self.epoch_records + 1, **in_file)


def to_json(position: Position, records: RecordSet, shuffle_seed: int | None, batch: int) -> dict[str, Any]:
    """What a checkpoint keeps; `batch` is the number of records in a step (only `file_idx` depends on it)."""
    in_order = shuffle_seed is None
    consumed = position.file_records if in_order else position.epoch_records
    return {
        "records": position.records,
        "epoch": position.epoch,
        "epoch_records": position.epoch_records,
        "file": position.file,
        "file_records": position.file_records,
        "offset": position.offset,
        "shuffle_seed": shuffle_seed,
        "fingerprint": records.fingerprint,
        "tokenizer_hash": records.tokenizer_hash,
        # The 2021 library: finished files, and the index of the last batch read of the current one.
        "used": [file.path for file in records.files[: position.file]],
        "file_idx": max(consumed // batch - 1, 0),
    }


def from_json(content: dict[str, Any], records: RecordSet, shuffle_seed: int | None, batch: int) -> Position:
    """The position that a checkpoint kept. Raises DataError if the data or their order are not the same as then."""
    if "records" not in content:
        return _from_2021(content, records, shuffle_seed, batch)
    fields = ("records", "epoch", "epoch_records", "file", "file_records", "offset")
    values = {name: content.get(name, 0) for name in fields}
    wrong = [name for name, value in values.items() if type(value) is not int or value < 0]
    if wrong:
        raise DataError(f"data position: {wrong[0]} is {values[wrong[0]]!r}, expected a whole number from 0; {_REMEDY}")
    found = content.get("fingerprint")
    if found is not None and found != records.fingerprint:
        raise DataError(
            f"{records.index_path}: its files are not those that the run was reading (fingerprint "
            f"{records.fingerprint}, expected {found}), so record {values['records']} means another place; {_REMEDY}"
        )
    if content.get("shuffle_seed") != shuffle_seed:
        raise DataError(
            f"data order: {_order(shuffle_seed)}, but the run was reading {_order(content.get('shuffle_seed'))}; "
            f"set `shuffle` and `seed` back, or start again at the beginning of the data (--reset-data)"
        )
    if shuffle_seed is None and "offset" not in content:
        return _in_files(records, values["records"], values["epoch"], values["epoch_records"])
    return Position(**values)


def at_beginning(content: dict[str, Any]) -> Position:
    """The beginning of the data, for a run that has consumed what a checkpoint says."""
    records = content.get("records")
    return Position(records=records if type(records) is int and records > 0 else 0)


def _in_files(records: RecordSet, consumed: int, epoch: int, epoch_records: int) -> Position:
    """The position after so many records of an epoch, found by the offsets of the files."""
    starts = records.starts
    if epoch_records > starts[-1]:
        raise DataError(
            f"data position: record {epoch_records} of {int(starts[-1])} in {records.index_path}; {_REMEDY}"
        )
    number = max(i for i in range(len(records.files)) if starts[i] <= epoch_records)
    in_file = epoch_records - int(starts[number])
    offset = int(records.files[number].offsets[in_file])
    return Position(consumed, epoch, epoch_records, number, in_file, offset)


def _from_2021(content: dict[str, Any], records: RecordSet, shuffle_seed: int | None, batch: int) -> Position:
    """That library skipped the files in `used`, then the batches up to `file_idx`, and counted nothing else."""
    used, file_idx = content.get("used"), content.get("file_idx")
    if not isinstance(used, list) or type(file_idx) is not int or shuffle_seed is not None:
        raise DataError(
            f"data position {content!r}: expected `records`, or `used` and `file_idx` unshuffled; {_REMEDY}"
        )
    names = [storage.name(file.path) for file in records.files]
    unknown = [path for path in used if storage.name(path) not in names]
    if unknown:
        raise DataError(f"{records.index_path}: {unknown[0]}, which the run has read, is not in it; {_REMEDY}")
    finished = {storage.name(path) for path in used}
    number = next((i for i, name in enumerate(names) if name not in finished), None)
    if number is None:
        return Position(epoch=1)
    before = int(records.starts[number])
    consumed = before + min((file_idx + 1) * batch, records.files[number].count)
    return _in_files(records, consumed, 0, consumed)


def _order(shuffle_seed: int | None) -> str:
    return "in the files' own order" if shuffle_seed is None else f"shuffled by seed {shuffle_seed}"
