"""Prefill and one-token steps against a cache of keys and values, with the token loop on the devices.

Letters as in `layers`, and: B rows of all replicas, b rows of this replica, T length of the prompts' bucket, C slots
of the cache, N tokens of a chunk. A row is one text. Its tokens are counted from 0, which is also where rotary angles
and the `fixed` table begin, so a row does not depend on how long the others are.

The cache is a ring: position p lives in slot p mod C, rotated at its absolute position. C is the model's `seq` at
most, so past the context a new token overwrites the oldest one and attends to the newest `seq` positions, itself
included. Shorter texts get a smaller ring (a bucket), so that no work is proportional to `seq` for a short text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer import attention, parameters, sampling, steps
from mesh_transformer.collectives import copy_to_replicas, shard_index, sum_over_replicas, sum_over_shards
from mesh_transformer.config import ModelConfig
from mesh_transformer.layers import join, normalise, qkv, rotary_tables
from mesh_transformer.mesh import DP, MP
from mesh_transformer.sampling import Leaf, Sampler
from mesh_transformer.state import Params
from mesh_transformer.transformer_shard import CausalTransformerShard

CHUNK = 32  # tokens that one call of the token loop can return; fewer are asked for without another compilation
RUNNING, STOPPED, FULL = 0, 1, 2  # why a row ended: it has not, a stop id, its limit

# Angles of any position below their product come from two short tables (see `angles`).
_FINE, _COARSE = 512, 512
MAX_POSITIONS = _FINE * _COARSE


class Rows(NamedTuple):
    """Everything that decoding carries from token to token; one entry for each row.

    `keys` and `values` [L, B, H, C, K] in the compute dtype; int32 [B]: `token`, the newest, whose key is not in the
    cache yet, `position`, where it goes, `drawn`, the tokens drawn so far, `limit`, when to stop drawing, `status`;
    `stop` int32 [B, n], ids that end a row (-1 never does); `sampler`, how tokens are drawn.
    """

    keys: Leaf
    values: Leaf
    token: Leaf
    position: Leaf
    drawn: Leaf
    limit: Leaf
    status: Leaf
    stop: Leaf
    sampler: Sampler


class Prompts(NamedTuple):
    """What prefill starts from: `tokens` int32 [B, T], padded at the end, `length` int32 [B], at least 1, and the
    `limit`, `stop` and `sampler` of `Rows`. A row with limit 0 is filler."""

    tokens: Leaf
    length: Leaf
    limit: Leaf
    stop: Leaf
    sampler: Sampler


class Drawn(NamedTuple):
    """Tokens int32 [B, N] (those of a row's `counts` int32 [B] are its own, the rest is padding), the rows' `status`,
    the steps that the loop took, int32 [], and the logits float32 [B, N, V] that the tokens were drawn from, or None.
    On every process whole."""

    tokens: Leaf
    counts: Leaf
    status: Leaf
    steps: Leaf
    logits: Leaf | None


_ROW = P(DP)
_CACHE = P(None, DP, MP)
_SAMPLER = Sampler(_ROW, _ROW, _ROW, _ROW)
ROWS_SPEC = Rows(_CACHE, _CACHE, _ROW, _ROW, _ROW, _ROW, _ROW, _ROW, _SAMPLER)
PROMPTS_SPEC = Prompts(_ROW, _ROW, _ROW, _ROW, _SAMPLER)


def bucket(length: int, most: int, least: int = 16) -> int:
    """The smallest of `least`, 2 `least`, 4 `least`, ... that holds `length`, and `most` at most."""
    size = least
    while size < min(length, most):
        size *= 2
    return min(size, most)


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
    """One shard's prefill and step; the parameters are those of `CausalTransformerShard`, by the same names."""

    def __init__(self, model: ModelConfig, mp: int):
        super().__init__(model, mp)
        self.mp = mp

    def prefill(self, tokens_bT: jax.Array, length_b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The whole prompts at once: logits behind each row's last token, float32 [b, V], and the keys and values of
        all positions, [L, b, h, T, K]. What stands behind a row's end is computed too, and never attended to."""
        model, (batch, T) = self.model, tokens_bT.shape
        positions = jnp.tile(jnp.arange(T, dtype=jnp.int32), batch)
        x_TD = self.embed(tokens_bT.reshape(-1), positions, jnp.dtype(model.compute_dtype))
        tables = rotary_tables(model, T)
        bias = attention.t5_bias_of(self.relative() if self.relative is not None else None)

        def body(x: jax.Array, params: Mapping[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            h_TD = normalise(x, params, model.norm)
            q, k, v = qkv(h_TD, params, model, batch, tables)
            return join(x, attention.causal_attention(q, k, v, bias), h_TD, params), (k, v)

        x_TD, (keys, values) = lax.scan(body, x_TD, self.layers())
        last = jnp.arange(batch, dtype=jnp.int32) * T + length_b - 1
        return self.whole_logits(x_TD[last]), keys, values

    def step(
        self, keys: jax.Array, values: jax.Array, token_b: jax.Array, position_b: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One token of each row into the cache: logits behind it, float32 [b, V], and the cache."""
        model, batch, C = self.model, token_b.shape[0], keys.shape[3]
        row, slot_b = jnp.arange(batch, dtype=jnp.int32), position_b % C
        x_bD = self.embed(token_b, position_b, jnp.dtype(model.compute_dtype))
        tables = angles(position_b, model.pe_rotary_dims) if model.pe == "rotary" else None
        # Slot s holds the newest position p <= position with p mod C == s; before the text's beginning it is empty.
        distance_bC = (position_b[:, None] - jnp.arange(C, dtype=jnp.int32)[None, :]) % C
        visible = (distance_bC <= position_b[:, None])[:, None, None, :]
        bias = None
        if self.relative is not None:
            buckets = jnp.asarray(attention.t5_bucket(np.arange(C)))[distance_bC]
            bias = self.relative().astype(jnp.float32)[:, buckets].transpose(1, 0, 2)[:, :, None]

        def body(carry: Any, inputs: Any) -> tuple[Any, None]:
            x, keys, values = carry
            i, params = inputs
            h_bD = normalise(x, params, model.norm)
            q, k, v = qkv(h_bD, params, model, batch, tables)
            keys = keys.at[i, row, :, slot_b].set(k[:, :, 0])
            values = values.at[i, row, :, slot_b].set(v[:, :, 0])
            attended = attention.attend(q, keys[i], values[i], visible, bias)
            return (join(x, attended, h_bD, params), keys, values), None

        numbered = (jnp.arange(model.layers, dtype=jnp.int32), self.layers())
        (x_bD, keys, values), _ = lax.scan(body, (x_bD, keys, values), numbered)
        return self.whole_logits(x_bD), keys, values

    def whole_logits(self, x_bD: jax.Array) -> jax.Array:
        """Logits of the whole vocabulary, float32 [b, V], equal on all shards: each puts its part among zeros and the
        parts are summed, so that the result is known to be equal, which a gather's is not."""
        h_bD, w, b = self.projection(x_bD)
        part = jnp.dot(h_bD, w.astype(h_bD.dtype), preferred_element_type=jnp.float32) + b.astype(jnp.float32)[None, :]
        zeros = jnp.zeros((x_bD.shape[0], w.shape[1] * self.mp), jnp.float32)
        return sum_over_shards(lax.dynamic_update_slice(zeros, part, (0, shard_index() * w.shape[1])))


def _apply(model: ModelConfig, mp: int, method: str) -> Callable[..., Any]:
    """`DecoderShard(...).method(...)` as a pure function of (params, *arguments)."""
    transformed: Any = hk.without_apply_rng(hk.transform(lambda *args: getattr(DecoderShard(model, mp), method)(*args)))
    return transformed.apply


def _narrow(params: Params, model: ModelConfig, mp: int) -> Params:
    """The matrices of products in the compute dtype, once for the whole loop, which would cast them for each token.

    Vectors and tables stay as they are: the network adds them in float32.
    """
    dtype = jnp.dtype(model.compute_dtype)
    kinds = parameters.kinds(model, mp)
    products = parameters.tree((k, k.decay and k.module in (parameters.LAYERS, parameters.PROJECTION)) for k in kinds)
    return jax.tree.map(lambda x, product: x.astype(dtype) if product else x, params, products)


def _draw(rows: Rows, logits_bV: jax.Array, n_tokens: jax.Array) -> Rows:
    """The next token of every row that still runs, and whether it ends there."""
    token = sampling.choose(logits_bV, rows.sampler, rows.drawn, n_tokens)
    running = rows.status == RUNNING
    drawn = rows.drawn + running.astype(jnp.int32)
    hit = jnp.any(token[:, None] == rows.stop, axis=1)
    status = jnp.where(hit, STOPPED, jnp.where(drawn >= rows.limit, FULL, RUNNING))
    return rows._replace(
        token=jnp.where(running, token, rows.token), drawn=drawn, status=jnp.where(running, status, rows.status)
    )


@functools.lru_cache(maxsize=64)
def prefill_step(model: ModelConfig, mesh: Mesh, slots: int, with_logits: bool) -> Any:
    """The compiled `(params, Prompts, n_tokens []) -> (Rows, Drawn)`: a cache of `slots` slots and one token a row.

    `n_tokens`: ids from there on are never drawn. Compiled once for each (B, T); raises nothing.
    """
    forward = _apply(model, mesh.shape[MP], "prefill")

    def prefill(params: Params, prompts: Prompts, n_tokens: jax.Array) -> tuple[Rows, Drawn]:
        logits, keys, values = forward(copy_to_replicas(params), prompts.tokens, prompts.length)
        padding = ((0, 0), (0, 0), (0, 0), (0, slots - keys.shape[3]), (0, 0))
        zero = jnp.zeros_like(prompts.length)
        status = jnp.where(prompts.limit > 0, RUNNING, FULL)
        rows = Rows(
            jnp.pad(keys, padding), jnp.pad(values, padding), zero, prompts.length, zero, prompts.limit, status,
            prompts.stop, prompts.sampler,
        )  # fmt: skip
        rows = _draw(rows, logits, n_tokens)
        kept = logits[:, None] if with_logits else None
        return rows, Drawn(rows.token[:, None], rows.drawn, rows.status, jnp.int32(0), kept)

    specs = parameters.specs(model, mesh.shape[MP])
    return _compiled(prefill, model, mesh, (specs, PROMPTS_SPEC, P()), with_logits, donate=())


@functools.lru_cache(maxsize=64)
def decode_steps(model: ModelConfig, mesh: Mesh, with_logits: bool) -> Any:
    """The compiled `(params, Rows, count [], n_tokens []) -> (Rows, Drawn)`: `count` (at most CHUNK) tokens a row.

    The loop runs on the devices and ends early when no row of any replica runs. The rows passed in are donated.
    Compiled once for each (B, C).
    """
    forward = _apply(model, mesh.shape[MP], "step")

    def decode(params: Params, rows: Rows, count: jax.Array, n_tokens: jax.Array) -> tuple[Rows, Drawn]:
        params = copy_to_replicas(params)
        batch = rows.token.shape[0]
        before = rows.drawn
        tokens = copy_to_replicas(jnp.zeros((batch, CHUNK), jnp.int32))
        logits = copy_to_replicas(jnp.zeros((batch, CHUNK, model.n_vocab), jnp.float32)) if with_logits else None

        def any_running(rows: Rows) -> jax.Array:
            # Summed over replicas, so that all of them take the same number of steps.
            return sum_over_replicas(jnp.sum(rows.status == RUNNING)) > 0

        def go_on(carry: Any) -> jax.Array:
            return (carry[0] < count) & carry[1]

        def step(carry: Any) -> Any:
            i, _, rows, tokens, logits = carry
            logits_bV, keys, values = forward(params, rows.keys, rows.values, rows.token, rows.position)
            running = (rows.status == RUNNING).astype(jnp.int32)
            rows = rows._replace(keys=keys, values=values, position=rows.position + running)
            rows = _draw(rows, logits_bV, n_tokens)
            tokens = lax.dynamic_update_slice(tokens, rows.token[:, None], (0, i))
            if logits is not None:
                logits = lax.dynamic_update_slice(logits, logits_bV[:, None], (0, i, 0))
            return i + 1, any_running(rows), rows, tokens, logits

        start = (jnp.int32(0), any_running(rows), rows, tokens, logits)
        taken, _, rows, tokens, logits = lax.while_loop(go_on, step, start)
        return rows, Drawn(tokens, rows.drawn - before, rows.status, taken, logits)

    specs = parameters.specs(model, mesh.shape[MP])
    return _compiled(decode, model, mesh, (specs, ROWS_SPEC, P(), P()), with_logits, donate=(1,))


def _compiled(
    function: Callable[..., Any],
    model: ModelConfig,
    mesh: Mesh,
    in_specs: Any,
    with_logits: bool,
    donate: tuple[int, ...],
) -> Any:
    """`function` mapped over the mesh and compiled, with its matrices narrowed; `Drawn` is whole on every process."""
    drawn = Drawn(_ROW, _ROW, _ROW, P(), _ROW if with_logits else None)
    out_specs = (ROWS_SPEC, drawn)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=steps.live(mesh, in_specs), out_specs=steps.live(mesh, out_specs)
    )
    whole = NamedSharding(mesh, P())

    def run(params: Params, *arguments: Any) -> Any:
        return mapped(_narrow(params, model, mesh.shape[MP]), *arguments)

    return jax.jit(
        run,
        in_shardings=steps.shardings(mesh, in_specs),
        out_shardings=(steps.shardings(mesh, ROWS_SPEC), jax.tree.map(lambda _: whole, drawn, is_leaf=_is_spec)),
        donate_argnums=donate,
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)
