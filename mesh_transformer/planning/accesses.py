"""Bytes that one device's step reads from and writes to memory, worked out from the shapes.

Letters: as in `arithmetic`. `FACTORS` are fitted on the grid of docs/planning.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mesh_transformer import parameters

if TYPE_CHECKING:
    from mesh_transformer.config import Config
    from mesh_transformer.planning.chips import Topology

F32 = 4
# Of what lives inside a layer only a part reaches memory where a chip has a large vector memory: this many streams
# [T, D] share it.
INSIDE, WORKING_SET = ("streams", "parts", "scores"), 10
FACTORS = {
    "weights": 1.0, "gradients": 5.0, "streams": 45.0, "parts": 30.0, "scores": 8.0, "head": 3.0, "logits": 2.0,
    "state": 1.2,
}  # fmt: skip


def accesses_of(config: Config, topology: Topology, dp: int, task: str, remat: str, width: int) -> float:
    """Bytes of one device's step of `task`. width: bytes of a number of the compute dtype."""
    model, mesh = config.model, config.mesh
    mp = mesh.cores_per_replica
    whole = sum(math.prod(kind.local_shape(mp)) for kind in parameters.kinds(model, mp))
    if task == "generate":
        cache = 2 * model.layers * mesh.per_replica_batch * model.seq * model.d_attention / mp
        return (whole + cache) * width
    stream = mesh.per_replica_batch * model.seq * model.d_model * width
    off_chip = WORKING_SET * stream / (WORKING_SET * stream + topology.chip.vector_memory)
    parts = features(config, dp, task, remat, width)
    return sum(FACTORS[name] * count * (off_chip if name in INSIDE else 1) for name, count in parts.items())


def features(config: Config, dp: int, task: str, remat: str, width: int) -> dict[str, float]:
    """What is gone through, in bytes of going through it once; a step goes through each of them a few times.

    `weights`: all layers' matrices, forward, backward and again with remat full; `gradients`: of these, in float32;
    `streams` [T, D], `parts` [T, (W + F) / mp] and attention's `scores`, in float32, of all layers; `head`: the output
    matrix, once a chunk; `logits`, in float32; `state`: weights and moments, updated.
    """
    model, mesh = config.model, config.mesh
    mp, T = mesh.cores_per_replica, mesh.per_replica_batch * model.seq
    A = mesh.gradient_accumulation_steps if task == "train" else 1
    layers = whole = 0
    for kind in parameters.kinds(model, mp):
        size = math.prod(kind.local_shape(mp))
        whole += size
        layers += size if kind.stacked and kind.zero_axis is not None else 0
    training = task == "train"
    passes = (2 + 0.8 * (remat == "full")) if training else 1
    part = (model.d_attention + model.version * model.d_ff) / mp
    chunks = math.ceil(T / min(model.logit_chunk, T))
    cut = dp if mesh.zero_stage else 1
    return {
        "weights": A * layers * width * passes,
        "gradients": A * layers * F32 if training else 0,
        "streams": A * model.layers * T * model.d_model * width * (passes / 2),
        "parts": A * model.layers * T * part * width * (passes / 2),
        "scores": A * model.layers * T * model.seq / 2 * model.n_heads / mp * F32 * (passes / 2),
        "head": A * chunks * model.d_model * model.n_vocab / mp * (F32 if training else width),
        "logits": A * T * model.n_vocab / mp * F32,
        "state": whole * F32 * (1 + 6 / cut) if training else 0,
    }
