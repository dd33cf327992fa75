"""Properties of a training step: causality, accumulation, masks, non-finite gradients, 16-bit types, random keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, mesh_of, network_of, tiny, tokens_of

from mesh_transformer import load_config, parameters, transformer_shard
from mesh_transformer.errors import ConfigError, DataError
from mesh_transformer.transformer_shard import CausalTransformer

S = 16


def first_moments(net: CausalTransformer) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(net.state.opt_state.mu)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def test_a_position_sees_nothing_behind_it() -> None:
    net = network_of(1, 2)
    tokens = tokens_of(1, S)
    before = np.asarray(net.logits(tokens))
    changed = tokens.copy()
    changed[0, 9:] = (changed[0, 9:] + 7) % 64
    after = np.asarray(net.logits(changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.abs(before[:, 9:] - after[:, 9:]).max() > 0.01


def test_ctx_length_hides_keys_behind_it() -> None:
    net = network_of(1, 2)
    rows = batch_of(2, S)
    other = rows["obs"].copy()
    other[0, 6] = (other[0, 6] + 1) % 64  # hidden from row 0's later positions when 5 + 1 keys are seen
    ctx = np.array([5, S])
    out = np.asarray(net.eval({**rows, "ctx_length": ctx})["all_loss"])
    changed = np.asarray(net.eval({**rows, "obs": other, "ctx_length": ctx})["all_loss"])
    np.testing.assert_array_equal(out[0, 7:], changed[0, 7:])
    assert out[0, 6] != changed[0, 6], "position 6 itself is embedded all the same"


@pytest.mark.parametrize("net_rows", [1, 3])
def test_evaluation_takes_any_number_of_rows(net_rows: int) -> None:
    net = network_of(2, 1)
    rows = batch_of(4, S)
    whole = np.asarray(net.eval(rows)["loss"])
    part = net.eval({k: v[:net_rows] for k, v in rows.items()})
    np.testing.assert_allclose(part["loss"], whole[:net_rows], rtol=1e-6)


def test_training_and_evaluation_mean_the_same_cross_entropy() -> None:
    net = network_of(2, 2)
    rows = batch_of(1, 4, S)
    expected = np.asarray(net.eval({k: v[0] for k, v in rows.items()})["loss"]).mean()
    metrics = net.train(rows)
    assert float(metrics["cross_entropy"]) == pytest.approx(expected, abs=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(metrics["cross_entropy"]) + float(metrics["z_loss"]), rel=1e-6)
    assert float(metrics["z_loss"]) > 1e-5


def test_many_microbatches_equal_one_batch() -> None:
    rows = batch_of(1, 16, S)
    one, many = network_of(1, 1, max_grad_norm=1e9), network_of(1, 1, max_grad_norm=1e9)
    one.train(rows)
    many.train({k: v.reshape(16, 1, S) for k, v in rows.items()})
    for key, expected in first_moments(one).items():
        assert np.abs(first_moments(many)[key] - expected).max() <= 1e-5 * np.abs(expected).max(), key


def test_bfloat16_error_does_not_grow_with_accumulation() -> None:
    rows = batch_of(1, 16, S)
    errors = []
    exact = network_of(1, 1, max_grad_norm=1e9)
    exact.train(rows)
    for microbatches in (1, 16):
        net = network_of(1, 1, max_grad_norm=1e9, compute_dtype="bfloat16")
        net.train({k: v.reshape(microbatches, -1, S) for k, v in rows.items()})
        pairs = zip(first_moments(net).values(), first_moments(exact).values(), strict=True)
        errors.append(sum(np.square(a - b).sum() for a, b in pairs) ** 0.5)
    assert 0 < errors[1] < 1.2 * errors[0]


def test_a_mask_of_ones_changes_no_bit() -> None:
    rows = batch_of(2, 2, S)
    plain, masked = network_of(1, 2), network_of(1, 2)
    plain.train(rows)
    masked.train({**rows, "mask": np.ones(rows["obs"].shape)})
    jax.tree.map(np.testing.assert_array_equal, plain.state, masked.state)


def test_a_mask_is_normalised_over_the_whole_step() -> None:
    rows = batch_of(1, 4, S)
    mask = np.zeros((1, 4, S), np.float32)
    mask[0, 0, :3], mask[0, 1, 5:], mask[0, 3, 0] = 1, 1, 1  # rows of 3, 11, 0 and 1 positions
    one = network_of(1, 1, max_grad_norm=1e9)
    metrics = one.train({**rows, "mask": mask})
    losses = np.asarray(network_of(1, 1).eval({k: v[0] for k, v in rows.items()})["all_loss"])
    assert float(metrics["cross_entropy"]) == pytest.approx((losses * mask[0]).sum() / mask.sum(), rel=1e-5)
    for dp, microbatches in ((1, 2), (2, 2), (1, 4)):
        net = network_of(dp, 1, max_grad_norm=1e9)
        net.train({k: v.reshape(microbatches, -1, S) for k, v in {**rows, "mask": mask}.items()})
        for key, expected in first_moments(one).items():
            assert np.abs(first_moments(net)[key] - expected).max() <= 1e-5 * np.abs(expected).max(), key


@pytest.mark.parametrize(
    ("dp", "microbatches", "per_replica"), [(2, 2, 1), pytest.param(2, 2, 2, marks=pytest.mark.long)]
)
def test_small_gradients_are_those_of_each_replicas_microbatch(dp: int, microbatches: int, per_replica: int) -> None:
    """What the noise scale rests on (McCandlish et al. 2018, appendix A.1), from each small batch by itself.

    That they do not depend on the mesh otherwise is shown in test_mesh_invariance.py.
    """
    rows = batch_of(microbatches, dp * per_replica, S)
    metrics = network_of(dp, 1).train(rows)
    alone = {k: v.reshape(-1, 1, per_replica, S) for k, v in rows.items()}
    small = [
        float(network_of(1, 1).train({k: v[i] for k, v in alone.items()})["grad_norm"])
        for i in range(microbatches * dp)
    ]
    assert float(metrics["noise_small_sq"]) == pytest.approx(np.mean(np.square(small)), rel=1e-5)
    assert float(metrics["grad_norm_micro"]) == pytest.approx(np.mean(small), rel=1e-5)
    assert np.mean(np.square(small)) > 1.1 * (float(metrics["grad_norm"]) / microbatches) ** 2, "they are noisier"


def test_a_nan_in_one_microbatch_skips_the_step() -> None:
    net = network_of(2, 1)
    net.train(batch_of(2, 2, S))
    before = jax.tree.map(np.array, net.state)
    mask = np.ones((2, 2, S), np.float32)
    mask[1, 0, 3] = np.nan
    metrics = net.train({**batch_of(2, 2, S), "mask": mask})
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before, net.state)
    assert int(net.train(batch_of(2, 2, S))["skipped"]) == 0
    assert int(net.state.step) == 2


@pytest.mark.parametrize(
    ("dtype", "pe"),
    [
        ("bfloat16", "rotary"),
        ("float16", "t5"),
        pytest.param("bfloat16", "t5", marks=pytest.mark.long),
        pytest.param("float16", "rotary", marks=pytest.mark.long),
    ],
)
def test_16_bit_losses_and_gradients_are_finite(dtype: str, pe: str) -> None:
    net = network_of(1, 2, compute_dtype=dtype, pe=pe)
    big = jax.tree.map(lambda x: x * (6 if dtype == "float16" else 20), net.state.params)  # large scores
    net.state = net.state._replace(params=big)
    assert all(np.isfinite(float(v)) for v in net.train(batch_of(1, 2, S)).values())
    out = net.eval({**batch_of(2, S), "ctx_length": np.array([0, 0])})  # all keys but the first are hidden
    assert np.isfinite(np.asarray(out["all_loss"])).all()


@pytest.mark.parametrize("z_loss", ["reference", "log_z", "off"])
def test_z_loss_as_asked_for(z_loss: str) -> None:
    net = network_of(1, 1, z_loss=z_loss)
    rows = batch_of(1, 2, S)
    logits = np.asarray(net.logits(rows["obs"][0]), np.float64)
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))
    if z_loss == "log_z":
        log_z = log_z + logits.max(-1)
    expected = 0 if z_loss == "off" else 1e-4 * np.square(log_z).mean()
    assert float(net.train(rows)["z_loss"]) == pytest.approx(expected, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("implementation", ["rbg", pytest.param("threefry2x32", marks=pytest.mark.long)])
def test_either_kind_of_random_key(implementation: str) -> None:
    with jax.default_prng_impl(implementation):
        net = network_of(2, 2)
        params = transformer_shard.init_params(net.model, mesh_of(2, 2), seed=3)
        net.state = net.state._replace(params=params)
        assert np.isfinite(float(net.train(batch_of(1, 2, S))["loss"]))
        params = net.state.params
    assert np.isfinite(np.asarray(params[parameters.EMBEDDING]["w"])).all()
    assert np.asarray(params[parameters.EMBEDDING]["w"]).std() > 0


def test_the_table_and_the_haiku_modules_agree() -> None:
    net = network_of(1, 1, pe="t5", norm="rmsnorm-bias")
    parameters.check_tree(net.state.params, net.model, 1)
    with pytest.raises(Exception, match="extra/w is not in the table"):
        parameters.check_tree({**net.state.params, "extra": {"w": jnp.zeros(1)}}, net.model, 1)


def test_shapes_that_do_not_fit_are_refused() -> None:
    net = network_of(2, 1)
    with pytest.raises(DataError, match="multiple of dp"):
        net.train(batch_of(1, 3, S))
    with pytest.raises(DataError, match=r"at most seq \(16\), found \(1, 2, 17\)"):
        net.train(batch_of(1, 2, S + 1))
    with pytest.raises(DataError, match=r"must be \[B, S\]"):
        net.eval(batch_of(1, 2, S))
    with pytest.raises(DataError, match=r"mask has shape \(1, 2, 3\)"):
        net.train({**batch_of(1, 2, S), "mask": np.ones((1, 2, 3))})
    with pytest.raises(DataError, match=r"target holds ids from 0 to 64, outside"):
        net.eval({"obs": np.zeros((1, S)), "target": np.array([[0] * (S - 1) + [64]])})
    with pytest.raises(ConfigError, match="mp 2.*cores_per_replica 1"):
        CausalTransformer(load_config(tiny()), mesh_of(1, 2))
