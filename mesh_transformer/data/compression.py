"""Compressed streams, recognised by their first bytes and never by a name."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

from mesh_transformer.errors import DataError

HEAD_BYTES = 6  # what `detect` needs to see
_BUFFER = 1 << 20  # bytes
_FRAME_BLOCK = 1 << 14  # packed bytes at a time: what they decompress to is held in memory


def detect(head: bytes) -> str | None:
    """`gzip`, `zlib`, `zstandard`, `xz`, `bzip2`, or None for anything else.

    zlib has no magic number, only a checked two-byte header: ask about it where text cannot be meant.
    """
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return "zstandard"
    if head[:6] == b"\xfd7zXZ\x00":
        return "xz"
    if head[:3] == b"BZh" and head[3:4].isdigit():
        return "bzip2"
    if head[:1] == b"\x78" and len(head) > 1 and (head[0] << 8 | head[1]) % 31 == 0:
        return "zlib"
    return None


def open_stream(file: IO[bytes], codec: str) -> IO[bytes]:
    """A forward-only stream of what the file decompresses to; read it inside `errors`."""
    if codec == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if codec == "xz":
        return cast(IO[bytes], lzma.LZMAFile(file))
    if codec == "bzip2":
        return cast(IO[bytes], bz2.BZ2File(file))
    return cast(IO[bytes], io.BufferedReader(_FrameReader(file, codec), _BUFFER))


@contextlib.contextmanager
def errors(path: str, codec: str) -> Iterator[None]:
    """Turn what a broken stream raises into a DataError naming the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        # bz2 reports bad data as a plain OSError without a number; a real failure of the disk has one.
        numberless = isinstance(error, OSError) and error.errno is None
        if not numberless and not isinstance(error, _error_types()):
            raise
        raise DataError(f"{path}: broken {codec} data ({error}); fetch or make the file again") from error


class Rejoined:
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, rest: Any) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int = -1) -> bytes:
        """The next bytes, as a file gives them."""
        if not self._head:
            block: bytes = self._rest.read(size)
            return block
        if size < 0:
            size = len(self._head) + (1 << 62)
        taken, self._head = self._head[:size], self._head[size:]
        return taken + (self._rest.read(size - len(taken)) if size > len(taken) else b"")


class _FrameReader(io.RawIOBase):
    """zlib or zstandard data, of one frame or several in a row. An end inside a frame is an EOFError."""

    def __init__(self, file: IO[bytes], codec: str) -> None:
        self._file = file
        self._codec = codec
        self._frame: Any = None
        self._packed = b""  # read, and not yet decompressed
        self._plain = memoryview(b"")  # decompressed, and not yet handed out

    def readable(self) -> bool:
        """True, as io asks of a stream."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what comes next; 0 at the end."""
        while not self._plain:
            if not self._packed and not (block := self._file.read(_FRAME_BLOCK)):
                if self._frame is not None:
                    raise EOFError("it ends too early")
                return 0
            self._packed = self._packed or block
            self._decompress()
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = _new_frame(self._codec)
        self._plain = memoryview(self._frame.decompress(self._packed))
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None


def _new_frame(codec: str) -> Any:
    if codec == "zlib":
        return zlib.decompressobj()
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


def _error_types() -> tuple[type[Exception], ...]:
    known: tuple[type[Exception], ...] = (zlib.error, EOFError, lzma.LZMAError, gzip.BadGzipFile)
    try:
        import zstandard
    except ImportError:
        return known
    return (*known, zstandard.ZstdError)
