"""How much memory activations take on one device: about what the compiler needs, by the shapes alone.

Letters: D d_model, HK all heads' dims, F the feed-forward's width, v the vocabulary rows of a shard.
"""

from __future__ import annotations

import math

from mesh_transformer import parameters
from mesh_transformer.config import Config
from mesh_transformer.config_groups import ModelConfig

QUERY_BLOCK = 128  # rows of attention's scores that are worked on at once
# Blocks that an unrolled program has at most: on a CPU XLA works on them side by side, and keeps the scores of all.
UNROLLED = 4


def kept_bytes(model: ModelConfig, mp: int, tokens: int, remat: str, itemsize: int) -> int:
    """Bytes kept from the forward pass of a microbatch of `tokens` positions to its backward pass.

    Every layer's input; with `dots` queries, keys, values, attention's and the first matrix's outputs too, which are
    split over shards; with `none` all between them.  itemsize: bytes of a number of the compute dtype.
    """
    D, HK, F = model.d_model, model.n_heads * model.d_head, model.d_ff
    per_position = {"full": D, "dots": D + (4 * HK + F) / mp, "none": 4 * D + (8 * HK + 5.25 * F) / mp}[remat]
    return int(model.layers * tokens * per_position * itemsize)


def activation_bytes(model: ModelConfig, mp: int, tokens: int, remat: str, itemsize: int) -> int:
    """`kept_bytes`, and the most that is at work at once: one layer's backward pass, or the output head's chunk.

    The factors are fitted to what XLA plans on a CPU in float32 (within a quarter, tests/test_memory.py). Attention
    works tile by tile and has no scores to speak of, except with t5's bias, and in sequences of a single block.
    """
    D, HK, F, v = model.d_model, model.n_heads * model.d_head, model.d_ff, model.n_vocab / mp
    layer = tokens * (5 * D + (2 * HK + 5 * F) / mp) * itemsize
    if model.pe == "t5" or model.seq <= QUERY_BLOCK:
        layer += 2 * tokens * _score_rows(model.seq) * model.n_heads / mp * 4  # scores, float32, and their gradient
    head = 2 * min(model.logit_chunk, tokens) * v * 4  # logits and their gradient are float32
    return kept_bytes(model, mp, tokens, remat, itemsize) + int(max(layer, head))


def _score_rows(seq: int) -> float:
    """Of a head's scores [seq, seq] as many rows as are there at once: a block of each span, up to the span's end."""
    spans = min(UNROLLED, math.ceil(seq / QUERY_BLOCK))
    return min(seq, QUERY_BLOCK) * (spans + 1) / 2


def remat_that_fits(config: Config, dp: int, mp: int, itemsize: int, limit: int | None) -> str:
    """`dots` where what it keeps fits beside the state into `limit` bytes of a device, else `full`.

    A platform that does not tell its memory (CPU) gets `dots`, the fastest there too.
    """
    if not limit:
        return "dots"
    model = config.model
    # masters, two moments and a gradient in float32
    parts = {0: 1, 1: 16 / (8 + 8 / dp), 3: dp}[config.mesh.zero_stage]
    state = parameters.count(model, mp) / mp * 16 / parts
    kept = kept_bytes(model, mp, config.mesh.per_replica_batch * model.seq, "dots", itemsize)
    return "dots" if state + 1.3 * kept < 0.85 * limit else "full"
