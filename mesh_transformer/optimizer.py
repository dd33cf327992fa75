"""Learning-rate schedule and the optimizer chain of the 2021 library, safe at every edge.

Chain: gradient / A; clip by global norm; Adam, bias-corrected; add weight_decay * parameter for the matrices of the
table; times minus the learning rate of this update.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mesh_transformer.config import OptimConfig
from mesh_transformer.errors import CheckpointError
from mesh_transformer.state import OptimizerState, Params, TrainState


def schedule(optim: OptimConfig) -> optax.Schedule:
    """Learning rate as a function of the number of completed updates (int, or int32 array of any shape).

    Linear from 0 to `lr` over `warmup_steps`, cosine from `lr` to `end_lr` over `anneal_steps`, then `end_lr`. Both
    phases may be empty: the division is by at least one step, and an empty phase is never selected.
    QUIRK first-rate-zero: the first update sees count 0, so with any warm-up its rate is 0, as in 2021.
    """
    def rate(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        warm = optim.lr * count / max(optim.warmup_steps, 1)
        progress = jnp.clip((count - optim.warmup_steps) / max(optim.anneal_steps, 1), 0.0, 1.0)
        cosine = optim.end_lr + (optim.lr - optim.end_lr) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        after = jnp.where(count >= optim.warmup_steps + optim.anneal_steps, optim.end_lr, cosine)
        return jnp.where(count < optim.warmup_steps, warm, after)

    return rate


def init(params: Params) -> OptimizerState:
    """Fresh moments for float32 `params`; placed like them when traced under jit with their shardings."""
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    zero = jnp.zeros([], jnp.int32)
    return OptimizerState(zero, zeros(), zeros(), zero)


class Update(NamedTuple):
    """The state after an update, the rate it used, and whether it was skipped (int32 0 or 1)."""

    state: TrainState
    learning_rate: jax.Array
    skipped: jax.Array


def apply(
    state: TrainState, gradient: Params, norm: jax.Array, microbatches: int, optim: OptimConfig, decay: Any
) -> Update:
    """One update of whole (global) arrays.

    `gradient` is the float32 sum over `microbatches` microbatches, `norm` its global norm ([], before dividing),
    `decay` the tree of `parameters.decay_mask`. A gradient that is not finite leaves parameters, moments and counts
    as they were: the norm is not finite if any of its entries is not.
    """
    before = state.opt_state
    if before is None:
        raise CheckpointError("this state has no optimizer (it was loaded for inference): load it with optimizer=True")
    adam_in = optax.ScaleByAdamState(before.count, before.mu, before.nu)
    mean_norm = norm / microbatches
    scale = jnp.minimum(1.0, optim.max_grad_norm / jnp.maximum(mean_norm, 1e-30)) / microbatches
    scaled = jax.tree.map(lambda g: g * scale, gradient)
    direction, adam = optax.scale_by_adam(optim.b1, optim.b2, optim.eps).update(scaled, adam_in)
    rate = schedule(optim)(before.schedule_count)

    def step(p: jax.Array, u: jax.Array, decays: bool) -> jax.Array:
        return p - rate * (u + optim.weight_decay * p if decays else u)

    params = jax.tree.map(step, state.params, direction, decay)
    opt_state = OptimizerState(adam.count, adam.mu, adam.nu, before.schedule_count + 1)
    fresh = TrainState(params, opt_state, state.step + 1)
    finite = jnp.isfinite(norm)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), fresh, state)
    return Update(kept, rate, 1 - finite.astype(jnp.int32))
