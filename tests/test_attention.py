"""Rotary embedding and masks, where rounding and infinities show: far positions, wide heads, 16 bits, hidden rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest

from mesh_transformer import attention

S, DIMS, K = 2048, 64, 256  # GPT-J's: 64 of a head's 256 numbers are turned


def test_rotary_tables_and_pairs_are_right_at_every_position() -> None:
    """Against float64: the tables to float32's last digits, at position 1857 as at 3; the pairs are interleaved."""
    position = np.arange(S)
    sin, cos = attention.rotary_table(position, DIMS)
    assert sin.dtype == cos.dtype == np.float32
    angle = position[:, None] / 10000.0 ** (np.arange(0, DIMS, 2) / DIMS)
    assert max(np.abs(sin - np.sin(angle)).max(), np.abs(cos - np.cos(angle)).max()) < 1e-6
    x = np.random.default_rng(0).normal(size=(2, S, K))
    turned = jax.jit(attention.rotate)(x[None].astype(np.float32), sin, cos)[0]
    np.testing.assert_allclose(turned, plain_model.rotated(x, DIMS), atol=1e-5, rtol=0)
    assert (np.asarray(turned)[..., DIMS:] == x[..., DIMS:].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_that_see_little_or_nothing_are_finite(dtype: str) -> None:
    """Padding on the left, and a text that is padding alone, with scores near what float16 can hold."""
    random = np.random.default_rng(1)
    q, k = (jnp.asarray(9 * random.normal(size=(3, 2, 12, 64)), dtype) for _ in range(2))
    v = jnp.asarray(random.normal(size=(3, 2, 12, 64)), dtype)
    seen = np.arange(12)[None, :] >= np.array([0, 7, 12])[:, None]

    def out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.causal_attention(q, k, v, key_visible_BS=jnp.asarray(seen)).astype(jnp.float32)

    value, gradients = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(out(*a)), (0, 1, 2)))(q, k, v)
    assert np.isfinite(value) and all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients)
    whole = np.asarray(jax.jit(out)(q, k, v))
    assert np.isfinite(whole).all()
    # The row behind seven of padding is what its five tokens give alone.
    alone = np.asarray(jax.jit(attention.causal_attention)(*(x[1:2, :, 7:] for x in (q, k, v))), np.float32)
    np.testing.assert_allclose(whole[1:2, :, 7:], alone, atol=2e-2 if dtype != "float32" else 1e-5, rtol=0)
