"""Number of training sequences behind an index file, without reading a record; for the config report only.

Each record file has a sidecar, `FILE.json` or FILE with its ending replaced by `.json`, with `{"records": n}`.
"""

from __future__ import annotations

import json

from mesh_transformer import storage
from mesh_transformer.errors import MeshTransformerError


def count_records(index_path: str) -> int | None:
    """Sum of the sidecars' counts, or None where the index or a sidecar cannot be read."""
    try:
        lines = _text(index_path).splitlines()
        entries = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        folder = index_path.rpartition("/")[0] or "."
        return sum(_records_of(storage.join(folder, entry)) for entry in entries)
    except (MeshTransformerError, OSError, KeyError, TypeError, ValueError):
        # The report is often read before the data is there; it then says that epochs are not known.
        return None


def _records_of(path: str) -> int:
    sidecar = path + ".json"
    if not storage.exists(sidecar):
        sidecar = path.rpartition(".")[0] + ".json"
    records = json.loads(_text(sidecar))["records"]
    if not isinstance(records, int) or records < 0:
        raise ValueError(f"{sidecar}: records is {records!r}, not a count")
    return records


def _text(path: str) -> str:
    with storage.open_file(path, "rb") as file:
        return file.read().decode("utf-8-sig")
