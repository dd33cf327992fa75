"""Record files: the framing of TensorFlow's TFRecord, without TensorFlow.

A record is: length (8 bytes, little-endian), masked CRC-32C of those 8 bytes (4), content (`length` bytes), masked
CRC-32C of the content (4). Files may be compressed as a whole (gzip, zlib, zstandard); which one is seen from the
first bytes, never from the name. Everything that is wrong is a DataError naming the file and the byte offset.
"""

from __future__ import annotations

import io
import os
import shutil
import struct
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, cast

import google_crc32c
import numpy as np

from mesh_transformer import storage
from mesh_transformer.data import compression, example
from mesh_transformer.errors import DataError

HEADER_BYTES = 12
FRAME_BYTES = 16  # what a record takes beyond its content
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_BUFFER = 1 << 20  # bytes
_OFFSETS_MAGIC = b"mtoffs01"  # 8 bytes, then little-endian uint64 offsets; the last is the size of the file
RECORDS_SUFFIX = ".tfrecords"
OFFSETS_SUFFIX = ".offsets"


def masked_crc(content: bytes) -> int:
    """TFRecord's checksum: CRC-32C, rotated right by 15 and shifted by a constant."""
    crc = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class RecordWriter:
    """Writes examples to an open binary file, and knows the offset of each."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.offsets = array("Q", [0])  # a list would take five times the memory

    def write(self, features: Mapping[str, np.ndarray]) -> None:
        """Append one Example of integer or float features, each [N]."""
        content = example.encode(features)
        length = _LENGTH.pack(len(content))
        self._file.write(b"".join((length, _CRC.pack(masked_crc(length)), content, _CRC.pack(masked_crc(content)))))
        self.offsets.append(self.offsets[-1] + FRAME_BYTES + len(content))

    @property
    def count(self) -> int:
        """Records written so far."""
        return len(self.offsets) - 1


def encode_offsets(offsets: Sequence[int]) -> bytes:
    """The content of the `.offsets` file beside a record file."""
    return _OFFSETS_MAGIC + np.asarray(offsets, dtype="<u8").tobytes()


class RecordFile:
    """One record file, read in order from any record, or record by record.

    `records_read` counts the records whose content was read, for those who care what a restart costs.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.records_read = 0
        self._file: IO[bytes] | None = None
        self._is_copy = False
        self._offsets: np.ndarray | None = None

    def stored_size(self) -> int:
        """Bytes of the file as stored."""
        return storage.size(self.path)

    @property
    def offsets(self) -> np.ndarray:
        """uint64 [records + 1]: where each record starts, then where the last one ends.

        From the `.offsets` file beside it when that fits, else by reading the frames, not the records.
        """
        if self._offsets is None:
            self._offsets = self._cached_offsets()
        if self._offsets is None:
            was_open = self._file is not None
            self._offsets = np.fromiter(self._scan(), dtype=np.uint64)
            if not was_open and not self._is_copy:
                self.close()  # a set may have more files than a process may hold open
        return self._offsets

    @property
    def count(self) -> int:
        """Records in the file."""
        return len(self.offsets) - 1

    def records_from(self, offset: int, number: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """(offset after the record, its features) for each record from a byte offset on; `number` is the first's."""
        file = self._open()
        file.seek(offset)
        while True:
            content = self._read(file, offset, number)
            if content is None:
                return
            features = self._decode(content, offset, number)
            offset += FRAME_BYTES + len(content)
            number += 1
            yield offset, features

    def record(self, number: int) -> dict[str, np.ndarray]:
        """The features of one record, by its number; a file that cannot be sought is copied to a temporary one."""
        self._use_local_copy()
        offset = int(self.offsets[number])
        file = self._open()
        file.seek(offset)
        content = self._read(file, offset, number)
        if content is None:
            raise self._truncated(offset, number, "0 bytes", "a record")
        return self._decode(content, offset, number)

    def first(self) -> tuple[bytes, dict[str, np.ndarray]] | None:
        """Content and features of the first record; None when the file is empty. Leaves nothing open or unpacked."""
        with _buffered(storage.open_file(self.path, "rb")) as file:
            stream, codec = self._plain_stream(file)
            with compression.errors(self.path, codec or "plain"):
                content = self._read(stream, 0, 0)
        return None if content is None else (content, self._decode(content, 0, 0))

    def close(self) -> None:
        """Close the file; it opens again when needed."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._is_copy = False

    def where(self, number: int, offset: int | None = None) -> str:
        """How messages name a record."""
        at = int(self.offsets[number]) if offset is None else offset
        return f"{self.path}: record {number} at byte offset {at}"

    @property
    def costly(self) -> bool:
        """Whether opening it again would copy or unpack it again."""
        return self._is_copy

    def _open(self) -> IO[bytes]:
        if self._file is None:
            file = _buffered(storage.open_file(self.path, "rb"))
            try:
                stream, codec = self._plain_stream(file)
                if codec is None:
                    self._file = file
                    return file
                with compression.errors(self.path, codec):
                    self._file = _temporary_copy(stream)
            except BaseException:
                file.close()
                raise
            file.close()
            self._is_copy = True
        return self._file

    def _plain_stream(self, file: IO[bytes]) -> tuple[Any, str | None]:
        """The file itself, or a forward-only stream of what it decompresses to, and the codec."""
        head = file.read(HEADER_BYTES)
        file.seek(0)
        if not head or _is_frame(head):
            return file, None
        codec = compression.detect(head)
        if codec is None:
            raise DataError(
                f"{self.path}: starts with {head.hex(' ')}, which is not a length and its checksum, nor gzip, zlib or "
                f"zstandard; expected a whole record file; {_AGAIN}"
            )
        stream = compression.open_stream(file, codec)
        with compression.errors(self.path, codec):
            head = stream.read(HEADER_BYTES)
        if head and not _is_frame(head):
            raise DataError(
                f"{self.path}: is {codec}, but what it decompresses to starts with {head.hex(' ')}, which is not a "
                f"length and its checksum; expected a record file; {_AGAIN}"
            )
        return compression.Rejoined(head, stream), codec

    def _use_local_copy(self) -> None:
        """Random reads from an object store would fetch a large block each: copy such a file once."""
        file = self._open()
        if storage.is_url(self.path) and not self._is_copy:
            file.seek(0)
            with file:
                self._file = _temporary_copy(file)
            self._is_copy = True

    def _read(self, file: Any, offset: int, number: int) -> bytes | None:
        """The content of the record that starts here; None at the end of the file."""
        header = file.read(HEADER_BYTES)
        if not header:
            return None
        length = self._length(header, offset, number)
        body = file.read(length + 4)
        if len(body) != length + 4:
            raise self._truncated(offset, number, f"{len(body)} bytes of it", f"{length + 4} after its header")
        content = body[:length]
        if _CRC.unpack_from(body, length)[0] != masked_crc(content):
            raise DataError(f"{self.where(number, offset)} is corrupt (checksum of its {length} bytes); {_AGAIN}")
        self.records_read += 1
        return content

    def _length(self, header: bytes, offset: int, number: int) -> int:
        if len(header) < HEADER_BYTES:
            raise self._truncated(offset, number, f"{len(header)} bytes of its header", str(HEADER_BYTES))
        if not _is_frame(header):
            raise DataError(f"{self.where(number, offset)} is corrupt (checksum of its length); {_AGAIN}")
        return int(_LENGTH.unpack_from(header)[0])

    def _truncated(self, offset: int, number: int, found: str, expected: str) -> DataError:
        return DataError(
            f"{self.where(number, offset)} is truncated: the file ends after {found}, expected {expected}; {_AGAIN}"
        )

    def _decode(self, content: bytes, offset: int, number: int) -> dict[str, np.ndarray]:
        try:
            return example.decode(content)
        except example.MalformedExampleError as error:
            raise DataError(f"{self.where(number, offset)} is not a tf.train.Example: {error}") from error

    def _cached_offsets(self) -> np.ndarray | None:
        cache = self.path + OFFSETS_SUFFIX
        if not storage.exists(cache):
            return None
        content = storage.read_bytes(cache)
        if content[:8] != _OFFSETS_MAGIC or len(content) % 8:
            return None
        offsets = np.frombuffer(content, dtype="<u8", offset=8).astype(np.uint64)
        # A cache of another version of the file is not an error: the frames say the same, only slower.
        fits = offsets.size > 0 and offsets[0] == 0 and offsets[-1] == self.stored_size()
        return offsets if fits else None

    def _scan(self) -> Iterator[int]:
        self._use_local_copy()  # there, a request for every frame would cost more than the whole file
        file = self._open()
        end = file.seek(0, os.SEEK_END)
        offset, number = 0, 0
        yield 0
        while offset < end:
            file.seek(offset)
            length = self._length(file.read(HEADER_BYTES), offset, number)
            after = offset + FRAME_BYTES + length
            if after > end:
                raise self._truncated(offset, number, f"{end - offset} bytes of it", str(FRAME_BYTES + length))
            yield after
            offset, number = after, number + 1


_AGAIN = "fetch or make the file again"


def _is_frame(header: bytes) -> bool:
    """Whether these bytes are the length of a record and its checksum."""
    return len(header) >= HEADER_BYTES and _CRC.unpack_from(header, 8)[0] == masked_crc(header[:8])


def _buffered(file: IO[bytes]) -> IO[bytes]:
    """Frames are read in small pieces, so an unbuffered reader is wrapped."""
    if isinstance(file, io.RawIOBase):
        return cast(IO[bytes], io.BufferedReader(file, _BUFFER))
    return file


def _temporary_copy(file: Any) -> IO[bytes]:
    """An unnamed file on disk with the rest of a stream; it vanishes when closed."""
    copy = cast(IO[bytes], tempfile.TemporaryFile(prefix="records-"))
    try:
        shutil.copyfileobj(file, copy, _BUFFER)
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return copy
