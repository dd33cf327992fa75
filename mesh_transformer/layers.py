"""Per-shard Haiku modules of both versions; everything here runs inside `shard_map`, so every size is local.

Letters (field of ModelConfig): B sequences of this replica, S `seq` positions, T = B*S tokens, D `d_model`,
h heads per shard (`n_heads` / M), K `d_head`, f feed-forward columns per shard (`d_ff` / M), v vocabulary rows per
shard (`n_vocab` / M), L `layers`, M shards (mesh axis mp). Activations are flattened to [T, D], since one large
matrix product is up to twice as fast as a batched one on CPU and no slower elsewhere.

A module declares its parameters from the table (`parameters.kinds`), in float32 unless the state is narrower, and
computes in the dtype of its input. `x` is the residual stream, equal on all shards.

A layer of version 2 differs by what the table gives it: biases for queries, keys and values, and a gate in its
feed-forward part. With ZeRO (stage 3) a module's matrices are cut over the replicas too, and gathered for use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer import attention, panels, parameters
from mesh_transformer.collected_vocabulary import collected_rows
from mesh_transformer.collectives import (
    Probe,
    copy_to_shards,
    gather_from_replicas,
    gather_from_shards,
    make_probe,
    observe,
    part_of_shard,
    shard_index,
    sum_over_shards,
)
from mesh_transformer.config import ModelConfig
from mesh_transformer.parameters import Kind

NORM_EPSILON = 1e-5
# What the `dots` rematerialisation keeps of a layer: the matrix products' outputs and the attended values.
SAVED_NAMES = ("queries", "keys", "values", "hidden", "gate", "attended", "log_sums")
COLLECTED = "collected"  # weights as `ShardModule.collect` gives them, which no rematerialisation keeps

LayerParams = Mapping[str, jax.Array]
RotaryTables = tuple[jax.Array, jax.Array]  # sin and cos, see attention.rotary_table


def normalise(x: jax.Array, params: LayerParams, norm: str) -> jax.Array:
    """The norm `norm` of x [..., D] in float32, cast back to x's dtype, as the shards are to read it.

    Every norm is taken once on the shared residual stream, and copied to the shards behind it, so that the backward
    pass has one sum over shards per norm. `layernorm-desync` has its vectors per shard, so they come after the copy.
    """
    x32 = x.astype(jnp.float32)
    scale = params["norm_scale"].astype(jnp.float32)
    offset = params["norm_offset"].astype(jnp.float32) if "norm_offset" in params else None
    if norm.startswith("layernorm"):
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        centred = x32 - mean
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        out = centred * lax.rsqrt(variance + NORM_EPSILON)
    else:
        out = x32 / (jnp.sqrt(jnp.sum(jnp.square(x32), axis=-1, keepdims=True)) + NORM_EPSILON)
    if norm == "layernorm-desync":
        out = copy_to_shards(out)
        scale, offset = scale[0], offset[0] if offset is not None else None  # local block [1, D]
    leading = (None,) * (x.ndim - scale.ndim) if scale.ndim else ()
    out = out * scale[leading]
    if offset is not None and norm != "layernorm-nobias":  # QUIRK: nobias has the offset parameter, unused
        out = out + offset[leading]
    out = out.astype(x.dtype)
    return out if norm == "layernorm-desync" else copy_to_shards(out)


def project(x_TD: jax.Array, w: jax.Array, b: jax.Array | None = None, shared_gradient: bool = False) -> jax.Array:
    """x w + b in x's dtype, accumulated in float32. shared_gradient: see `weight_products.product`."""
    out = panels.product(x_TD, w, shared_gradient)
    if b is not None:
        out = out + b.astype(jnp.float32)[None, :]
    return out.astype(x_TD.dtype)


def heads_of(x_Thk: jax.Array, batch: int, d_head: int) -> jax.Array:
    """[B*S, h*K] -> [B, h, S, K]."""
    return x_Thk.reshape(batch, x_Thk.shape[0] // batch, -1, d_head).transpose(0, 2, 1, 3)


def rotary_tables(model: ModelConfig, positions: int) -> RotaryTables | None:
    """The tables of positions 0 .. `positions` - 1, each [S, R/2]; None where the model is not rotary."""
    if model.pe != "rotary":
        return None
    sin, cos = attention.rotary_table(np.arange(positions), model.pe_rotary_dims)
    return jnp.asarray(sin), jnp.asarray(cos)


def qkv(
    h_TD: jax.Array, params: LayerParams, model: ModelConfig, batch: int, tables: RotaryTables | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys (rotated where the model is rotary) and values, each [B, h, S, K].

    QUIRK v2-merged-heads: in a reference checkpoint of version 2 the heads of each of its M shards are one wide head,
    whose scale is still that of a head of `d_head`. Where M is not divisible by the mesh's shards, each of them
    attends with all heads, and `join` takes its part.
    """
    q, k, v = (project(h_TD, params[name], params.get(f"b_{name}")) for name in ("q", "k", "v"))
    if model.v2_merged_heads is not None:
        q = q * jnp.asarray(math.sqrt(model.attention_width / model.d_head), q.dtype)
    if q.shape[1] % model.attention_width:
        q, k, v = (gather_from_shards(x) for x in (q, k, v))
    q, k, v = (heads_of(x, batch, model.attention_width) for x in (q, k, v))
    if tables is not None:
        q, k = attention.rotate(q, *tables), attention.rotate(k, *tables)
    return checkpoint_name(q, "queries"), checkpoint_name(k, "keys"), checkpoint_name(v, "values")


def feed_forward(h_TD: jax.Array, params: LayerParams) -> jax.Array:
    """This shard's part of W2 gelu(W1 h + b1), [T, D]; gelu is the tanh approximation.

    With a gate (version 2) of W2 ((W1 h + b1) * gelu(Wg h + bg)).
    """
    hidden = checkpoint_name(project(h_TD, params["w1"], params["b1"]), "hidden")
    if "w_gate" not in params:
        return project(jax.nn.gelu(hidden, approximate=True), params["w2"], shared_gradient=True)
    gate = checkpoint_name(project(h_TD, params["w_gate"], params["b_gate"]), "gate")
    return project(hidden * jax.nn.gelu(gate, approximate=True), params["w2"], shared_gradient=True)


def join(x_TD: jax.Array, attended_BhSK: jax.Array, h_TD: jax.Array, params: LayerParams) -> jax.Array:
    """x + sum over shards(O attended + feed-forward) + b2: the layer's one reduction.

    The bias is whole on every shard, so it is added behind the sum, once.
    """
    flat = attended_BhSK.transpose(0, 2, 1, 3).reshape(h_TD.shape[0], -1)
    if flat.shape[1] != params["o"].shape[-2]:  # all heads on every shard, see `qkv`
        flat = part_of_shard(flat)
    part = project(flat, params["o"], shared_gradient=True) + feed_forward(h_TD, params)
    return x_TD + sum_over_shards(part) + params["b2"].astype(x_TD.dtype)[None, :]


def layer(
    x_TD: jax.Array,
    params: LayerParams,
    model: ModelConfig,
    batch: int,
    tables: RotaryTables | None,
    bias: attention.Bias | None,
    key_visible_BS: jax.Array | None,
) -> jax.Array:
    """One residual layer, attention and feed-forward side by side: [T, D] -> [T, D]."""
    h_TD = normalise(x_TD, params, model.norm)
    q, k, v = qkv(h_TD, params, model, batch, tables)
    attended = attention.causal_attention(q, k, v, bias, key_visible_BS)
    return join(x_TD, attended, h_TD, params)


class ShardModule(hk.Module):
    """A Haiku module whose parameters are those that the table lists under `table`, cut for `mp` shards.

    `zero`: the replicas over which ZeRO cuts matrices too; 1 where it does not.
    """

    def __init__(self, model: ModelConfig, mp: int, table: str, zero: int = 1):
        super().__init__(name=table.rsplit("/", 1)[1])
        self.model, self.mp, self.table, self.zero = model, mp, table, zero

    def kinds(self) -> list[Kind]:
        return [kind for kind in parameters.kinds(self.model, self.mp) if kind.module == self.table]

    def params(self, without: str | None = None) -> dict[str, jax.Array]:
        """This shard's blocks, {name: array}, `without` one of them; Haiku fetches them by the names of the table.

        Values are drawn for whole tensors (`transformer_shard.init_params`), so the initialisers here give shapes only.
        """
        return {
            kind.name: hk.get_parameter(kind.name, kind.local_shape(self.mp, self.zero), jnp.float32, jnp.zeros)
            for kind in self.kinds()
            if kind.name != without
        }

    def collect(self, params: LayerParams, probe: Probe | None, dtype: jnp.dtype) -> LayerParams:
        """`params`, of one layer where they are stacked, for use: matrices that are cut over the replicas whole and in
        `dtype`; with a `probe`, their gradients are measured on the way back.

        Named, so that rematerialisation drops them after use and collects them again in the backward pass.
        """
        if self.zero == 1 and probe is None:
            return params
        out = dict(params)
        for kind in self.kinds():
            if kind.name in out:
                out[kind.name] = checkpoint_name(self._collected(kind, out[kind.name], probe, dtype), COLLECTED)
        return out

    def _collected(self, kind: Kind, x: jax.Array, probe: Probe | None, dtype: jnp.dtype) -> jax.Array:
        if self.zero > 1 and kind.zero_axis is not None:
            return gather_from_replicas(x, kind.zero_axis, dtype, (probe or make_probe()).split)
        if probe is None:
            return x
        return observe(x, probe.split if kind.split is not None and self.mp > 1 else probe.whole)


class EmbeddingShard(ShardModule):
    """Vocabulary rows split over shards; `fixed` positions split over the model dim."""

    def __call__(
        self, tokens_T: jax.Array, position_T: jax.Array, dtype: jnp.dtype, probe: Probe | None = None
    ) -> jax.Array:
        """ids [T] and their positions [T] (int32) -> [T, D], equal on all shards."""
        params: LayerParams = self.params()
        rows = params["w"].shape[0]
        local = tokens_T - shard_index() * rows
        mine = (local >= 0) & (local < rows)
        row = jnp.where(mine, local, 0)
        if self.zero > 1:
            part = collected_rows(params["w"], row, mine, (probe or make_probe()).split)
            params = self.collect({name: x for name, x in params.items() if name != "w"}, probe, jnp.float32)
        else:
            params = self.collect(params, probe, jnp.float32)
            part = jnp.where(mine[:, None], jnp.take(params["w"], row, axis=0).astype(jnp.float32), 0.0)
        if "pos_embs" in params:
            # Each shard's columns, placed among zeros, ride on the sum that the embedding needs anyway.
            columns = params["pos_embs"].shape[1]
            block = jnp.take(params["pos_embs"], position_T, axis=0).astype(jnp.float32)
            part = part + lax.dynamic_update_slice(jnp.zeros_like(part), block, (0, shard_index() * columns))
        return (sum_over_shards(part) + params["b"].astype(jnp.float32)[None, :]).astype(dtype)


class RelativePositionEmbs(ShardModule):
    """The t5 bias table of this shard's heads, shared by all layers."""

    def __call__(self, probe: Probe | None = None) -> jax.Array:
        """[h, 32], float32."""
        return self.collect(self.params(), probe, jnp.float32)["rel_embedding"]


class TransformerLayerShard(ShardModule):
    """The stacked parameters of all layers of this shard; `layer` is what each of them computes."""

    def __call__(self) -> dict[str, jax.Array]:
        """{name: [L, ...]}."""
        return self.params()


class ProjectionShard(ShardModule):
    """The last norm, and the matrix and bias of this shard's part of the vocabulary."""

    def __call__(
        self, x_TD: jax.Array, probe: Probe | None = None, w: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The normalised stream [T, D] as this shard reads it, w [D, v], b [v].

        `w`: the matrix, or its panels, where it does not stand among the parameters (see `decoder_weights`).
        """
        params = self.collect(self.params(without=None if w is None else "w"), probe, x_TD.dtype)
        return normalise(x_TD, params, self.model.norm), params["w"] if w is None else w, params["b"]

    def uncollected(self, x_TD: jax.Array, probe: Probe | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As a call, but of w what this replica holds, [D/P, v] on P replicas."""
        params = dict(self.params())
        w = params.pop("w")
        others = self.collect(params, probe, x_TD.dtype)
        return normalise(x_TD, others, self.model.norm), w, others["b"]
