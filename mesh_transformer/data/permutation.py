"""A seeded permutation of 0 .. n-1 that any element can be asked of, the same on every machine and numpy release.

Small ones are a table. Large ones take no memory: a Feistel network permutes the next power of four, and numbers
beyond n are sent through again until they fall below it (cycle walking; under four rounds on average).
"""

from __future__ import annotations

import numpy as np

_TABLE_LIMIT = 1 << 20  # elements
_ROUNDS = 6
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Permutation:
    """Order of `n` things for a key of integers (seed, epoch, ...)."""

    def __init__(self, n: int, *key: int, table_limit: int = _TABLE_LIMIT) -> None:
        self.n = n
        state = np.array([0x243F6A8885A308D3], dtype=np.uint64)
        for part in key:
            state = _mix(state ^ np.array([part % (1 << 64)], dtype=np.uint64))
        self._state = state
        self._table = self._make_table() if n <= table_limit else None

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """int64 [N] of positions in the new order -> int64 [N]: which things stand there."""
        if self._table is not None:
            return self._table[positions]
        values = np.asarray(positions).astype(np.uint64)
        limit = np.uint64(self.n)
        values = self._network(values)
        while (outside := np.flatnonzero(values >= limit)).size:
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _make_table(self) -> np.ndarray:
        hashes = _mix(np.arange(self.n, dtype=np.uint64) ^ self._state)
        return np.argsort(hashes, kind="stable")

    def _network(self, values: np.ndarray) -> np.ndarray:
        bits = np.uint64(-(-(self.n - 1).bit_length() // 2))
        mask = (np.uint64(1) << bits) - np.uint64(1)
        left, right = values >> bits, values & mask
        round_key = self._state
        for _ in range(_ROUNDS):
            round_key = _mix(round_key)
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every input bit reaches every output bit; one to one. uint64 [N] -> uint64 [N]."""
    values = values + _GAMMA
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
