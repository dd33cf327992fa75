"""Products with weights: on CPU their gradients are what autodiff gives, and take XLA's fast kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer import weight_products


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def gradients(product):
    """Of a sum of two products of one x, as a layer has them, by x and both weights."""
    x, v, w, target = normal(0, 96, 24), normal(1, 24, 40), normal(2, 40, 24), normal(3, 96, 24)

    def loss(x, v, w):
        hidden = product(x, v)
        return jnp.mean(jnp.square(product(jnp.tanh(hidden), w, shared_gradient=True) - target))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, v, w).compile()
    return compiled(x, v, w), compiled.as_text()


def test_gradients_are_those_of_a_plain_product_and_no_left_operand_is_transposed():
    found, program = gradients(weight_products.product)
    wanted, plain = gradients(lambda x, w, shared_gradient=False: jnp.dot(x, w))
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(other).max() > 1e-2
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.abs(other).max())
    assert plain.count("lhs_contracting_dims={0}") == 2  # the two weights' gradients
    assert "lhs_contracting_dims={0}" not in program


@pytest.mark.parametrize(("platform", "dtype"), [("tpu", "float32"), ("gpu", "float32"), ("cpu", "bfloat16")])
def test_elsewhere_a_product_is_left_to_xla(platform, dtype):
    x, w = normal(0, 8, 4).astype(dtype), normal(1, 4, 6).astype(dtype)
    with weight_products.compiling_for(platform):
        for shared in (False, True):
            product = functools.partial(weight_products.product, shared_gradient=shared)
            assert "custom_vjp" not in str(jax.make_jaxpr(product)(x, w))
        assert "optimization_barrier" not in str(
            jax.make_jaxpr(weight_products.weight_gradient)(x, normal(2, 8, 6).astype(dtype))
        )
