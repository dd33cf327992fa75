"""Cutting documents into records: joined end to end, shuffled on the way, with bounded memory.

The order, for one epoch: the documents of the whole corpus are permuted (uniformly, by seed and epoch) and joined, the
end-of-text token after each. Every `block` documents, what has been joined is cut into records, and these are permuted
among themselves; the rest that fills no record goes on to the next block. Only the rest of the last block is dropped.
Memory holds one block's lengths (24 bytes a document), never its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mesh_transformer.data.permutation import Permutation
from mesh_transformer.data.spool import Spool

BLOCK_DOCUMENTS = 1 << 20
_DOCUMENT_ORDER, _RECORD_ORDER = 1, 2  # keys that keep the two permutations apart
_AT_ONCE = 1024  # records whose places are computed together


@dataclass(frozen=True)
class PackingOptions:
    """How to cut: tokens per record (seq + 1), and in which order."""

    record_tokens: int
    epochs: int = 1
    seed: int = 10
    preserve_order: bool = False
    min_unique_tokens: int = 0
    masks: bool = False
    block_documents: int = BLOCK_DOCUMENTS


@dataclass
class Packed:
    """What became of the tokens. written + dropped_tail + dropped_repetitive = epochs x corpus."""

    written_tokens: int = 0
    records: int = 0
    dropped_tail_tokens: int = 0
    dropped_repetitive_tokens: int = 0
    dropped_repetitive_records: int = 0
    max_id: int = -1
    records_per_epoch: list[int] = field(default_factory=list)


def pack(spool: Spool, options: PackingOptions, account: Packed) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Records (ids [T], and mask uint8 [T] if asked for) of all epochs, in the order to write; fills the account."""
    size = options.record_tokens
    for epoch in range(options.epochs):
        before = account.records
        rest = _Slice(np.zeros(0, spool.dtype), np.zeros(0, np.uint8))
        for first in range(0, spool.documents, options.block_documents):
            numbers = np.arange(first, min(first + options.block_documents, spool.documents))
            if not options.preserve_order:
                numbers = Permutation(spool.documents, options.seed, epoch, _DOCUMENT_ORDER)(numbers)
            block = _Block(spool, rest, spool.rows(numbers))
            count = block.tokens // size
            for record in _record_order(count, options, epoch, first):
                taken = block.read(int(record) * size, size)
                if _keep(taken.ids, options, account):
                    yield taken.ids, taken.mask if options.masks else None
            rest = block.read(count * size, block.tokens - count * size)
        account.dropped_tail_tokens += len(rest.ids)
        account.records_per_epoch.append(account.records - before)


@dataclass(frozen=True)
class _Slice:
    """Consecutive tokens: ids [N], mask uint8 [N]."""

    ids: np.ndarray
    mask: np.ndarray


class _Block:
    """Some documents joined, after the rest of the block before; read by position without being held."""

    def __init__(self, spool: Spool, rest: _Slice, rows: np.ndarray) -> None:
        self._spool = spool
        self._rest = rest
        self._rows = rows
        self._ends = len(rest.ids) + np.cumsum(rows["length"].astype(np.int64))
        self.tokens = int(self._ends[-1]) if len(rows) else len(rest.ids)

    def read(self, start: int, count: int) -> _Slice:
        """Tokens from a position of the block on."""
        ids: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        end = start + count
        if start < len(self._rest.ids):
            ids.append(self._rest.ids[start:end])
            masks.append(self._rest.mask[start:end])
            start = min(end, len(self._rest.ids))
        document = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            row_start, length, prompt = (int(value) for value in self._rows[document])
            skip = start - (int(self._ends[document]) - length)
            here = min(end - start, length - skip)
            ids.append(self._spool.read(row_start + skip, here))
            masks.append((np.arange(skip, skip + here) >= prompt).astype(np.uint8))
            start += here
            document += 1
        if not ids:
            return _Slice(self._rest.ids[:0], self._rest.mask[:0])
        return _Slice(np.concatenate(ids), np.concatenate(masks))


def _record_order(count: int, options: PackingOptions, epoch: int, block: int) -> Iterator[int]:
    order = None if options.preserve_order else Permutation(count, options.seed, epoch, _RECORD_ORDER, block)
    for first in range(0, count, _AT_ONCE):
        numbers = np.arange(first, min(first + _AT_ONCE, count))
        yield from (numbers if order is None else order(numbers)).tolist()


def _keep(ids: np.ndarray, options: PackingOptions, account: Packed) -> bool:
    """Count the record, and say whether it is to be written."""
    if options.min_unique_tokens > 1 and np.unique(ids).size < options.min_unique_tokens:
        account.dropped_repetitive_records += 1
        account.dropped_repetitive_tokens += len(ids)
        return False
    account.records += 1
    account.written_tokens += len(ids)
    account.max_id = max(account.max_id, int(ids.max()))
    return True
