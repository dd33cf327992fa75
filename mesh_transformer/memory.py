"""How much memory activations take on one device: about what the compiler needs, by the shapes alone.

Letters: D d_model, HK all heads' dims, F the feed-forward's width, v the vocabulary rows of a shard.
"""

from __future__ import annotations

from mesh_transformer.config_groups import ModelConfig


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

    The factors are fitted to what XLA plans on a CPU in float32 (within a quarter, tests/test_memory.py). Attention's
    scores, half a square, are float32; where it is fused (cuDNN) they are not there.
    """
    D, HK, F, v = model.d_model, model.n_heads * model.d_head, model.d_ff, model.n_vocab / mp
    scores = tokens * model.seq / 2 * model.n_heads / mp * 4
    layer = tokens * (8 * D + (2 * HK + 2 * F) / mp) * itemsize + scores
    head = 2 * min(model.logit_chunk, tokens) * v * 4  # logits and their gradient are float32
    return kept_bytes(model, mp, tokens, remat, itemsize) + int(max(layer, head))
