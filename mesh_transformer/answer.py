"""From one row's tokens to its text, as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.sampling import LogProbs

# Stands in decoded text for bytes that are no character: of one that is not complete yet, or a mistake of the model's.
_INCOMPLETE = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a completion: its `id` and `text` (which may be a part of a character, shown as U+FFFD), where its
    text begins in the completion's, the natural logarithm of the model's own probability of it, and the most probable
    tokens in its place, (id, text, log-probability) each, in order."""

    id: int
    text: str
    offset: int
    logprob: float
    top: tuple[tuple[int, str, float], ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """A completion, or the next part of one: text, number of tokens drawn for it, why it ended: `stop` (at the end of
    text, a stop id or a stop string), `length`, or None where more follows; and, if asked for, its tokens one by one.
    """

    text: str
    tokens: int
    finish_reason: str | None
    logprobs: tuple[Token, ...] = ()

    def __add__(self, more: Completion) -> Completion:
        return Completion(
            self.text + more.text, self.tokens + more.tokens, more.finish_reason, self.logprobs + more.logprobs
        )


class TextStream:
    """Turns tokens into text as they come, holding back what does not make a whole character yet."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Decoding begins some tokens before what is new, since a tokenizer may treat the first token of a text in
        # another way; `_given` characters from there have been given out.
        self._start = self._whole = self._given = 0

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """The text that these tokens complete; with `last` also what is held back."""
        self._ids += ids
        decoded = self._tokenizer.decode(self._ids[self._start :])
        ready = decoded if last else decoded.rstrip(_INCOMPLETE)
        new, self._given = ready[self._given :], max(self._given, len(ready))
        if ready == decoded:
            self._start, self._whole = self._whole, len(self._ids)
            self._given = len(self._tokenizer.decode(self._ids[self._start :]))
        return new


class StopStrings:
    """Finds the first of some strings in a text that comes in pieces, wherever the pieces meet."""

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._held = ""

    def add(self, text: str, last: bool = False) -> tuple[str, bool]:
        """What can be given out, and whether a string was found, before which the text then ends.

        What may be the beginning of a string is held back, until more text decides, or `last`.
        """
        held = self._held + text
        found = [place for place in map(held.find, self._strings) if place >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        keep = 0 if last else max((_overlap(held, string) for string in self._strings), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False


def _overlap(text: str, string: str) -> int:
    """The length of the longest beginning of `string`, not the whole, that `text` ends with."""
    sizes = range(min(len(string) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(string[:size])), 0)


class Answer:
    """One row's completion on its way: what tokens make of its text, and whether a stop string has ended it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._text, self._stop = tokenizer, TextStream(tokenizer), StopStrings(stop)
        self._decoded = self._given = 0  # characters of all tokens so far, and of what was given out
        self._waiting: list[Token] = []
        self.finish_reason: str | None = None

    def add(self, ids: Sequence[int], finish_reason: str | None, logprobs: LogProbs | None = None) -> Completion:
        """The next part, from the tokens drawn (stop ids left out), why the row ended, and their log-probabilities.

        Once a stop string has been found the `finish_reason` is `stop`, the rest of the tokens is dropped, and so is
        whatever comes later: the row's work should be ended.
        """
        if self.finish_reason is not None:
            return Completion("", 0, self.finish_reason)
        text, used, hit = "", 0, False
        for i, token in enumerate(ids):
            if logprobs is not None:
                self._waiting.append(self._described(int(token), i, logprobs))
            piece = self._text.add([token])
            self._decoded += len(piece)
            ready, hit = self._stop.add(piece)
            text, used = text + ready, used + 1
            if hit:
                break
        if finish_reason is not None and not hit:
            rest, hit = self._stop.add(self._text.add([], last=True), last=True)
            text += rest
        self.finish_reason = "stop" if hit else finish_reason
        return Completion(
            text, used, self.finish_reason, self._released(len(text), finish_reason is not None and not hit)
        )

    def _described(self, token: int, place: int, logprobs: LogProbs) -> Token:
        top = tuple(
            (int(i), self._tokenizer.decode([int(i)]), float(value))
            for i, value in zip(logprobs.top_ids[place], logprobs.top[place], strict=True)
        )
        return Token(token, self._tokenizer.decode([token]), self._decoded, float(logprobs.drawn[place]), top)

    def _released(self, characters: int, rest: bool) -> tuple[Token, ...]:
        """The tokens that begin in what has been given out, or all the `rest`; never those of a stop string alone."""
        self._given += characters
        ready = tuple(token for token in self._waiting if rest or token.offset < self._given)
        self._waiting = self._waiting[len(ready) :]
        return ready
