"""Number of sequences behind an index file, from the descriptions beside its record files; reads no record."""

from __future__ import annotations

from mesh_transformer import storage
from mesh_transformer.errors import MeshTransformerError


def count_records(index_path: str) -> int | None:
    """Sum of the record files' counts; None where the index, a record file or its description is not there.

    Not finding them is no error here: a config is often looked at before its data exists.
    """
    from mesh_transformer.data import sidecar
    from mesh_transformer.data.index import read_index

    total = 0
    try:
        for path in read_index(index_path):
            description = sidecar.read(path, storage.size(path)) or {}
            if type(description.get("records")) is not int:
                return None
            total += description["records"]
    except MeshTransformerError:
        return None
    return total
