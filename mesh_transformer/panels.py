"""Products with matrices that are kept as panels, strips of WIDTH columns each, for decoding on CPU.

A step of a few rows is bound by the reading of weights. XLA's CPU backend packs the right operand of a product before
it multiplies, the whole matrix at each step, which for eight rows costs more than the product; of a panel, which lies
together in memory, it packs little (docs/measurements/generate-speed.md has the figures). Elsewhere matrices stay
matrices.
"""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from mesh_transformer import weight_products

# The fastest of 16, 32, 48, 64, 80, 128 and 256 columns for eight rows, in float32 and in bfloat16.
WIDTH = 64
# Fewer rows are filled up: XLA multiplies them by code of its own, which takes longer than YNNPACK's for four.
LEAST_ROWS = 4
# Of more rows than this a product takes panel after panel: to take all at once, XLA writes the rows once for each.
MOST_ROWS_AT_ONCE = 64


def used_on(mesh: Mesh) -> bool:
    """Whether matrices are kept as panels on this mesh: the products of all panels at once run on one core, so every
    core must have a device; and several processes, which might differ in that, have none."""
    devices = mesh.devices.flat
    return bool(devices[0].platform == "cpu") and not mesh.is_multi_process and len(devices) >= _cores()


@functools.cache
def _cores() -> int:
    """Hardware threads that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fits(columns: int) -> bool:
    """Whether a matrix of so many columns (a shard's) can be kept as panels."""
    return columns % WIDTH == 0


def cut(w: np.ndarray) -> np.ndarray:
    """[K, N] -> [N/WIDTH, K, WIDTH], a copy."""
    rows, columns = w.shape
    return np.ascontiguousarray(w.reshape(rows, columns // WIDTH, WIDTH).transpose(1, 0, 2))


def product(x_TK: jax.Array, w: jax.Array, shared_gradient: bool = False) -> jax.Array:
    """x w, float32 [T, N], of a matrix [K, N] or of its panels [N/WIDTH, K, WIDTH], in x's dtype.

    shared_gradient: see `weight_products.product`.
    """
    w = w.astype(x_TK.dtype)
    if w.ndim == 2:
        return weight_products.product(x_TK, w, shared_gradient)
    rows = len(x_TK)
    if rows > MOST_ROWS_AT_ONCE:
        out = lax.map(lambda panel: jnp.dot(x_TK, panel, preferred_element_type=jnp.float32), w)
    else:
        x_TK = jnp.pad(x_TK, ((0, max(LEAST_ROWS - rows, 0)), (0, 0)))
        each = jnp.broadcast_to(x_TK, (len(w), *x_TK.shape))
        out = lax.dot_general(each, w, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)[:, :rows]
    return out.transpose(1, 0, 2).reshape(rows, -1)
