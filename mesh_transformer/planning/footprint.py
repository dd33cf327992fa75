"""Bytes that come on top of the training state on one device, worked out from the shapes.

On TPUs XLA turns the weights of all layers into the compute dtype once a step and keeps these copies; the forward pass
keeps what `remat` says of every layer; and something is at work: a chunk of the output head, or a layer's backward
pass. CPUs have no copies; what is at work there is as `memory` says.

Letters: T tokens of a microbatch, D d_model, W all heads' dims, F d_ff, v vocabulary rows of a shard, C positions of a
chunk of the output head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from mesh_transformer import memory, parameters

if TYPE_CHECKING:
    from mesh_transformer.config import Config, ModelConfig
    from mesh_transformer.planning.chips import Topology

F32 = 4
# Fitted on the grid of docs/planning.md: how many streams [T, D] and parts of layers [T, (W + F) / mp] are at work at
# once, and the share of a chip's vector memory that takes of this.
STREAMS, PARTS, ON_CHIP = 3.7, 2.0, 0.44


class Footprint(NamedTuple):
    """Bytes: `copies` of weights in the compute dtype; `activations` kept for the backward pass; `temporaries`."""

    copies: float
    activations: float
    temporaries: float


def footprint_of(config: Config, topology: Topology, dp: int, task: str, remat: str, width: int) -> Footprint:
    """What a step of `task` takes beside its state. width: bytes of a number of the compute dtype."""
    model, mp = config.model, config.mesh.cores_per_replica
    T = config.mesh.per_replica_batch * model.seq
    if task == "generate":
        return _generating(model, mp, config.mesh.per_replica_batch, width)
    if topology.chip.name == "cpu":
        kept = memory.kept_bytes(model, mp, T, remat, width) if task == "train" else 0
        most = memory.activation_bytes(model, mp, T, remat, width)
        return Footprint(0, kept, most - memory.kept_bytes(model, mp, T, remat, width))
    D, v = model.d_model, model.n_vocab / mp
    chunk = min(model.logit_chunk, T) * v * F32
    stream = STREAMS * T * D * width
    if task == "eval":
        return Footprint(0, 0, stream + chunk)
    part: float = PARTS * T * (model.d_attention + model.version * model.d_ff) / mp * width
    cut = dp if config.mesh.zero_stage == 3 else 1
    gathered = gathers_all(config, dp)
    layers = float(model.layers * sum(_matrices(model, mp)))
    copies = layers / cut * width if width < F32 else 0
    if gathered:  # gradients are as large, in the compute dtype too; blocks are kept from one microbatch to the next
        copies = (2 * layers + (layers / cut if config.mesh.gradient_accumulation_steps > 1 else 0)) * width
    blocks = 4 if cut > 1 else 1  # see `collected_vocabulary`
    head = D * v * F32 / blocks
    if cut > 1 and not gathered:  # a gathered matrix, and its gradient
        part += max(_matrices(model, mp)) * (width + F32)
    copied = D * v / blocks * width if width < F32 else 0
    work = max(0.0, stream + max(part, head + chunk) - ON_CHIP * topology.chip.vector_memory)
    return Footprint(copies, kept_bytes(model, mp, T, remat, width), copied + work)


def gathers_all(config: Config, dp: int) -> bool:
    """Whether ZeRO's stage 3 gathers all layers' weights at once."""
    return config.version == 2 and config.run.early_collect and config.mesh.zero_stage == 3 and dp > 1


def accumulated_bytes(config: Config, dp: int) -> int:
    """Bytes that gradients take at the fullest moment beyond the device's blocks of them, where all layers are gathered
    at once: TPUs' XLA adds up the microbatches' gradients whole, and cuts the sum. Of a single microbatch the layers'
    blocks come when what is gathered goes."""
    if not gathers_all(config, dp):
        return 0
    whole = config.model.layers * sum(_matrices(config.model, config.mesh.cores_per_replica)) * F32
    return (whole if config.mesh.gradient_accumulation_steps > 1 else 0) - whole // dp


def kept_bytes(model: ModelConfig, mp: int, tokens: int, remat: str, width: int) -> float:
    """As `memory.kept_bytes`, as TPUs keep it."""
    D, W, F = model.d_model, model.d_attention, model.d_ff
    gates = F if model.version == 2 else 0
    per_position = {
        "full": D, "dots": D + (4 * W + F + gates) / mp, "none": 7 * D + (8 * W + 5.25 * F + 3 * gates) / mp,
    }[remat]  # fmt: skip
    return model.layers * tokens * per_position * width


def _matrices(model: ModelConfig, mp: int) -> list[int]:
    """Numbers of a layer's matrices on one shard."""
    kinds = (kind for kind in parameters.kinds(model, mp) if kind.stacked and kind.zero_axis is not None)
    return [math.prod(kind.local_shape(mp)) // model.layers for kind in kinds]


def _generating(model: ModelConfig, mp: int, rows: int, width: int) -> Footprint:
    """Reading a prompt of 512 tokens takes more than a token's step."""
    T = rows * min(512, model.seq)
    stream = 4 * T * model.d_model * width + 2 * T * (model.d_attention + model.d_ff) / mp * width
    return Footprint(0, 0, stream + 4 * rows * model.n_vocab * F32)
