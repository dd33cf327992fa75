"""Compressed streams, recognised by their first bytes and never by a name."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, cast

from mesh_transformer.errors import DataError

HEAD_BYTES = 6  # what `detect` needs to see
_BUFFER = 1 << 20  # bytes


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
    if codec == "zlib":
        return cast(IO[bytes], io.BufferedReader(_ZlibReader(file), _BUFFER))
    import zstandard

    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return cast(IO[bytes], io.BufferedReader(_ZstdReader(reader), _BUFFER))


@contextlib.contextmanager
def errors(path: str, codec: str) -> Iterator[None]:
    """Turn what a broken stream raises into a DataError naming the file."""
    try:
        yield
    except DataError:
        raise
    except (zlib.error, EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: broken {codec} data ({error}); fetch or make the file again") from error
    except OSError as error:
        # bz2 reports bad data as a plain OSError without a number; a real failure of the disk has one.
        if error.errno is not None:
            raise
        raise DataError(f"{path}: broken {codec} data ({error}); fetch or make the file again") from error


class _ZlibReader(io.RawIOBase):
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._stream = zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer with what comes next; 0 at the end."""
        while not self._stream.eof:
            block = self._stream.unconsumed_tail or self._file.read(_BUFFER)
            if not block:
                raise EOFError("it ends too early")
            plain = self._stream.decompress(block, len(buffer))
            if plain:
                buffer[: len(plain)] = plain
                return len(plain)
        return 0


class _ZstdReader(io.RawIOBase):
    """Turns zstandard's errors into those of zlib, and a frame that is cut off into EOFError."""

    def __init__(self, reader: IO[bytes]) -> None:
        self._reader = reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer with what comes next; 0 at the end."""
        import zstandard

        try:
            plain = self._reader.read(len(buffer))
        except zstandard.ZstdError as error:
            raise zlib.error(str(error)) from error
        buffer[: len(plain)] = plain
        return len(plain)
