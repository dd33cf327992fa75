"""Matrices kept as panels: the same products, the same logits, and every matrix in memory once."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import network_of, tokens_of
from decoding_tools import network
from test_decoding import check_every_position

from mesh_transformer import panels, parameters

WIDE = {"d_model": 128, "n_heads": 4, "n_vocab": 256, "seq": 96, "pe": "rotary"}


@pytest.fixture
def one_core_each(monkeypatch):
    """As on a machine with as many cores as the test's mesh has devices."""
    monkeypatch.setattr(panels, "_cores", lambda: 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, panels.LEAST_ROWS - 1, 8, panels.MOST_ROWS_AT_ONCE, panels.MOST_ROWS_AT_ONCE + 3])
def test_products_are_those_of_the_matrix(rows, dtype):
    random = np.random.default_rng(rows)
    x, w = (jnp.asarray(random.normal(size=size), dtype) for size in ((rows, 96), (96, 3 * panels.WIDTH)))
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for matrix in (w, jnp.asarray(panels.cut(np.asarray(w)))):
        out = panels.product(x, matrix)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("norm", "dp", "mp"), [("layernorm", 1, 2), ("layernorm-desync", 2, 1)])
def test_decoding_with_panels_equals_the_plain_model(one_core_each, norm, dp, mp):
    """A prompt of more rows than panels take at once, and steps of a few."""
    net = network(dp, mp, norm=norm, **WIDE)
    check_every_position(net, [tokens_of(n, vocab=256, seed=n) for n in (1, 40, 70)], 8)
    first = net.weights.layers[0]
    assert {name for name, w in first.items() if w.ndim == 3} == {"q", "k", "v", "o", "w1", "w2"}
    assert first["w1"].shape == (512 // 64, 128, 64) and net.weights.head.shape == (256 // 64, 128, 64)
    assert "w" not in net.weights.params[parameters.PROJECTION]


@pytest.mark.parametrize(
    ("dp", "mp", "changes", "tolerance"),
    [
        (1, 2, {"version": 2, "d_head": 32}, 1e-4),
        (2, 2, {"pe": "t5", "norm": "rmsnorm-bias"}, 1e-4),
        (2, 1, {"compute_dtype": "bfloat16"}, 0.05),
    ],
    ids=str,
)
def test_the_network_itself_agrees(one_core_each, dp, mp, changes, tolerance):
    """Its forward pass reads matrices."""
    net = network(dp, mp, **WIDE | changes)
    prompts = tokens_of(4, 70, vocab=256)
    out = net.generate(prompts.astype(np.uint32), np.full(4, 70), 8, {"temp": 0}, return_logits=True)
    assert net.weights.layers[0]["w1"].ndim == net.weights.head.ndim == 3
    text = np.pad(np.concatenate([prompts, out["tokens"]], 1), ((0, 0), (0, net.model.seq - 78)))
    full = np.asarray(net.logits(text))[:, 69:77]
    np.testing.assert_allclose(out["logits"], full, atol=tolerance * np.abs(full).max(), rtol=0)
    assert full.std() > 0.1


def test_there_are_panels_only_where_every_core_has_a_device_and_columns_divide(monkeypatch):
    net = network_of(1, 2, **WIDE | {"n_vocab": 160})
    monkeypatch.setattr(panels, "_cores", lambda: 3)
    assert not panels.used_on(net.mesh)
    assert all(w.ndim < 3 for w in net.weights.layers[0].values()) and net.weights.head is None
    monkeypatch.setattr(panels, "_cores", lambda: 2)
    again = network_of(1, 2, **WIDE | {"n_vocab": 160})
    assert again.weights.layers[0]["q"].ndim == 3
    assert again.weights.head is None and again.weights.params[parameters.PROJECTION]["w"].ndim == 2


@pytest.mark.parametrize("generate_first", [False, True])
@pytest.mark.parametrize("devices", [1, 2])  # of two cores: whole matrices and panels
def test_a_network_that_only_decodes_keeps_what_it_decodes_with_alone(one_core_each, devices, generate_first):
    net = network_of(1, devices, **WIDE)
    named, net.state = network(1, devices, **WIDE), network(1, devices, **WIDE).state
    prompt = np.ones((1, 8), np.uint32), np.array([8]), 4, {"temp": 0}
    tokens = named.generate(*prompt)["tokens"]
    net.state = jax.tree.map(lambda x: x + 0, net.state)  # nobody else's
    if generate_first:
        net.generate(*prompt)
    matrices = [weakref.ref(net.state.params[parameters.LAYERS][name]) for name in ("q", "o", "w1")]
    net.decode_only()
    net.decode_only()
    gc.collect()
    # Whole ones are views of the parameters, which these keep.
    assert all((matrix() is None) == (devices == 2) for matrix in matrices)
    assert (net.generate(*prompt)["tokens"] == tokens).all()
    with pytest.raises(RuntimeError, match="only decodes"):
        net.eval({"obs": np.zeros((1, 8)), "target": np.zeros((1, 8))})
    net.state = named.state
    assert np.isfinite(net.eval({"obs": np.zeros((2, 8), int), "target": np.zeros((2, 8), int)})["loss"]).all()
