"""The schedule at every edge, and one update against optax's own chain and against numpy."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import network_of, tiny

from mesh_transformer import load_config, optimizer, parameters
from mesh_transformer.errors import CheckpointError
from mesh_transformer.state import TrainState


def optim_of(**changes: Any) -> Any:
    return load_config(tiny(**changes)).optim


def rate(count: int, **changes: Any) -> float:
    return float(optimizer.schedule(optim_of(lr=1.0, end_lr=0.1, **changes))(count))


@pytest.mark.parametrize(
    ("warmup", "anneal", "count", "expected"),
    [
        (0, 10, 0, 1.0),  # no warm-up: the first update has the full rate
        (5, 0, 7, 0.1),  # no annealing: straight to end_lr
        (5, 0, 5, 0.1),
        (0, 0, 0, 0.1),
        (4, 8, 0, 0.0),  # quirk: with a warm-up the first update has rate 0
        (4, 8, 1, 0.25),
        (4, 8, 4, 1.0),
        (4, 8, 8, 0.1 + 0.9 * 0.5),
        (4, 8, 12, 0.1),
        (4, 8, 1000, 0.1),
    ],
)
def test_schedule(warmup: int, anneal: int, count: int, expected: float) -> None:
    assert rate(count, warmup_steps=warmup, anneal_steps=anneal) == pytest.approx(expected, abs=1e-7)


def test_schedule_is_finite_and_monotone_everywhere() -> None:
    random = np.random.default_rng(0)
    for warmup, anneal in random.integers(0, 9, (40, 2)):
        optim = optim_of(lr=1.0, end_lr=0.1, warmup_steps=int(warmup), anneal_steps=int(anneal))
        rates = np.asarray(optimizer.schedule(optim)(jnp.arange(30)))
        assert np.isfinite(rates).all()
        assert (np.diff(rates[: warmup + 1]) >= 0).all() or anneal == 0
        assert (np.diff(rates[warmup:]) <= 1e-7).all()


def small_state(seed: int = 0) -> tuple[TrainState, Any, Any]:
    model = load_config(tiny()).model
    draw = np.random.default_rng(seed).standard_normal
    tree = lambda: parameters.tree((k, jnp.asarray(draw(k.shape), jnp.float32)) for k in parameters.kinds(model, 1))  # noqa: E731
    params = tree()
    return TrainState(params, optimizer.init(params), jnp.int32(0)), tree(), parameters.decay_mask(model, 1)


def norm_of(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_updates_equal_the_chain_made_of_optax_parts(microbatches: int) -> None:
    optim = optim_of(warmup_steps=2, anneal_steps=3, weight_decay=0.1)
    state, gradient, decay = small_state()
    chain = optax.chain(
        optax.scale(1 / microbatches),
        optax.clip_by_global_norm(optim.max_grad_norm),
        optax.scale_by_adam(optim.b1, optim.b2, optim.eps),
        optax.add_decayed_weights(optim.weight_decay, mask=decay),
        optax.scale(-1),
        optax.scale_by_schedule(optimizer.schedule(optim)),
    )
    params, chain_state = state.params, chain.init(state.params)
    for step in range(6):
        scaled = jax.tree.map(lambda g, s=step: g * 10.0 ** (2 - s), gradient)  # clipped at first, then not
        updates, chain_state = chain.update(scaled, chain_state, params)
        params = optax.apply_updates(params, updates)
        update = optimizer.apply(state, scaled, norm_of(scaled), microbatches, optim, decay)
        state = update.state
        assert float(update.learning_rate) == pytest.approx(float(optimizer.schedule(optim)(step)))
    for got, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6, rtol=2e-6)
    assert int(state.step) == int(state.opt_state.count) == int(state.opt_state.schedule_count) == 6


@pytest.mark.parametrize("mp", [1, 4])
def test_decay_follows_the_role_of_a_parameter(mp: int) -> None:
    model = load_config(tiny(norm="layernorm-desync")).model
    kinds = parameters.kinds(model, mp)
    params = parameters.tree((kind, jnp.ones(kind.shape)) for kind in kinds)
    state = TrainState(params, optimizer.init(params), jnp.int32(0))
    optim = optim_of(lr=0.5, warmup_steps=0, weight_decay=0.1)
    zero = jax.tree.map(jnp.zeros_like, params)
    after = optimizer.apply(state, zero, jnp.float32(0), 1, optim, parameters.decay_mask(model, mp)).state.params
    for kind in kinds:
        matrix = kind.name in {"w", "q", "k", "v", "o", "w1", "w2"}
        expected = 1 - 0.5 * 0.1 if matrix else 1.0
        np.testing.assert_allclose(after[kind.module][kind.name], expected, rtol=1e-6, err_msg=str(kind.path))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    state, gradient, decay = small_state()
    optim = optim_of(warmup_steps=0)
    state = optimizer.apply(state, gradient, norm_of(gradient), 1, optim, decay).state
    module = next(iter(gradient))
    name = next(iter(gradient[module]))
    gradient[module][name] = gradient[module][name].at[0].set(bad)
    update = optimizer.apply(state, gradient, norm_of(gradient), 1, optim, decay)
    assert int(update.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, update.state, state)


def test_a_state_without_moments_cannot_train() -> None:
    state, gradient, decay = small_state()
    with pytest.raises(CheckpointError, match="no optimizer"):
        optimizer.apply(state._replace(opt_state=None), gradient, jnp.float32(1), 1, optim_of(), decay)


def test_fresh_parameters_are_drawn_as_in_2021() -> None:
    net = network_of(1, 1, layers=4, d_model=64, n_vocab=512, n_heads=16, pe="t5")
    for kind in parameters.kinds(net.model, 1):
        value = np.asarray(net.state.params[kind.module][kind.name])
        if not kind.random:
            np.testing.assert_array_equal(value, np.float32(kind.init))
            continue
        assert np.abs(value).max() <= 2 * kind.init * 1.0001, "truncated at two deviations"
        # a normal cut at two deviations has 0.8796 of its deviation left, which Haiku does not make up for
        assert value.std() == pytest.approx(0.8796 * kind.init, rel=0.1), kind.path
