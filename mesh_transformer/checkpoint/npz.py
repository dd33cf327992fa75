"""Single .npz files of the published layout, written and read in slices so that no array is ever held twice.

A file is an uncompressed zip archive of arr_0.npy, arr_1.npy, ..., as `numpy.savez` writes it. bfloat16, which npy
headers cannot name, is stored as raw two-byte items, `|V2`. Every member carries the zip format's own CRC-32.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import IO, Any, NamedTuple, Self, cast

import google_crc32c
import ml_dtypes
import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint.damage import DamagedError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CHUNK = 1 << 20  # bytes of an array in flight at a time

_END_RECORD = 22  # bytes at the end of an archive without a comment

_PARSING = threading.Lock()
_LOCAL_HEADER = 30  # bytes before the name in a zip file's local header
_ENCRYPTED = 1  # bit of a member's flags

_CORRUPT = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, NotImplementedError)


class Header(NamedTuple):
    """What an npy header says; `|V2` reads as bfloat16."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class NpzWriter:
    """Writes one file front to back, with no seeking, so that its checksum is known when it ends."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = storage.open_file(path, "wb")
        self._out = _CheckedOutput(self._file)
        self._zip = zipfile.ZipFile(cast(Any, self._out), "w", zipfile.ZIP_STORED, allowZip64=True)
        self._count = 0
        self._buffer = np.empty(0, np.uint8)

    @property
    def size(self) -> int:
        """Bytes so far; final after the `with` block."""
        return self._out.size

    @property
    def crc32c(self) -> str:
        """Checksum of the whole file, eight hexadecimal digits; final after the `with` block."""
        return f"{self._out.crc32c:08x}"

    def add(self, header: Header, pieces: Iterable[np.ndarray]) -> None:
        """Append an array given as consecutive runs of its rows, in C order."""
        info = zipfile.ZipInfo(f"arr_{self._count}.npy")  # dated 1980: equal states give equal files
        self._count += 1
        descr = "|V2" if header.dtype == BFLOAT16 else np.lib.format.dtype_to_descr(header.dtype)
        fields = {"descr": descr, "fortran_order": False, "shape": header.shape}
        with self._zip.open(info, "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, fields)
            for piece in pieces:
                member.write(self._contiguous(piece).reshape(-1).view(np.uint8))

    def _contiguous(self, piece: np.ndarray) -> np.ndarray:
        """The same values in a row; in a buffer that is used again, since fresh memory costs more than the copy."""
        if piece.flags.c_contiguous:
            return piece
        if self._buffer.size < piece.nbytes:
            self._buffer = np.empty(piece.nbytes, np.uint8)
        out = self._buffer[: piece.nbytes].view(piece.dtype).reshape(piece.shape)
        out[...] = piece
        return out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self._out.broken = True
            self._zip.close()
            storage.abandon(self._file)
            return
        self._zip.close()
        storage.sync(self._file)
        self._file.close()


class _CheckedOutput:
    """A stream without seek or tell, which makes zipfile write front to back; counts and checksums what passes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.crc32c = 0
        self.broken = False  # set after an error: what zipfile still has to say is dropped

    def write(self, content: Any) -> int:
        if self.broken:
            return len(content)
        # The checksum takes arrays and bytes, not the memoryviews that zipfile hands on.
        self.crc32c = google_crc32c.extend(self.crc32c, np.frombuffer(content, np.uint8))
        self.size += len(content)
        self._file.write(content)
        return len(content)

    def flush(self) -> None:
        self._file.flush()


class NpzReader:
    """Reads one file's arrays by number, in slices. All damage is DamagedError naming the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = storage.open_file(path, "rb")
        except storage.StorageError as error:
            if storage.is_missing(error):
                raise DamagedError(f"{path} is missing") from error
            raise
        try:
            with self._damage():
                if not storage.can_list(path) and not _serves_ranges(self._file):
                    self._file.close()
                    self._file = _local_copy(storage.open_file(path, "rb"))
                self.size = self._file.seek(0, os.SEEK_END)  # bytes
                if self.size == 0:
                    raise DamagedError(f"{path} has 0 bytes")
                self._zip = zipfile.ZipFile(self._file)
                self._buffer = np.empty(0, np.uint8)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._zip.close()
        self._file.close()

    def __len__(self) -> int:
        return len(self._zip.namelist())

    def member_sizes(self) -> list[int]:
        """Bytes of every member, header and array, as the file's own directory says; reads nothing more."""
        with self._damage():
            return [self._zip.getinfo(f"arr_{number}.npy").file_size for number in range(len(self))]

    def header(self, number: int) -> Header:
        """Shape and dtype of array `number`; reads a hundred bytes."""
        with self._damage(), self._open(number) as member:
            return _read_header(member)[0]

    def read(self, number: int) -> np.ndarray:
        """A whole array; for small ones."""
        parts = [piece.copy() for _, piece in self.pieces(number)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pieces(self, number: int, check: bool = True) -> Iterator[tuple[int, np.ndarray]]:
        """(First row, rows) of an array, a few MB at a time; raises at the end if its CRC-32 does not match.

        Each piece is good until the next is asked for. `check=False` leaves the sum out, where the whole file's was
        compared.
        """
        with self._damage(), self._open(number, check) as member:
            header, fortran = _read_header(member)
            row = header.dtype.itemsize * int(np.prod(header.shape[1:], dtype=np.int64))
            rows = header.shape[0] if header.shape else 1
            step = rows if fortran or not header.shape else max(1, CHUNK // max(row, 1))
            if self._buffer.size < min(step, rows) * row:
                self._buffer = np.empty(max(min(step, rows) * row, CHUNK), np.uint8)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                content = self._buffer[: (stop - start) * row]
                if _fill(member, content) != content.size:
                    raise DamagedError(f"{self.path} is truncated in arr_{number}")
                shape = (stop - start, *header.shape[1:]) if header.shape else ()
                flat = content.view(header.dtype)
                yield start, flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
            if member.read(1):
                raise DamagedError(f"{self.path} holds more bytes in arr_{number} than its header says")

    def _open(self, number: int, check: bool = True) -> IO[bytes]:
        """An array's bytes, header included; its sum is compared when all are read."""
        info = self._zip.getinfo(f"arr_{number}.npy")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            return self._zip.open(info)
        # Read straight from the file: zipfile would copy everything twice more.
        self._file.seek(info.header_offset)
        local = self._file.read(_LOCAL_HEADER)
        if local[:4] != b"PK\3\4":
            raise zipfile.BadZipFile(f"no local header of {info.filename}")
        name, extra = (int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
        start = info.header_offset + _LOCAL_HEADER + name + extra
        return cast(IO[bytes], _Stored(self._file, info, start, check))

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except DamagedError:
            raise
        except storage.StorageError:
            raise
        except _CORRUPT as error:
            raise DamagedError(f"{self.path} is corrupt: {error}") from error
        except OSError as error:
            raise storage.StorageError(f"{self.path}: cannot read: {error}") from error


class _Stored(io.RawIOBase):
    """A member that is stored as it is, as a file of its own; its CRC-32 is compared at its end."""

    def __init__(self, file: IO[bytes], info: zipfile.ZipInfo, start: int, check: bool) -> None:
        self._file, self._info, self._check = file, info, check
        self._left = info.file_size
        self._crc = 0
        file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: self._left]
        count = int(cast(Any, self._file).readinto(view)) if len(view) else 0
        self._left -= count
        if self._check:
            self._crc = zlib.crc32(view[:count], self._crc)
            if not self._left and self._crc != self._info.CRC:
                raise zipfile.BadZipFile(f"Bad CRC-32 for file {self._info.filename!r}")
        return count


def _fill(member: IO[bytes], out: np.ndarray) -> int:
    """Read until `out` is full or the member ends; the bytes read."""
    done = 0
    while done < out.size and (count := cast(Any, member).readinto(out[done:])):
        done += count
    return done


def _serves_ranges(file: IO[bytes]) -> bool:
    """Whether a file from a web server can be read from any place: its end then looks like a zip archive's."""
    try:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _END_RECORD))
        return file.read(4) == b"PK\5\6"
    except OSError:  # and io.UnsupportedOperation, which is one
        return False


def _local_copy(file: IO[bytes]) -> IO[bytes]:
    """A temporary file with the content of one that can only be read from front to back."""
    copy = tempfile.TemporaryFile()
    with file:
        shutil.copyfileobj(file, copy, CHUNK)
    return copy


def _read_header(member: IO[bytes]) -> tuple[Header, bool]:
    start = member.read(np.lib.format.MAGIC_LEN)
    length = member.read(2 if start[6:7] == b"\x01" else 4)
    content = io.BytesIO(start + length + member.read(int.from_bytes(length, "little")))
    # numpy parses headers with `ast`, and Python 3.11's raises SystemError when two threads are in it (python/cpython
    # issue 106905). Reading stays outside, since it may have to wait for a network.
    with _PARSING:
        version = np.lib.format.read_magic(content)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(content)
    if dtype.kind == "V" and dtype.itemsize == 2:
        dtype = BFLOAT16
    if dtype.hasobject:
        raise ValueError("holds Python objects")
    return Header(tuple(shape), dtype), fortran


def file_crc32c(path: str) -> str:
    """Checksum of a whole file, eight hexadecimal digits."""
    value = 0
    with storage.errors(path, "read"), storage.open_file(path) as file:
        while content := file.read(CHUNK):
            value = google_crc32c.extend(value, content)
    return f"{value:08x}"
