"""What one device sends to others in a step, worked out from the shapes: which collective, over which axis, how often.

Letters: T tokens of a microbatch on one replica, D d_model, V vocabulary, L layers, A microbatches, C positions of a
chunk of the output head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mesh_transformer import parameters

if TYPE_CHECKING:
    from mesh_transformer.config import Config

F32 = 4
DP, MP = "dp", "mp"  # as `mesh` names them, which would start jax


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of collective of a step: over which mesh axis, how many devices, how often, bytes of one run."""

    kind: str
    axis: str
    devices: int
    runs: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a step, by a ring: (n - 1) / n of the value, twice for an all-reduce; all of
        what is passed on to a neighbour."""
        if self.kind == "collective-permute":
            return float(self.runs * self.bytes)
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * (self.devices - 1) / self.devices * self.runs * self.bytes


def traffic_of(config: Config, dp: int, task: str, width: int) -> tuple[Traffic, ...]:
    """The collectives of a step of `task`; width: bytes of a number of the compute dtype."""
    mp = config.mesh.cores_per_replica
    found = {"train": _training, "eval": _evaluation, "generate": _generation}[task](config, mp, width)
    sums = [Traffic(kind, MP, mp, runs, size) for kind, runs, size in found] if mp > 1 else []
    state = [Traffic(kind, DP, dp, runs, size) for kind, runs, size in _state(config, mp, width)]
    return tuple(sums + (state if task == "train" and dp > 1 else []))


_Runs = Iterator[tuple[str, int, int]]


def _training(config: Config, mp: int, width: int) -> _Runs:
    model, A = config.model, config.mesh.gradient_accumulation_steps
    T = config.mesh.per_replica_batch * model.seq
    stream = T * model.d_model
    # A norm of its own on each shard stands behind the copy to the shards, whose gradient is then float32.
    back = F32 if model.norm == "layernorm-desync" else width
    yield "all-reduce", model.layers * A, stream * width
    yield "all-reduce", (model.layers + 1) * A, stream * back
    yield "all-reduce", A, stream * F32  # the embedding
    C = min(model.logit_chunk, T)
    yield "all-reduce", math.ceil(T / C) * A, C * F32  # the largest logit
    yield "all-reduce", math.ceil(T / C) * A, 2 * C * F32  # the normaliser and the target's logit


def _evaluation(config: Config, mp: int, width: int) -> _Runs:
    model, T = config.model, config.mesh.per_replica_batch * config.model.seq
    yield "all-reduce", model.layers, T * model.d_model * width
    yield "all-reduce", 1, T * model.d_model * F32
    C = min(model.logit_chunk, T)
    yield "all-reduce", math.ceil(T / C), C * F32
    yield "all-reduce", math.ceil(T / C), 3 * C * F32


def _generation(config: Config, mp: int, width: int) -> _Runs:
    model, rows = config.model, config.mesh.per_replica_batch
    yield "all-reduce", model.layers, rows * model.d_model * width
    yield "all-reduce", 1, rows * model.d_model * F32
    yield "all-reduce", 1, rows * model.n_vocab * F32


def _state(config: Config, mp: int, width: int) -> _Runs:
    """What replicas exchange of weights and gradients. See docs/parallelism.md."""
    model, mesh = config.model, config.mesh
    matrices = vectors = layer = embedding = output = 0
    for kind in parameters.kinds(model, mp):
        size = math.prod(kind.local_shape(mp))
        if kind.zero_axis is None:
            vectors += size
            continue
        matrices += size
        if kind.stacked:
            layer += size // model.layers
        elif kind.module == parameters.EMBEDDING:
            embedding += size
        else:
            output += size
    if mesh.zero_stage == 0:
        yield "all-reduce", 1, (matrices + vectors) * F32
        return
    yield "all-reduce", 1, vectors * F32
    if mesh.zero_stage == 1:
        yield "reduce-scatter", 1, matrices * F32
        yield "all-gather", 1, matrices * F32
        return
    A, early = mesh.gradient_accumulation_steps, config.version == 2 and config.run.early_collect
    yield "all-gather", (1 if early else 2) * A * model.layers, layer * width
    yield "all-gather", A, embedding * F32
    yield "all-gather", 2 * A, output * width
    yield "reduce-scatter", (1 if early else A) * model.layers, layer * F32
    yield "reduce-scatter", A, (embedding + output) * F32
