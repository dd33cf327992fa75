"""The safetensors format, written and read in pieces, so that no file is ever held whole and no torch is needed.

A file is the length of its header (8 bytes, little endian), the header (JSON: name -> dtype, shape and place), then
the tensors' bytes, one after the other. An index names the file of each tensor where there are several.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.npz import BFLOAT16, CHUNK, Header

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGN = 8
_LONGEST_HEADER = 100_000_000  # bytes; what the format's own library accepts


class _Place(NamedTuple):
    header: Header
    start: int  # first byte in the file


def byte_size(header: Header) -> int:
    """Bytes of a tensor."""
    return header.dtype.itemsize * math.prod(header.shape)


def write(
    path: str,
    tensors: Mapping[str, Header],
    pieces: Callable[[str], Iterable[np.ndarray]],
    metadata: Mapping[str, str],
) -> None:
    """Write one file front to back; `pieces(name)` gives a tensor's consecutive rows in C order, in its dtype.

    Durable when it returns. Raises StorageError naming the file.
    """
    body: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, header in tensors.items():
        end = at + byte_size(header)
        body[name] = {"dtype": _NAMES[header.dtype], "shape": list(header.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    file = storage.open_file(path, "wb")
    with storage.errors(path, "write"), file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, header in tensors.items():
            written = 0
            for piece in pieces(name):
                written += file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            if written != byte_size(header):
                raise ValueError(f"{name}: {written} bytes were given, expected {byte_size(header)}")
        storage.sync(file)


class SafetensorsReader:
    """Tensors of one file by name. All damage is DamagedError naming the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = storage.open_file(path, "rb")
        try:
            with storage.errors(path, "read"):
                self._places, self.metadata = self._read_header(self._file.seek(0, os.SEEK_END))
        except BaseException:
            self._file.close()
            raise

    @property
    def headers(self) -> dict[str, Header]:
        """Shape and dtype of every tensor."""
        return {name: place.header for name, place in self._places.items()}

    def read(self, name: str) -> np.ndarray:
        """A whole tensor, read into an array of its own."""
        header, start = self._places[name]
        out = np.empty(header.shape, header.dtype)
        flat = out.reshape(-1).view(np.uint8)
        with storage.errors(self.path, "read"):
            self._file.seek(start)
            for at in range(0, flat.size, CHUNK):
                part = flat[at : at + CHUNK]
                part[:] = self._take(part.size, name)
        return out

    def close(self) -> None:
        self._file.close()

    def _take(self, count: int, what: str) -> np.ndarray:
        content = self._file.read(count)
        if len(content) != count:
            raise DamagedError(f"{self.path} is truncated in {what}; copy it again")
        return np.frombuffer(content, np.uint8)

    def _read_header(self, size: int) -> tuple[dict[str, _Place], dict[str, str]]:
        self._file.seek(0)
        length = int.from_bytes(self._take(8, "the length of its header").tobytes(), "little")
        if length > min(_LONGEST_HEADER, size):
            raise DamagedError(f"{self.path} is not a safetensors file, or is truncated: its header has {length} bytes")
        try:
            body = json.loads(self._take(length, "its header").tobytes())
            metadata = body.pop("__metadata__", {})
            places = {name: self._place(name, entry, 8 + length, size) for name, entry in body.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DamagedError):
                raise
            raise DamagedError(f"{self.path}: its header is corrupt ({error!r}); copy it again") from error
        return places, metadata

    def _place(self, name: str, entry: Mapping[str, Any], base: int, size: int) -> _Place:
        if entry["dtype"] not in _DTYPES:
            # Buffers and counters of other types are skipped by those who want none of them.
            return _Place(Header(tuple(entry["shape"]), np.dtype(np.void)), 0)
        header = Header(tuple(int(n) for n in entry["shape"]), _DTYPES[entry["dtype"]])
        start, end = (int(n) for n in entry["data_offsets"])
        if start < 0 or end - start != byte_size(header):
            raise DamagedError(f"{self.path}: {name} has {end - start} bytes, expected {byte_size(header)}")
        if base + end > size:
            raise DamagedError(
                f"{self.path} is truncated: {size} bytes, and {name} ends at {base + end}; copy it again"
            )
        return _Place(header, base + start)


def split(tensors: Mapping[str, Header], limit: int) -> list[dict[str, Header]]:
    """The tensors in order, in runs of at most `limit` bytes; a larger tensor is a run of its own."""
    out: list[dict[str, Header]] = []
    room = -1
    for name, header in tensors.items():
        size = byte_size(header)
        if size > room:
            out.append({})
            room = limit
        out[-1][name] = header
        room -= size
    return out


def file_names(count: int) -> list[str]:
    """The names that Hugging Face gives to `count` files of weights."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


INDEX = "model.safetensors.index.json"


def index(files: Mapping[str, Sequence[str]], total: int, metadata: Mapping[str, str]) -> bytes:
    """The index that names the file of every tensor; `total` bytes in all."""
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    body = {"metadata": {"total_size": total, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(body, indent=2).encode()
