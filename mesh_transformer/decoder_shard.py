"""`DecoderShard`: what one shard computes of prompts, chunks and single tokens against a cache of keys and values.

Letters as in `layers`, and: b rows of this replica (a row is one text), n of them that a call feeds, T tokens of each,
C slots of the cache. A row's tokens are counted from 0, which is also where rotary angles and the `fixed` table begin,
so a row does not depend on how long the others are.

The cache is a ring: position p lives in slot p mod C, rotated at its absolute position. C is the model's `seq` at
most, so past the context a new token overwrites the oldest one and attends to the newest `seq` positions, itself
included (with the window `reference` one fewer). Shorter texts get a smaller ring, so that no work is proportional to
`seq` for a short text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesh_transformer import attention, panels
from mesh_transformer.collectives import shard_index, sum_over_shards
from mesh_transformer.config import ModelConfig
from mesh_transformer.cross_entropy import PositionLosses, position_losses
from mesh_transformer.decoder_weights import each_layer
from mesh_transformer.layers import LayerParams, join, normalise, qkv, rotary_tables
from mesh_transformer.sampler import Leaf
from mesh_transformer.transformer_shard import CausalTransformerShard

# Each layer's parameters where they stand alone (see `decoder_weights`); None where the stacked ones are scanned.
Layers: TypeAlias = "tuple[LayerParams, ...] | None"

# Angles of any position below their product come from two short tables (see `angles`).
_FINE, _COARSE = 512, 512
MAX_POSITIONS = _FINE * _COARSE


def window_of(model: ModelConfig, window: str) -> int:
    """How many positions a token attends to at most, itself included."""
    return model.seq if window == "full" else max(model.seq - 1, 1)


def angles(position_B: jax.Array, dims: int) -> tuple[jax.Array, jax.Array]:
    """sin and cos [B, 1, R/2] of positions below MAX_POSITIONS, right to float32.

    The angle's coarse and fine part are looked up in tables made in float64 and joined by the addition theorem: an
    angle itself loses its precision in float32 as positions grow, and a table of all positions would be long.
    """
    coarse = attention.rotary_table(np.arange(_COARSE) * _FINE, dims)
    fine = attention.rotary_table(np.arange(_FINE), dims)
    sin_a, cos_a = (jnp.asarray(t)[position_B // _FINE] for t in coarse)
    sin_b, cos_b = (jnp.asarray(t)[position_B % _FINE] for t in fine)
    return (sin_a * cos_b + cos_a * sin_b)[:, None], (cos_a * cos_b - sin_a * sin_b)[:, None]


class DecoderShard(CausalTransformerShard):
    """One shard's prefill, chunk and step; the parameters are `CausalTransformerShard`'s, by the same names.

    `head`: the output head's matrix where it is not among them (see `decoder_weights.Weights`).
    """

    def __init__(self, model: ModelConfig, mp: int, window: str = "full", head: jax.Array | None = None):
        super().__init__(model, mp)
        self.mp, self.window, self.head = mp, window_of(model, window), head

    def prefill(self, layers: Layers, tokens_bT: jax.Array, length_b: jax.Array) -> tuple[jax.Array, Leaf, Leaf]:
        """The whole prompts at once, T at most the window: logits behind each row's last token, float32 [b, V], and
        the keys and values of all positions, [b, h, T, K] a layer. What stands behind a row's end is computed too, and
        never attended to."""
        x_TD, keys, values = self.cached(layers, tokens_bT)
        last = jnp.arange(len(length_b), dtype=jnp.int32) * tokens_bT.shape[1] + length_b - 1
        return self.whole_logits(x_TD[last]), keys, values

    def cached(self, layers: Layers, tokens_bT: jax.Array) -> tuple[jax.Array, Leaf, Leaf]:
        """The residual stream behind the last layer, [b*T, D], and the keys and values, [b, h, T, K] a layer."""
        model, (batch, T) = self.model, tokens_bT.shape
        positions = jnp.tile(jnp.arange(T, dtype=jnp.int32), batch)
        x_TD = self.embed(tokens_bT.reshape(-1), positions, jnp.dtype(model.compute_dtype))
        tables = rotary_tables(model, T)
        bias = attention.t5_bias_of(self.relative() if self.relative is not None else None)

        def body(x: jax.Array, params: LayerParams) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            h_TD = normalise(x, params, model.norm)
            q, k, v = qkv(h_TD, params, model, batch, tables)
            return join(x, attention.causal_attention(q, k, v, bias), h_TD, params), (k, v)

        return self._through(layers, body, x_TD)

    def _through(self, layers: Layers, body: Callable[..., Any], x: jax.Array, *caches: Leaf) -> Any:
        """`body(x, params, *the layer's caches) -> (x, (keys, values))` of one layer after the other."""
        if layers is None:
            x, (keys, values) = lax.scan(lambda x, inputs: body(x, *inputs), x, (self.layers(), *caches))
            return x, keys, values
        pairs = []
        for params, *cache in zip(layers, *caches, strict=True):
            x, pair = body(x, params, *cache)
            pairs.append(pair)
        keys, values = zip(*pairs, strict=True)
        return x, keys, values

    def extend(
        self,
        layers: Layers,
        keys: Leaf,
        values: Leaf,
        row_n: jax.Array,
        tokens_nT: jax.Array,
        start_n: jax.Array,
        count_n: jax.Array,
    ) -> tuple[jax.Array, Leaf, Leaf]:
        """Several tokens of each of n rows into the cache: logits behind the last that counts, float32 [n, V], and the
        cache, [b, h, C, K] a layer, with these positions written.

        Entry i feeds row `row_n[i]` with `count_n[i]` (0 to T, T at most C) of its tokens, from position `start_n[i]`
        on; no row is fed by two entries. What follows the count is filler: computed, never written, never attended to.
        Rows that no entry with a count names are untouched.
        """
        T, C = tokens_nT.shape[1], _slots(keys)
        mine = each_layer(lambda x: x[row_n], keys), each_layer(lambda x: x[row_n], values)
        x_TD, new_keys, new_values = self.chunk(layers, *mine, tokens_nT, start_n, count_n)
        offset_T = jnp.arange(T, dtype=jnp.int32)
        position_nT = start_n[:, None] + offset_T[None, :]
        # Slot C does not exist, and what is written there is dropped.
        slot_nT = jnp.where(offset_T[None, :] < count_n[:, None], position_nT % C, C)

        def put(cache: jax.Array, new: jax.Array) -> jax.Array:
            return cache.at[row_n[:, None], :, slot_nT].set(new.transpose(0, 2, 1, 3), mode="drop")

        keys, values = each_layer(put, keys, new_keys), each_layer(put, values, new_values)
        last = jnp.arange(len(count_n), dtype=jnp.int32) * T + jnp.maximum(count_n - 1, 0)
        return self.whole_logits(x_TD[last]), keys, values

    def chunk(
        self,
        layers: Layers,
        keys: Leaf,
        values: Leaf,
        tokens_nT: jax.Array,
        start_n: jax.Array,
        count_n: jax.Array,
    ) -> tuple[jax.Array, Leaf, Leaf]:
        """T tokens a row against these rows' caches, [n, h, C, K] a layer, of the positions before `start_n`: the
        residual stream behind the last layer, [n*T, D], and the new keys and values, [n, h, T, K] a layer.

        The cache and the chunk stand side by side rather than in one ring: at the ring's seam the chunk's later tokens
        overwrite what its first ones still attend to.
        """
        model, (n, T), C = self.model, tokens_nT.shape, _slots(keys)
        offset_T = jnp.arange(T, dtype=jnp.int32)
        position_nT = start_n[:, None] + offset_T[None, :]
        # Slot s holds the newest position below start with p mod C == s; below 0 it holds nothing of this text.
        back_nC = (start_n[:, None] - 1 - jnp.arange(C, dtype=jnp.int32)[None, :]) % C
        held_nC = start_n[:, None] - 1 - back_nC
        distance = jnp.concatenate(
            [position_nT[:, :, None] - held_nC[:, None, :], jnp.tile(offset_T[:, None] - offset_T[None, :], (n, 1, 1))],
            axis=2,
        )  # fmt: skip
        exists = jnp.concatenate([held_nC >= 0, offset_T[None, :] < count_n[:, None]], axis=1)
        visible = (exists[:, None, :] & (distance >= 0) & (distance < self.window))[:, None]
        x_TD = self._embedded(tokens_nT.reshape(-1), position_nT.reshape(-1))
        tables, bias = self._tables(position_nT), self._distance_bias(distance, C + T)

        def body(x: jax.Array, params: LayerParams, keys: jax.Array, values: jax.Array) -> Any:
            h_TD = normalise(x, params, model.norm)
            q, k, v = qkv(h_TD, params, model, n, tables)
            seen = jnp.concatenate([keys, k], axis=2), jnp.concatenate([values, v], axis=2)
            return join(x, attention.attend(q, *seen, visible, bias), h_TD, params), (k, v)

        return self._through(layers, body, x_TD, keys, values)

    def score(
        self,
        layers: Layers,
        keys: Leaf,
        values: Leaf,
        row_n: jax.Array,
        tokens_nT: jax.Array,
        start_n: jax.Array,
        count_n: jax.Array,
        target_nT: jax.Array,
    ) -> PositionLosses:
        """The losses [n, T] of targets behind each of the tokens, which are read as by `extend` and written nowhere."""
        h_TD, w, b = self.projection(self._read(layers, keys, values, row_n, tokens_nT, start_n, count_n))
        losses = position_losses(h_TD, w, b, target_nT.reshape(-1), self.model.logit_chunk, self.model.z_loss)
        return PositionLosses(*(x.reshape(target_nT.shape) for x in losses))

    def behind(
        self,
        layers: Layers,
        keys: Leaf,
        values: Leaf,
        row_n: jax.Array,
        tokens_nT: jax.Array,
        start_n: jax.Array,
        count_n: jax.Array,
    ) -> jax.Array:
        """Logits behind each of the tokens, float32 [n*T, V], which are read as by `extend` and written nowhere."""
        return self.whole_logits(self._read(layers, keys, values, row_n, tokens_nT, start_n, count_n))

    def _read(self, layers: Layers, keys: Leaf, values: Leaf, row_n: jax.Array, *chunk: jax.Array) -> jax.Array:
        """The residual stream behind a chunk of the rows `row_n`, [n*T, D]."""
        mine = each_layer(lambda x: x[row_n], keys), each_layer(lambda x: x[row_n], values)
        return self.chunk(layers, *mine, *chunk)[0]

    def step(
        self, layers: Layers, keys: Leaf, values: Leaf, token_b: jax.Array, position_b: jax.Array
    ) -> tuple[jax.Array, Leaf, Leaf]:
        """One token of each row into the cache: logits behind it, float32 [b, V], and the cache."""
        model, batch, C = self.model, token_b.shape[0], _slots(keys)
        # A single row is written twice: of one write XLA's CPU backend makes an update for which it copies the cache.
        written = jnp.zeros(2, jnp.int32) if batch == 1 else jnp.arange(batch, dtype=jnp.int32)
        slot_b = position_b[written] % C
        x_bD = self._embedded(token_b, position_b)
        tables = self._tables(position_b[:, None])
        # Slot s holds the newest position p <= position with p mod C == s; before the text's beginning it is empty.
        distance_bC = (position_b[:, None] - jnp.arange(C, dtype=jnp.int32)[None, :]) % C
        visible = ((distance_bC <= position_b[:, None]) & (distance_bC < self.window))[:, None, None, :]
        bias = self._distance_bias(distance_bC[:, None, :], C)

        def body(x: jax.Array, params: LayerParams, keys: jax.Array, values: jax.Array, *layer: jax.Array) -> Any:
            h_bD = normalise(x, params, model.norm)
            q, k, v = qkv(h_bD, params, model, batch, tables)
            keys = keys.at[(*layer, written, slice(None), slot_b)].set(k[written, :, 0])
            values = values.at[(*layer, written, slice(None), slot_b)].set(v[written, :, 0])
            seen = (keys[layer], values[layer]) if layer else (keys, values)
            return join(x, attention.attend(q, *seen, visible, bias), h_bD, params), (keys, values)

        if layers is not None:
            x_bD, keys, values = self._through(layers, body, x_bD, keys, values)
        else:
            # The stacked cache is carried, since scanning over it would copy it.
            def scanned(carry: Any, inputs: Any) -> tuple[Any, None]:
                x, (keys, values) = body(carry[0], inputs[1], *carry[1:], inputs[0])
                return (x, keys, values), None

            numbered = (jnp.arange(model.layers, dtype=jnp.int32), self.layers())
            (x_bD, keys, values), _ = lax.scan(scanned, (x_bD, keys, values), numbered)
        return self.whole_logits(x_bD), keys, values

    def _embedded(self, tokens_N: jax.Array, position_N: jax.Array) -> jax.Array:
        """[N, D]. Filler may stand behind the end of a `fixed` table, where looking up would give NaN."""
        if self.model.pe == "fixed":
            position_N = jnp.minimum(position_N, self.model.seq - 1)
        return self.embed(tokens_N, position_N, jnp.dtype(self.model.compute_dtype))

    def _tables(self, position_nT: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """sin and cos [n, T, R/2] of a rotary model."""
        if self.model.pe != "rotary":
            return None
        sin, cos = angles(position_nT.reshape(-1), self.model.pe_rotary_dims)
        return sin.reshape(*position_nT.shape, -1), cos.reshape(*position_nT.shape, -1)

    def _distance_bias(self, distance_ntT: jax.Array, most: int) -> jax.Array | None:
        """The t5 bias [n, h, t, T] of distances query - key below `most`; what is further is masked anyway."""
        if self.relative is None:
            return None
        buckets = jnp.asarray(attention.t5_bucket(np.arange(most)))[jnp.clip(distance_ntT, 0, most - 1)]
        return self.relative().astype(jnp.float32)[:, buckets].transpose(1, 0, 2, 3)

    def whole_logits(self, x_bD: jax.Array) -> jax.Array:
        """Logits of the whole vocabulary, float32 [b, V], equal on all shards: each puts its part among zeros and the
        parts are summed, so that the result is known to be equal, which a gather's is not."""
        h_bD, w, b = self.projection(x_bD, w=self.head)
        part = panels.product(h_bD, w) + b.astype(jnp.float32)[None, :]
        zeros = jnp.zeros((len(part), len(b) * self.mp), jnp.float32)
        return sum_over_shards(lax.dynamic_update_slice(zeros, part, (0, shard_index() * len(b))))


def _slots(cache: Leaf) -> int:
    """C of a cache."""
    return int((cache[0] if isinstance(cache, tuple) else cache).shape[-2])


def apply(model: ModelConfig, mp: int, method: str, window: str = "full") -> Callable[..., Any]:
    """`DecoderShard(...).method(...)` as a pure function of (Weights, *arguments)."""
    call = lambda head, *args: getattr(DecoderShard(model, mp, window, head), method)(*args)  # noqa: E731
    transformed: Any = hk.without_apply_rng(hk.transform(call))
    return lambda weights, *args: transformed.apply(weights.params, weights.head, weights.layers, *args)
