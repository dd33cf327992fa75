"""Index files: the list of record files that make up a data set, one path a line.

Blank lines and lines that start with `#` are left out; Windows line ends and a byte-order mark do no harm. A line is
an absolute path, a URL, or relative to the folder of the index file. A line that occurs twice counts twice.
"""

from __future__ import annotations

import logging
from collections import Counter

from mesh_transformer import storage
from mesh_transformer.errors import DataError

_LOG = logging.getLogger(__name__)


def read_index(path: str) -> list[str]:
    """The record files that an index file lists, in order. Raises DataError when there are none, or it is no index."""
    if not storage.exists(path):
        raise DataError(
            f"{path}: no such index file; expected a text file with one record file a line "
            f"(create_finetune_tfrecords.py --index writes it)"
        )
    try:
        text = storage.read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not text (byte {error.start}); expected an index file, one path a line. If it is a record "
            f"file, write its path into an index file"
        ) from error
    lines = [line.strip() for line in text.splitlines()]
    entries = [line for line in lines if line and not line.startswith("#")]
    if not entries:
        raise DataError(f"{path}: lists no record file; expected one path a line")
    if "\0" in text:
        raise DataError(f"{path}: is not text; expected an index file, one path a line")
    repeated = [entry for entry, times in Counter(entries).items() if times > 1]
    if repeated:
        _LOG.warning("%s lists %s more than once: read that often in every epoch", path, ", ".join(repeated))
    folder = storage.parent(path)
    return [storage.join(folder, entry) for entry in entries]


def write_index(path: str, entries: list[str], comment: str) -> None:
    """Write an index file of entries as given."""
    lines = [f"# {comment}", *entries]
    storage.write_atomic(path, ("\n".join(lines) + "\n").encode())
