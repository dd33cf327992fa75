"""Which windows are scored together: in order of length, in few shapes, within a budget of tokens.

Letters: B contexts of a batch, T tokens of a context's bucket, K continuations of a context, N tokens of a
continuation's bucket. Everything that is compiled depends on (B, T, K, N) alone.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from mesh_transformer.evaluation.continuing import Options, Prompt
from mesh_transformer.evaluation.requests import Ids, Window

MOST_CONTINUATIONS = 16  # of one context in one batch
_PADDING = 1 / 8  # share of padding that is borne rather than compile another shape


@dataclasses.dataclass(frozen=True)
class Group:
    """A context and the continuations that share it. One alone is read together with its context."""

    context: Ids
    continuations: tuple[Ids, ...]

    @property
    def shared(self) -> bool:
        return len(self.continuations) > 1

    @property
    def read(self) -> int:
        """Tokens of the first pass: the context's, and those of a continuation that is alone."""
        return len(self.context) + (0 if self.shared else len(self.continuations[0]) - 1)

    @property
    def longest(self) -> int:
        return max(map(len, self.continuations))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Groups to score at once, padded to `rows` contexts of `length` tokens (T), `continuations` (K) each of `width`
    tokens (N). Where N is 0, K is 1 and T covers context and continuation."""

    groups: tuple[Group, ...]
    rows: int
    length: int
    continuations: int
    width: int

    @property
    def shared(self) -> bool:
        return self.width > 0

    @property
    def windows(self) -> int:
        return sum(len(group.continuations) for group in self.groups)


@dataclasses.dataclass(frozen=True)
class Budget:
    """How large a batch may be: `tokens` of all rows together, or exactly `rows` of them where that is given.

    replicas: rows are a multiple of this.
    """

    tokens: int
    replicas: int = 1
    rows: int | None = None

    def rows_of(self, tokens_a_row: int) -> int:
        wanted = self.rows if self.rows is not None else self.tokens // tokens_a_row
        return max(wanted // self.replicas, 1) * self.replicas

    def halved(self) -> Budget | None:
        """Half of it; None where it is one row a replica already."""
        if self.rows is not None:
            return dataclasses.replace(self, rows=self.rows // 2) if self.rows > self.replicas else None
        return dataclasses.replace(self, tokens=self.tokens // 2) if self.tokens > 1 else None


def bucket(length: int, most: int) -> int:
    """The smallest of 8, 16, then four sizes between one power of two and the next, that holds `length`."""
    if length <= 16:
        return min(8 if length <= 8 else 16, most)
    step = 1 << max((length - 1).bit_length() - 3, 2)
    return min(-(-length // step) * step, most)


def group(windows: Iterable[Window]) -> list[Group]:
    """The windows by context, each once; contexts in the order of their first window."""
    by_context: dict[Ids, dict[Ids, None]] = defaultdict(dict)
    for window in windows:
        by_context[window.context][window.continuation] = None
    groups = []
    for context, found in by_context.items():
        continuations = list(found)
        # A continuation that is as long as its context gains nothing from reading that once only.
        alone = [each for each in continuations if len(each) > len(context)]
        shared = [each for each in continuations if len(each) <= len(context)]
        groups += [Group(context, (each,)) for each in alone]
        groups += [
            Group(context, tuple(shared[start : start + MOST_CONTINUATIONS]))
            for start in range(0, len(shared), MOST_CONTINUATIONS)
        ]
    return groups


def width_bucket(length: int, most: int) -> int:
    """The smallest of 8, 12, 16, 24, 32, 48, ... that holds `length`."""
    power = 1 << max(length - 1, 7).bit_length()
    return min(power * 3 // 4 if 8 < length <= power * 3 // 4 else power, most)


def batches(groups: Sequence[Group], budget: Budget, seq: int) -> Iterator[Batch]:
    """Batches of all groups, the longest first, so that memory and the time left show at once."""
    by_count: dict[tuple[bool, int], list[Group]] = defaultdict(list)
    for each in groups:
        count = len(each.continuations)
        by_count[(each.shared, count if count <= 8 else MOST_CONTINUATIONS)].append(each)
    for (shared, count), found in sorted(by_count.items(), reverse=True):
        if not shared:
            yield from _of_one_width(found, budget, seq, count, 0)
            continue
        found.sort(key=lambda each: each.longest, reverse=True)
        at = 0
        while at < len(found):
            width, end = width_bucket(found[at].longest, seq), at
            longest = max(each.read for each in found[at:])
            full = budget.rows_of(bucket(longest, seq) + count * width)
            # A narrower shape is compiled only behind a whole batch, and only for a whole batch.
            while end < len(found) and (
                end < at + full or len(found) - end < full or width_bucket(found[end].longest, seq) == width
            ):
                end += 1
            yield from _of_one_width(found[at:end], budget, seq, count, width)
            at = end


def _of_one_width(groups: Sequence[Group], budget: Budget, seq: int, count: int, width: int) -> Iterator[Batch]:
    """Batches of groups with `count` continuations, padded to `width` tokens; width 0 where they are not shared."""
    ordered = sorted(groups, key=lambda each: each.read, reverse=True)
    at, length, filled = 0, 0, False
    while at < len(ordered):
        fitting = bucket(ordered[at].read, seq)
        # A shorter shape is compiled only behind a whole batch, for a whole batch, and where that saves something.
        shorter = fitting < length * (1 - _PADDING) and len(ordered) - at >= budget.rows_of(fitting + count * width)
        if not length or (filled and shorter):
            length, filled = fitting, False
        full = budget.rows_of(length + count * width)
        part = tuple(ordered[at : at + full])
        if len(part) == full or filled:
            rows, filled = full, True
        else:
            replicas = budget.replicas
            rows = min(full, replicas << max(-(-len(part) // replicas) - 1, 0).bit_length())
        yield Batch(part, rows, length, count, width)
        at += len(part)


def prompts(wanted: Iterable[Prompt], budget: Budget, seq: int) -> Iterator[list[Prompt]]:
    """Prompts to continue at once: those with the same options, the longest first."""
    by_options: dict[Options, list[Prompt]] = defaultdict(list)
    for prompt in wanted:
        by_options[prompt.options].append(prompt)
    for options, found in by_options.items():
        found.sort(key=lambda prompt: len(prompt.ids), reverse=True)
        at = 0
        while at < len(found):
            rows = budget.rows_of(min(bucket(len(found[at].ids), seq) + options.max_tokens, seq))
            yield found[at : at + rows]
            at += rows
