"""FLOPs of the matrix products of one device's step, worked out from the shapes as the step computes them.

Letters: b sequences of a microbatch, S positions, T = b S tokens, D d_model, W all heads' dims, F d_ff, V vocabulary,
L layers, A microbatches. Elementwise work is not counted: it is bound by memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mesh_transformer.memory import QUERY_BLOCK, UNROLLED

if TYPE_CHECKING:
    from mesh_transformer.config import Config, ModelConfig


def flops_of(config: Config, dp: int, task: str, remat: str) -> float:
    """Two for each multiply-add, of one device's step."""
    mesh = config.mesh
    if task == "generate":
        return _generation(config.model, mesh.cores_per_replica, mesh.per_replica_batch)
    forward, again, attention = layer_products(config.model, mesh.cores_per_replica, mesh.per_replica_batch, task)
    T = mesh.per_replica_batch * config.model.seq
    shard = config.model.n_vocab / mesh.cores_per_replica
    head = 2 * _whole(T, config.model.logit_chunk) * config.model.d_model * shard
    if task == "eval":
        return config.model.layers * (forward + attention) + head
    # Backward: two products for each forward one; of attention's two five, since its weights are computed again.
    # With remat full the forward pass's scores and those of the backward pass are one product to XLA.
    layer = 3 * forward + 3.5 * attention + ((again + attention / 2) if remat == "full" else 0)
    # Cut over replicas, the output matrix is gone through once more, see `collected_vocabulary`.
    passes = 4 if mesh.zero_stage == 3 and dp > 1 else 3
    return mesh.gradient_accumulation_steps * (config.model.layers * layer + passes * head)


def layer_products(model: ModelConfig, mp: int, rows: int, task: str) -> tuple[float, float, float]:
    """FLOPs of a layer's forward pass on one shard: of the products with weights; of those among them that a backward
    pass needs again (all but the two whose results are only added to the stream); and of attention."""
    D, W, F, S = model.d_model, model.d_attention, model.d_ff, model.seq
    T, into = rows * S, 2 if model.version == 2 else 1
    forward, again = 2 * T * D * (4 * W + (into + 1) * F) / mp, 2 * T * D * (3 * W + into * F) / mp
    wide = W if W // mp % model.attention_width else W / mp  # merged heads, which every shard computes, see `qkv`
    return forward, again, 2 * rows * wide * S * S * (1 + 1 / _blocks(S, model.pe == "t5" or task == "eval"))


def _blocks(S: int, biased: bool) -> int:
    """Blocks of query rows, each of which attends to the keys up to its end: of plain attention's, see
    `fused_attention.query_blocks`; where there is a bias or keys are hidden, the spans of `attention`."""
    rows = QUERY_BLOCK * max(1, math.ceil(S / (UNROLLED * QUERY_BLOCK))) if biased else max(QUERY_BLOCK, S // 16)
    return math.ceil(S / rows)


def _generation(model: ModelConfig, mp: int, rows: int) -> float:
    """Of one token of every row. Attention of a single query is no matrix product to XLA, and bound by memory."""
    D, W = model.d_model, model.d_attention
    matrices = 4 * W + (3 if model.version == 2 else 2) * model.d_ff
    return model.layers * 2 * rows * D * matrices / mp + 2 * rows * D * model.n_vocab / mp


def _whole(count: int, chunk: int) -> int:
    """`count`, filled up to whole chunks."""
    chunk = min(chunk, count)
    return math.ceil(count / chunk) * chunk
