"""From one step to another: the other layout, other shards, another float type, without the optimizer.

Tensors pass one at a time; memory stays below twice the largest one, whatever the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.formats import ORBAX, SHARDS
from mesh_transformer.checkpoint.layout import StateLeaf
from mesh_transformer.checkpoint.publish import write_weights
from mesh_transformer.checkpoint.streaming import Tensor, Weights, open_weights
from mesh_transformer.config import differences
from mesh_transformer.errors import CheckpointError

if TYPE_CHECKING:
    from mesh_transformer.config import Config

# What a config must share with the run that wrote a step, or its weights would compute something else.
_AGREED = ("n_heads", "norm", "pe", "pe_rotary_dims")


class Converted(NamedTuple):
    """`path`: of the new step; `shards`, `dtypes`, `parameters` and `format` of what it holds; `full`: with the
    optimizer."""

    path: str
    shards: int
    dtypes: tuple[str, ...]
    parameters: int
    full: bool
    format: str = SHARDS

    def __str__(self) -> str:
        kind = "full (with optimizer)" if self.full else "slim"
        shards = "orbax" if self.format == ORBAX else f"{self.shards} shard{'s' if self.shards > 1 else ''}"
        return f"{self.path}: {self.parameters:,} parameters, {kind}, {shards}, {' and '.join(self.dtypes)}"


def reshard(
    source: storage.PathLike, out: storage.PathLike, shards: int, dtype: np.dtype | None = None,
    config: Config | None = None,
) -> Converted:  # fmt: skip
    """Write a step again in `shards` shards, its parameters in `dtype` (None: as they are); moments keep theirs.

    `source`: a step folder or a model_dir, of any layout; `out`: as in `write_weights`. `config`: of the model; the
    2021 library's files need it where shapes do not tell its norm. Raises CheckpointError, StorageError.
    """
    with open_weights(source, config.model if config else None) as weights:
        _check_heads(weights, shards)
        return _convert(weights, out, SHARDS, shards, dtype, optimizer=True, config=config)


def convert(
    source: storage.PathLike, out: storage.PathLike, to: str, shards: int | None = None, config: Config | None = None
) -> Converted:
    """Write a step again in the layout `to`, SHARDS (in `shards` shards) or ORBAX, every bit as it was.

    `shards`: by default as many as the source has, or those of the mesh that it was saved on.
    """
    with open_weights(source, config.model if config else None) as weights:
        _check_heads(weights, shards or weights.shards)
        return _convert(weights, out, to, shards or weights.shards, None, optimizer=True, config=config)


def slim(
    source: storage.PathLike, out: storage.PathLike, dtype: np.dtype, config: Config | None = None
) -> Converted:  # fmt: skip
    """Write a step again without its optimizer, every parameter in `dtype`, in its layout and as many shards as it has.

    The 2021 library's version 2 becomes what `config` has as ckpt_format. Raises CheckpointError, also where a value is
    too large for `dtype`, and StorageError.
    """
    with open_weights(source, config.model if config else None) as weights:
        to = weights.format if weights.format in (SHARDS, ORBAX) else config.run.ckpt_format if config else ORBAX
        return _convert(weights, out, to, weights.shards, dtype, optimizer=False, config=config)


def _convert(
    weights: Weights, out: storage.PathLike, to: str, shards: int, dtype: np.dtype | None, optimizer: bool,
    config: Config | None,
) -> Converted:  # fmt: skip
    types: set[str] = set()
    parameters = 0

    def type_of(leaf: StateLeaf) -> np.dtype:
        return weights.dtype(leaf) if dtype is None or leaf.moment else dtype

    def passing(tensor: Tensor) -> Tensor:
        nonlocal parameters
        if dtype is not None and not tensor.leaf.moment:
            tensor = tensor._replace(dtype=dtype)
        types.add(tensor.dtype.name)
        parameters += 0 if tensor.leaf.moment else tensor.value.size
        return tensor

    full = weights.full and optimizer
    counters = weights.counters if full else {layout.STEP: weights.counters[layout.STEP]}
    path = write_weights(
        out, weights.model, shards, map(passing, weights.stream(optimizer)), counters, described(weights, config),
        type_of if to == ORBAX else None,
    )  # fmt: skip
    return Converted(path, shards, tuple(sorted(types)), parameters, full, to)


def described(weights: Weights, config: Config | None) -> dict[str, Any]:
    """The details of a step for those made from it: its own, or where it has none, the config's.

    Raises CheckpointError where the two contradict each other.
    """
    details = dict(weights.details)
    if config is None:
        return details
    mine = config.agreement()
    theirs = details.setdefault("agreement", mine)
    different = differences({k: theirs[k] for k in _AGREED if k in theirs}, {k: mine[k] for k in _AGREED})
    if different:
        raise CheckpointError(
            f"{weights.path} is of another model: {'; '.join(different)}. Use the config it was trained with"
        )
    details.setdefault("config", config.to_dict())
    return details


def _check_heads(weights: Weights, shards: int) -> None:
    """Raises CheckpointError where shards would not hold whole heads, or norms of their own would change hands."""
    model = weights.model
    if model.norm == "layernorm-desync" and shards != weights.shards:
        raise CheckpointError(
            f"{weights.path} has {weights.shards} shards, each with its own norms (layernorm-desync), so they can be "
            f"neither merged nor cut: keep --shards {weights.shards}"
        )
    if weights.known and shards > 0 and model.n_heads % shards:
        raise CheckpointError(
            f"{shards} shards cannot share n_heads ({model.n_heads}) equally, as shards hold whole heads; choose a "
            "number that divides it"
        )
