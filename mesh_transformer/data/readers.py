"""Reading text out of files: plain, JSON lines, tar archives, compressed or not, a block at a time."""

from __future__ import annotations

import codecs
import json
import logging
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from mesh_transformer import storage
from mesh_transformer.data import compression
from mesh_transformer.data.documents import Piece, pieces, split_documents
from mesh_transformer.data.inputs import COMPRESSIONS, InputFile, Kind, kind_of, supported
from mesh_transformer.errors import DataError

_LOG = logging.getLogger(__name__)
_BLOCK = 1 << 18  # bytes
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
ERRORS = ("strict", "replace", "ignore")


@dataclass
class Reader:
    """How to read files into pieces of documents, and what was met on the way.

    `separator` splits documents (None: the literal end-of-text name is text); `errors` says what to do with bytes that
    are not UTF-8; `text_key`, or `prompt_key` and `completion_key`, name the values of a JSON line.
    """

    separator: str | None
    errors: str = "strict"
    text_key: str = "text"
    prompt_key: str | None = None
    completion_key: str | None = None
    text_suffixes: Sequence[str] = ()
    progress: Callable[[int], None] = lambda _: None  # called with bytes as they are read from storage
    undecodable: int = 0  # characters that `errors` replaced, or runs of bytes that it left out
    left_out: list[str] = field(default_factory=list)  # members of archives that are not of a kind that is read

    def documents(self, file: InputFile) -> Iterator[Piece]:
        """Pieces of the documents of a file, in order. Raises DataError naming the file and the place."""
        with storage.open_file(file.path, "rb") as stored:
            yield from self._content(_Counted(stored, self.progress), file.path, file.name, file.kind)

    def _content(self, stored: Any, where: str, name: str, kind: Kind) -> Iterator[Piece]:
        """Documents of a file or of a member of an archive."""
        head = stored.read(compression.HEAD_BYTES)
        promised = COMPRESSIONS.get(_suffix(name), "gzip" if _suffix(name) == ".tgz" else None)
        found = compression.detect(head)
        found = None if found in ("zlib", "bzip2") and found != promised else found  # both may be plain text
        stream: Any = compression.Rejoined(head, stored)
        if promised is not None and head and found != promised:
            raise DataError(f"{where}: its name says {promised}, but it is {found or 'not compressed'}; rename it")
        if found is None:
            yield from self._plain(stream, where, kind)
            return
        with compression.errors(where, found):
            yield from self._plain(compression.open_stream(stream, found), where, kind)

    def _plain(self, stream: Any, where: str, kind: Kind) -> Iterator[Piece]:
        if kind is Kind.UNKNOWN:
            head = stream.read(_TAR_MAGIC_AT + len(_TAR_MAGIC))
            kind = Kind.TAR if head[_TAR_MAGIC_AT:] == _TAR_MAGIC else Kind.TEXT
            stream = compression.Rejoined(head, stream)
        if kind is Kind.TAR:
            yield from self._members(stream, where)
        elif kind is Kind.JSON_LINES:
            yield from self._json_lines(stream, where)
        else:
            yield from split_documents(self._text(stream, where), self.separator)

    def _members(self, stream: Any, where: str) -> Iterator[Piece]:
        try:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK) as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is None:
                        continue
                    name = f"{where}:{member.name}"
                    kind = kind_of(member.name, self.text_suffixes)
                    if kind is None:
                        self.left_out.append(name)
                    else:
                        yield from self._content(content, name, member.name, kind)
        except tarfile.TarError as error:
            raise DataError(f"{where}: broken tar archive ({error}); fetch or make the file again") from error

    def _json_lines(self, stream: Any, where: str) -> Iterator[Piece]:
        number = 0
        at = 0  # byte offset of the line
        for line in _lines(stream):
            number += 1
            text = self._decoded(line, where, at, first=at == 0)
            at += len(line)
            if text.strip():
                yield from self._json_document(text, f"{where}, line {number}")

    def _json_document(self, line: str, where: str) -> Iterator[Piece]:
        try:
            values = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error}); expected one JSON object a line") from error
        if not isinstance(values, dict):
            raise DataError(f"{where}: a JSON {type(values).__name__}; expected one JSON object a line")
        if self.prompt_key is None or self.completion_key is None:
            text = self._value(values, self.text_key, where, "--text-key")
            yield from split_documents([text], self.separator)
            return
        prompt = self._value(values, self.prompt_key, where, "--prompt-key")
        completion = self._value(values, self.completion_key, where, "--completion-key")
        yield from pieces(prompt, prompt=True)
        yield from pieces(completion, ends=True)

    def _value(self, values: dict[str, Any], key: str, where: str, flag: str) -> str:
        value = values.get(key)
        if not isinstance(value, str):
            found = f"is {json.dumps(value)[:40]}" if key in values else f"is not among {', '.join(sorted(values))}"
            raise DataError(f"{where}: key `{key}` {found}; expected a text (name the key with {flag})")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair: JSON can say it, but it is no character
            if self.errors == "strict":
                raise DataError(
                    f"{where}: key `{key}` has half a surrogate pair at character {error.start}; "
                    f"mend the file, or accept the loss with --errors replace or --errors ignore"
                ) from error
            self.undecodable += 1
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", self.errors)
        return value

    def _text(self, stream: Any, where: str) -> Iterator[str]:
        """The text of a stream in blocks."""
        rest = b""
        at = 0  # byte offset of `rest`
        while True:
            block = stream.read(_BLOCK)
            content = rest + block
            whole = len(content) if not block else _whole_characters(content)
            yield self._decoded(content[:whole], where, at, first=at == 0)
            rest, at = content[whole:], at + whole
            if not block:
                return

    def _decoded(self, content: bytes, where: str, at: int, first: bool) -> str:
        if first and content.startswith(codecs.BOM_UTF8):
            content, at = content[3:], at + 3
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.errors == "strict":
                raise DataError(
                    f"{where}: byte offset {at + error.start} is not UTF-8 ({error.reason}); "
                    f"convert the file, or accept the loss with --errors replace or --errors ignore"
                ) from error
        replaced = content.decode("utf-8", "replace")
        self.undecodable += replaced.count("\ufffd") - content.count("\ufffd".encode())
        return replaced if self.errors == "replace" else content.decode("utf-8", "ignore")


def describe_left_out(names: Sequence[str], text_suffixes: Sequence[str], limit: int) -> list[str]:
    """Lines that tell which files were not read."""
    if not names:
        return []
    lines = [f"not read, since their kind is not one of {supported(text_suffixes)}: {len(names)} files or folders"]
    lines += [f"  {name}" for name in names[:limit]]
    return lines + ([f"  and {len(names) - limit} more"] if len(names) > limit else [])


class _Counted:
    """Bytes of a file, counted as they are read."""

    def __init__(self, file: IO[bytes], count: Callable[[int], None]) -> None:
        self._file = file
        self._count = count

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._count(len(block))
        return block


def _suffix(name: str) -> str:
    return "." + name.lower().rpartition(".")[2]


def _lines(stream: Any) -> Iterator[bytes]:
    rest: list[bytes] = []
    while block := stream.read(_BLOCK):
        *whole, tail = block.split(b"\n")
        for line in whole:
            rest.append(line)
            yield b"".join(rest) + b"\n"
            rest = []
        rest.append(tail)
    if last := b"".join(rest):
        yield last


def _whole_characters(content: bytes) -> int:
    """How many bytes to decode now: a character that the end of a block may have cut is left for the next one."""
    for back in range(1, min(4, len(content)) + 1):
        octet = content[-back]
        if octet < 0x80:
            return len(content)
        if octet >= 0xC0:
            needed = 2 if octet < 0xE0 else 3 if octet < 0xF0 else 4
            return len(content) if back >= needed else len(content) - back
    return len(content)
