"""Documents as they stream by: cut at the end-of-text name, and into pieces that tokenize as the whole would.

A document of any length is handed on in pieces of at most `PIECE_CHARS` characters. Cuts are made between a letter or
digit and white space, a newline where there is one: there a byte-level BPE's pre-tokenizer cuts too, so the tokens
are those of the whole text. (A text without such a place in a whole piece is cut where it is.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PIECE_CHARS = 16_384  # larger ones tokenize more slowly
_WINDOW_CHARS = 4 * PIECE_CHARS
_KEEP_CHARS = 256  # never handed on before the end: the end-of-text name may lie across
_SPACE_AFTER_WORD = re.compile(r"(?<=[^\W_])\s")


@dataclass(frozen=True)
class Piece:
    """A run of a document's text. `prompt`: it is given, not to be learned. `ends`: the document ends with it."""

    text: str
    prompt: bool = False
    ends: bool = False


def split_documents(blocks: Iterable[str], separator: str | None) -> Iterator[Piece]:
    """Pieces of the documents that a text holds, the separator between them taken out; None: all is one document.

    An empty document is a piece without text.
    """
    rest = ""
    for block in blocks:
        rest += block
        if len(rest) < _WINDOW_CHARS:
            continue
        if separator is not None and separator in rest:
            *whole, rest = rest.split(separator)
            for document in whole:
                yield from pieces(document, ends=True)
        while len(rest) > PIECE_CHARS + _KEEP_CHARS:
            at = _cut(rest)
            yield Piece(rest[:at])
            rest = rest[at:]
    for document in rest.split(separator) if separator is not None else [rest]:
        yield from pieces(document, ends=True)


def pieces(text: str, prompt: bool = False, ends: bool = False) -> Iterator[Piece]:
    """A text in pieces; at least one, and `ends` is of the last."""
    start = 0
    while len(text) - start > PIECE_CHARS + _KEEP_CHARS:
        at = start + _cut(text[start : start + PIECE_CHARS])
        yield Piece(text[start:at], prompt)
        start = at
    yield Piece(text[start:], prompt, ends)


def _cut(text: str) -> int:
    """Where to end a piece, at most `PIECE_CHARS`."""
    end = min(len(text), PIECE_CHARS)
    at = end
    while (at := text.rfind("\n", 1, at)) > 0:
        if text[at - 1].isalnum():
            return at
    spaces = [found.start() for found in _SPACE_AFTER_WORD.finditer(text, max(1, end - 2048), end)]
    return spaces[-1] if spaces else end
