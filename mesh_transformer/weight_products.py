"""Products with weights, and which kernel of XLA's CPU backend takes them.

In float32 that backend multiplies fast where the left operand lies in memory row by row. In a weight's gradient x^T g
it does not: such products take another kernel, which reaches half of the speed where g is wide, as in the output head
(docs/measurements/training-speed.md has the figures). So what is transposed is written to memory first, on CPU alone:
TPUs and GPUs multiply either way at the same speed. That is x; or g, and then the product g^T x is turned once more.
Letters: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

_compiling_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("compiling_for", default=None)


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """What is traced inside is for devices of `platform`, which this process need not have."""
    token = _compiling_for.set(platform)
    try:
        yield
    finally:
        _compiling_for.reset(token)


def platform() -> str:
    """The platform for which code is being traced: "cpu", "gpu" or "tpu"."""
    return _compiling_for.get() or jax.default_backend()


def product(x_TK: jax.Array, w_KN: jax.Array, shared_gradient: bool = False) -> jax.Array:
    """x w, float32 [T, N]; both have one dtype.

    shared_gradient: the outputs of several products are added up, so that they have one gradient, as several others
    have one x. What is shared is what the backward pass transposes, once for all of them.
    """
    if _two_kernels(x_TK):
        return _product(x_TK, w_KN, shared_gradient)
    return jnp.dot(x_TK, w_KN, preferred_element_type=jnp.float32)


def weight_gradient(x_TK: jax.Array, grad_TN: jax.Array) -> jax.Array:
    """x^T g, float32 [K, N]: the gradient of w in x w; both have one dtype."""
    if _two_kernels(x_TK):
        return jnp.dot(_transposed(x_TK), grad_TN)
    return jnp.dot(x_TK.T, grad_TN, preferred_element_type=jnp.float32)


def _two_kernels(x: jax.Array) -> bool:
    """Whether a product with x is faster where its left operand is not transposed."""
    return x.dtype == jnp.float32 and platform() == "cpu"


def _transposed(x: jax.Array) -> jax.Array:
    """x^T in memory: without the barriers XLA would make one of the transposition and a product before or behind it."""
    return lax.optimization_barrier(lax.optimization_barrier(x).T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x_TK: jax.Array, w_KN: jax.Array, shared_gradient: bool) -> jax.Array:
    return jnp.dot(x_TK, w_KN)


def _forward(x_TK: jax.Array, w_KN: jax.Array, shared_gradient: bool) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.dot(x_TK, w_KN), (x_TK, w_KN)


def _backward(
    shared_gradient: bool, kept: tuple[jax.Array, jax.Array], grad_TN: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_TK, w_KN = kept
    if shared_gradient:
        grad_w = _transposed(jnp.dot(_transposed(grad_TN), x_TK))
    else:
        grad_w = weight_gradient(x_TK, grad_TN)
    return jnp.dot(grad_TN, w_KN.T), grad_w


_product.defvjp(_forward, _backward)
