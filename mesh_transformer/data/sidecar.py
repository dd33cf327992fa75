"""The JSON file beside a record file (`NAME.tfrecords.json`) that says what is in it and where it came from."""

from __future__ import annotations

import json
import logging
from typing import Any

from mesh_transformer import storage

_LOG = logging.getLogger(__name__)
SUFFIX = ".json"


def read(path: str, size: int) -> dict[str, Any] | None:
    """The description of a record file of `size` bytes; None when there is none, or it is of another version of it."""
    name = path + SUFFIX
    if not storage.exists(name):
        return None
    try:
        content = json.loads(storage.read_bytes(name))
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("bytes") != size:
        _LOG.warning("%s does not describe the record file beside it (%d bytes); left out of account", name, size)
        return None
    return content


def write(path: str, content: dict[str, Any]) -> None:
    """Write the description of a record file."""
    storage.write_atomic(path + SUFFIX, (json.dumps(content, indent=2) + "\n").encode())
