"""The network of version 1 in plain numpy, float64, one text at a time: written from the model's definition.

It shares nothing with the package but the names of the parameters, so that it can be held against any of its paths.
"""

from __future__ import annotations

import math

import numpy as np

SHARD = "causal_transformer_shard/~/"
EMBEDDING, LAYERS = SHARD + "embedding_shard", SHARD + "transformer_layer_shard"
PROJECTION, RELATIVE = SHARD + "projection_shard", SHARD + "relative_position_embs"


def logits(params, model, tokens, window=None):
    """Logits [S, V] of tokens [S], each position attending to itself and the window - 1 before it (None: to all)."""
    params = {module: {k: np.asarray(v, np.float64) for k, v in group.items()} for module, group in params.items()}
    S, H = len(tokens), model.n_heads
    embedding = params[EMBEDDING]
    x = embedding["w"][tokens] + embedding["b"]
    if model.pe == "fixed":
        x = x + embedding["pos_embs"][:S]
    distance = np.arange(S)[:, None] - np.arange(S)[None, :]
    hidden = (distance < 0) | (distance >= (window or S))
    bias = 0.0
    if model.pe == "t5":
        bias = params[RELATIVE]["rel_embedding"][:, t5_buckets(distance)]
    for i in range(model.layers):
        layer = {k: v[i] for k, v in params[LAYERS].items()}
        # One branch for each shard's norm; without layernorm-desync there is one norm, so one branch.
        for part, h in branches(x, layer, model):
            q, k, v = (h @ layer[name][:, part] for name in ("q", "k", "v"))
            q, k, v = (a.reshape(S, -1, model.d_head).transpose(1, 0, 2) for a in (q, k, v))
            if model.pe == "rotary":
                q, k = rotated(q, model.pe_rotary_dims), rotated(k, model.pe_rotary_dims)
            scores = q @ k.transpose(0, 2, 1) / math.sqrt(model.d_head)
            heads = slice(part.start // model.d_head, part.stop // model.d_head)
            scores = scores + (bias[heads] if np.ndim(bias) else bias)
            scores = np.where(hidden, -np.inf, scores)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended = (weights / weights.sum(-1, keepdims=True)) @ v
            x = x + attended.transpose(1, 0, 2).reshape(S, -1) @ layer["o"][part]
            wide = slice(4 * part.start, 4 * part.stop)
            inner = h @ layer["w1"][:, wide] + layer["b1"][wide]
            gelu = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
            x = x + gelu @ layer["w2"][wide]
        x = x + layer["b2"]
    projection, out = params[PROJECTION], np.zeros((S, model.n_vocab))
    for part, h in branches(x, projection, model):
        share = slice(part.start * model.n_vocab // (H * model.d_head), part.stop * model.n_vocab // (H * model.d_head))
        out[:, share] = h @ projection["w"][:, share] + projection["b"][share]
    return out


def branches(x, params, model):
    """(columns of the D heads * head size, normalised x [S, D]) of each group of shards that shares a norm."""
    D = model.d_model
    scale, offset = params["norm_scale"], params.get("norm_offset", 0.0)
    if model.norm != "layernorm-desync":
        return [(slice(0, D), normalised(x, scale, offset, model.norm))]
    width = D // len(scale)
    return [
        (slice(m * width, (m + 1) * width), normalised(x, scale[m], offset[m], model.norm)) for m in range(len(scale))
    ]


def normalised(x, scale, offset, norm):
    if norm.startswith("layernorm"):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    else:
        x = x / (np.sqrt((x**2).sum(-1, keepdims=True)) + 1e-5)
    return x * scale + (0.0 if norm == "layernorm-nobias" else offset)


def rotated(x, dims):
    """Interleaved pairs (2i, 2i + 1) of [H, S, K] turned by position / 10000^(2i / dims)."""
    angle = np.arange(x.shape[1])[:, None] / 10000 ** (np.arange(0, dims, 2) / dims)
    pairs = (x[..., 0:dims:2] + 1j * x[..., 1:dims:2]) * np.exp(1j * angle)
    out = x.copy()
    out[..., 0:dims:2], out[..., 1:dims:2] = pairs.real, pairs.imag
    return out


def t5_buckets(distance):
    """Exact below 16, then 16 logarithmic buckets up to 128."""
    n = np.maximum(distance, 0)
    far = 16 + np.floor(np.log(np.maximum(n, 1) / 16) / math.log(8) * 16 + 1e-9).astype(int)
    return np.where(n < 16, n, np.minimum(far, 31))
