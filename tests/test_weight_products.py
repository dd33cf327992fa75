"""Products with weights: on CPU their gradients are what autodiff gives, and take XLA's fast kernel."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer import weight_products


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def gradients(product):
    """Of two products of one x and, of what comes out of them, the sum of two more, as a layer has them: by x and the
    four weights. And the compiled program."""
    arrays = [normal(seed, *shape) for seed, shape in enumerate([(96, 24), (24, 40), (24, 40), (40, 16), (40, 16)])]

    def loss(x, u, v, w, z):
        one, other = jnp.tanh(product(x, u)), jnp.sin(product(x, v))
        out = product(one, w, shared_gradient=True) + product(other, z, shared_gradient=True)
        return jnp.mean(jnp.square(out - normal(5, 96, 16)))

    compiled = jax.jit(jax.grad(loss, tuple(range(5)))).lower(*arrays).compile()
    return compiled(*arrays), compiled.as_text()


def test_gradients_are_those_of_a_plain_product_and_no_left_operand_is_transposed():
    found, program = gradients(weight_products.product)
    wanted, plain = gradients(lambda x, w, shared_gradient=False: jnp.dot(x, w))
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(other).max() > 1e-2
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.abs(other).max())
    assert plain.count("lhs_contracting_dims={0}") == 4  # the weights' gradients
    assert "lhs_contracting_dims={0}" not in program
    # What is transposed over the 96 rows: x once for two products, and their sum's gradient once.
    assert len(re.findall(r"= f32\[(?:24|40|16),96\]\S* transpose\(", program)) == 2


@pytest.mark.parametrize(("platform", "dtype"), [("tpu", "float32"), ("gpu", "float32"), ("cpu", "bfloat16")])
def test_elsewhere_a_product_is_left_to_xla(platform, dtype):
    x, w = normal(0, 8, 4).astype(dtype), normal(1, 4, 6).astype(dtype)
    with weight_products.compiling_for(platform):
        for shared in (False, True):
            product = functools.partial(weight_products.product, shared_gradient=shared)
            assert "custom_vjp" not in str(jax.make_jaxpr(lambda x, w, p=product: p(x, w))(x, w))
        gradient = jax.make_jaxpr(lambda x, g: weight_products.weight_gradient(x, g))(x, normal(2, 8, 6).astype(dtype))
        assert "optimization_barrier" not in str(gradient)
