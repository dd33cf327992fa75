"""A new checkpoint step made of a stream of tensors: files of any M, manifest, meta.json, and nothing if it fails."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import layout, manifest, meta, retention
from mesh_transformer.checkpoint.blocks import Blocks, pieces
from mesh_transformer.checkpoint.layout import FILES, StateLeaf
from mesh_transformer.checkpoint.npz import BFLOAT16, Header, NpzWriter
from mesh_transformer.checkpoint.streaming import Tensor
from mesh_transformer.errors import CheckpointError, StorageError
from mesh_transformer.parameters import Combine

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig

logger = logging.getLogger(__name__)

_WORKERS = 4


def write_weights(
    out: storage.PathLike,
    model: ModelConfig,
    shards: int,
    tensors: Iterable[Tensor],
    counters: Mapping[str, int],
    details: Mapping[str, Any] | None = None,
) -> str:
    """Write a step of `shards` shards from tensors that come one at a time; returns the step's folder.

    `out`: the folder that will hold step_N and meta.json (or that step_N itself, whose parent then gets meta.json);
    local or gs://. `tensors`: all of `tensor_leaves(model, shards, full)` in that order; each is cast to its own
    `dtype` on the way. `counters`: layout.STEP, which names the step; with COUNT and SCHEDULE_COUNT the step is full,
    so the tensors begin with the moments. `details`: for the manifest, as `Weights.details` has them (config,
    agreement, mesh, aux).

    Raises CheckpointError where the model cannot be cut into so many shards, the step is already there, a tensor does
    not fit, or a value is too large for its type (f16 ends at 65504), and StorageError where there is no room; what
    was written is removed then.
    """
    step = counters[layout.STEP]
    model_dir, step_dir = destination(out, step)
    full = layout.COUNT in counters
    check_shards(model, shards)
    if storage.listdir(step_dir) and not retention.is_unfinished(step_dir):
        raise CheckpointError(f"{step_dir} is already there; choose another output folder, or move it away")
    raise NotImplementedError


def destination(out: storage.PathLike, step: int) -> tuple[str, str]:
    """(model_dir, step folder) of an output path: a folder for step_N, or step_N itself."""
    path = storage.normalise(out)
    if not re.fullmatch(r"step_\d+", storage.name(path)):
        return path, meta.step_dir(path, step)
    if storage.name(path) != f"step_{step}":
        raise CheckpointError(f"{path}: the weights are of step {step}; name it step_{step}, or another folder")
    return storage.parent(path), path


def check_shards(model: ModelConfig, shards: int) -> None:
    """Raises CheckpointError naming every size that cannot be cut into `shards` equal parts."""
