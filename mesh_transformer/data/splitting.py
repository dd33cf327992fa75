"""Which documents are for validation: the same for the same seed, whatever machine or number of workers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from mesh_transformer.data.permutation import Permutation
from mesh_transformer.errors import DataError

BY_DOCUMENT, BY_FILE = "document", "file"
_KEY = 3  # keeps this apart from the permutations of packing

# (number of the file, number of the document in all) -> whether it is for validation
Split = Callable[[int, int], bool]


def make_split(fraction: float, by: str, files: int, seed: int) -> Split:
    """By file: that share of the files, at least one. By document: one of every 1/fraction, at a random place."""
    if fraction == 0:
        return lambda file, document: False
    if by == BY_FILE:
        if files < 2:
            raise DataError(f"--val-fraction by file: {files} file is too few, expected 2; use --split-by document")
        chosen = min(files - 1, max(1, round(fraction * files)))
        validation = set(Permutation(files, seed, _KEY)(np.arange(chosen)).tolist())
        return lambda file, document: file in validation
    return _Strata(Fraction(fraction).limit_denominator(1_000_000), seed)


class _Strata:
    """Stratum k is the documents from ceil(k / f) to ceil((k + 1) / f) - 1; one of each is chosen."""

    def __init__(self, fraction: Fraction, seed: int) -> None:
        self._fraction = fraction
        self._seed = seed
        self._stratum = -1
        self._chosen = -1

    def __call__(self, file: int, document: int) -> bool:
        stratum = document * self._fraction.numerator // self._fraction.denominator
        if stratum != self._stratum:
            first, end = self._first(stratum), self._first(stratum + 1)
            self._stratum = stratum
            self._chosen = first + int(Permutation(end - first, self._seed, _KEY, stratum)(np.array([0]))[0])
        return document == self._chosen

    def _first(self, stratum: int) -> int:
        return -(-stratum * self._fraction.denominator // self._fraction.numerator)
