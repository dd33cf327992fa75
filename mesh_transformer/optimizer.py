"""Learning-rate schedule and the optimizer chain of the 2021 library, safe at every edge.

Chain: gradient / A; clip by global norm; Adam, bias-corrected; add weight_decay * parameter for the matrices of the
table; times minus the learning rate of this update.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

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
    # Two arrays, not one twice: a buffer that a step donates can be given away once.
    return OptimizerState(jnp.zeros([], jnp.int32), zeros(), zeros(), jnp.zeros([], jnp.int32))


def of(state: TrainState) -> OptimizerState:
    """The optimizer's part of a state. Raises CheckpointError where it has none."""
    if state.opt_state is None:
        raise CheckpointError(
            "this state has no optimizer, since it was loaded for inference or the config has early_cast: load it with "
            "optimizer=True, without early_cast"
        )
    return state.opt_state


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
    before = of(state)
    finite = jnp.isfinite(norm)
    kept = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
    scale = jnp.minimum(1.0, optim.max_grad_norm / jnp.maximum(norm / microbatches, 1e-30)) / microbatches

    def moments(mu: jax.Array, nu: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        g = gradient * scale
        return kept(optim.b1 * mu + (1 - optim.b1) * g, mu), kept(optim.b2 * nu + (1 - optim.b2) * jnp.square(g), nu)

    both = jax.tree.map(moments, before.mu, before.nu, gradient)
    is_pair = lambda x: isinstance(x, tuple)  # noqa: E731
    mu, nu = (jax.tree.map(lambda pair, i=i: pair[i], both, is_leaf=is_pair) for i in (0, 1))
    # Behind the barrier the parameters are updated from the *new* moments. Without it XLA computes them again from the
    # old ones, which must then outlive their donated buffers: a copy of both moments, a fifth of the update's time.
    mu, nu = lax.optimization_barrier((mu, nu))
    count = before.count + 1
    correction = [1 - jnp.asarray(b, jnp.float32) ** count.astype(jnp.float32) for b in (optim.b1, optim.b2)]
    rate = schedule(optim)(before.schedule_count)

    def step(p: jax.Array, m: jax.Array, n: jax.Array, decays: bool) -> jax.Array:
        direction = (m / correction[0]) / (jnp.sqrt(n / correction[1]) + optim.eps)
        return kept(p - rate * (direction + optim.weight_decay * p if decays else direction), p)

    params = jax.tree.map(step, state.params, mu, nu, decay)
    opt_state = OptimizerState(kept(count, before.count), mu, nu, before.schedule_count + finite)
    fresh = TrainState(params, opt_state, state.step + finite)
    return Update(fresh, rate, 1 - finite.astype(jnp.int32))
