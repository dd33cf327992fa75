"""Attention in blocks and the loss in chunks equal their plain forms, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import mesh_of

from mesh_transformer import attention, weight_products
from mesh_transformer.cross_entropy import weighted_loss


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array | None) -> jax.Array:
    """All scores at once, [B, h, S, S]."""
    S = q.shape[2]
    scores = jnp.einsum("bhtk,bhTk->bhtT", q, k, precision="highest") / math.sqrt(q.shape[-1])
    distance = np.arange(S)[:, None] - np.arange(S)[None, :]
    if table is not None:
        scores = scores + table[:, attention.t5_bucket(distance)][None]
    weights = jax.nn.softmax(jnp.where(jnp.asarray(distance >= 0)[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhtT,bhTk->bhtk", weights, v, precision="highest")


# Not a multiple of the block of 128, less than one, and so long that the blocks are larger than 128; as it is compiled
# for CPUs, in tiles, and for TPUs, in blocks of query rows.
@pytest.mark.parametrize(
    ("S", "with_bias", "platform"),
    [
        (5, False, "cpu"),
        (300, False, "cpu"),
        (2100, False, "cpu"),
        (5, True, "cpu"),
        (300, True, "cpu"),
        (2100, True, "cpu"),
        (300, False, "tpu"),
        (2100, False, "tpu"),
    ],
)
def test_attention_in_blocks_is_plain_attention(S: int, with_bias: bool, platform: str) -> None:
    q, k, v, weight = (normal(seed, 1, 2, S, 8) for seed in range(4))
    table = 0.3 * normal(4, 2, 32) if with_bias else None

    def loss(function: Any) -> Any:
        def weighted(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = function(*arguments)
            return jnp.sum(out * weight), out

        return jax.jit(jax.value_and_grad(weighted, (0, 1, 2, 3)[: 3 + with_bias], has_aux=True))

    blocked = loss(lambda q, k, v, table=None: attention.causal_attention(q, k, v, attention.t5_bias_of(table)))
    arguments = (q, k, v) if table is None else (q, k, v, table)
    with weight_products.compiling_for(platform):
        (_, value), gradients = blocked(*arguments)
    # In double precision: the plain form's sum of two million gradients for one row of the table is itself inexact.
    with jax.enable_x64(True):
        doubles = [jnp.asarray(np.asarray(x, np.float64)) for x in arguments]
        found = loss(lambda q, k, v, table=None: plain_attention(q, k, v, table))(*doubles)
        (_, expected), others = jax.tree.map(np.asarray, found)
        assert expected.dtype == np.float64
    assert np.abs(value - expected).max() <= 1e-5
    for got, other in zip(gradients, others, strict=True):
        assert np.abs(got - other).max() <= 1e-5 * np.abs(other).max()
        assert np.abs(other).max() > 0.1


def test_hidden_keys_are_hidden_in_long_sequences_too() -> None:
    S, visible = 700, 650
    q, k, v = (normal(seed, 1, 2, S, 8) for seed in range(3))
    seen = jnp.arange(S)[None, :] < visible
    got = jax.jit(lambda: attention.causal_attention(q, k, v, key_visible_BS=seen))()[:, :, visible:]
    scores = jnp.einsum("bhtk,bhTk->bhtT", q, k, precision="highest")[:, :, visible:, :visible] / math.sqrt(8)
    expected = jnp.einsum("bhtT,bhTk->bhtk", jax.nn.softmax(scores, axis=-1), v[:, :, :visible], precision="highest")
    assert np.abs(got - expected).max() <= 1e-5


@pytest.mark.parametrize(("with_bias", "share"), [(False, 1 / 16), (True, 3 / 4)])
def test_memory_of_attention_does_not_grow_with_the_square(with_bias: bool, share: float) -> None:
    """What a gradient needs, beside one head's whole scores; twice the length takes about twice as much."""

    def needed(S: int) -> int:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
            bias = attention.t5_bias_of(table) if with_bias else None
            return jnp.sum(attention.causal_attention(q, k, v, bias))

        shape = jax.ShapeDtypeStruct((1, 2, S, 8), jnp.float32)
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape, jnp.zeros((2, 32)))
        return program.compile().memory_analysis().temp_size_in_bytes

    assert needed(4096) < share * 4 * 4096**2
    assert needed(4096) < 2.2 * needed(2048)


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("z_loss", ["reference", "log_z", "off"])
def test_loss_in_chunks_is_the_loss_of_all_logits(chunk: int, z_loss: str) -> None:
    N, D, V = 24, 16, 40
    h, w, b = normal(0, N, D), normal(1, D, V), normal(2, V)
    target, weight = jnp.asarray(np.random.default_rng(3).integers(0, V, N), jnp.int32), jnp.abs(normal(4, N))

    def whole(h: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        logits = jnp.dot(h, w, precision="highest") + b[None, :]
        log_p = jax.nn.log_softmax(logits, axis=-1)
        peak = jax.lax.stop_gradient(logits.max(-1)) if z_loss == "reference" else 0.0
        z = 0.0 if z_loss == "off" else 1e-4 * jnp.square(jax.nn.logsumexp(logits, axis=-1) - peak)
        return jnp.sum(weight * (z - log_p[jnp.arange(N), target]))

    spec = jax.sharding.PartitionSpec()
    chunked = lambda h, w, b: weighted_loss(h, w, b, target, weight, chunk, z_loss)[0]  # noqa: E731
    mapped = jax.shard_map(chunked, mesh=mesh_of(1, 1), in_specs=spec, out_specs=spec)
    value, gradients = jax.jit(jax.value_and_grad(mapped, (0, 1, 2)))(h, w, b)
    expected, others = jax.value_and_grad(whole, (0, 1, 2))(h, w, b)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for got, other in zip(gradients, others, strict=True):
        assert np.abs(got - other).max() <= 1e-5 * np.abs(other).max()
