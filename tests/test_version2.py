"""Version 2: against numbers measured on the 2021 library, on any mesh; new models with real heads; generation.

`tests/data/golden_v2` holds what that library computed for a model trained on four shards, and its checkpoints.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from conftest import batch_of, mesh_of, network_of, tiny
from invariance_tools import NO_GRADIENT

from mesh_transformer import CausalTransformer, CausalTransformerV2, load_config
from mesh_transformer.checkpoint import reference_v2
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.errors import CheckpointError
from mesh_transformer.transformer_zero import network_of as network_by_version

pytestmark = pytest.mark.usefixtures("uncached")

GOLDEN = Path(__file__).parent / "data" / "golden_v2"
TRACE = json.loads((GOLDEN / "train_trace.json").read_text())
LAST = GOLDEN / f"step_{len(TRACE)}"
V2: dict[str, Any] = {"version": 2, "d_head": 6}


def network(dp: int, mp: int, **changes: Any) -> CausalTransformerV2:
    config = json.loads((GOLDEN / "config.json").read_text())
    config |= {"compute_dtype": "float32", "train_set": "none.index", "total_steps": 100, "name": "golden"}
    config |= {"cores_per_replica": mp, "v2_merged_heads": 4, "v2_decay_vectors": True}
    return CausalTransformerV2(load_config(config | changes), mesh_of(dp, mp))


@pytest.fixture(scope="module")
def four_shards() -> CausalTransformerV2:
    return network(2, 4)


def test_evaluation_of_a_loaded_checkpoint(four_shards: CausalTransformerV2) -> None:
    four_shards.load_ckpt(LAST)
    golden = dict(np.load(GOLDEN / "eval.npz"))
    tokens = golden["tokens"]
    out = four_shards.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})
    for key in ("loss", "last_loss", "all_loss"):
        np.testing.assert_allclose(out[key], golden[key], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(out["correct"], golden["correct"])


def test_evaluations_z_loss_is_the_mean_over_real_rows(four_shards: CausalTransformerV2) -> None:
    """Rows that only fill the batch up to the replicas do not count."""
    four_shards.load_ckpt(LAST)
    rows = batch_of(3, 32, vocab=128)
    padded, single = four_shards.eval(rows), network(1, 4)
    single.state = four_shards_on(single)
    np.testing.assert_allclose(padded["all_loss"], single.eval(rows)["all_loss"], atol=1e-5)


def four_shards_on(net: CausalTransformerV2) -> Any:
    net.load_ckpt(LAST)
    return net.state


def test_the_whole_training_trace_and_the_final_parameters(four_shards: CausalTransformerV2) -> None:
    four_shards.load_ckpt(GOLDEN / "step_0")
    for tokens, golden in zip(np.load(GOLDEN / "train_batches.npz")["tokens"], TRACE, strict=True):
        metrics = four_shards.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
        for key in ("loss", "last_loss"):
            assert float(metrics[key]) == pytest.approx(golden[key], rel=1e-4)
    trained, expected = four_shards.state, four_shards_on(network(1, 1))
    assert int(trained.step) == int(expected.step) == len(TRACE)
    for (path, got), other in zip(
        jax.tree_util.tree_leaves_with_path(trained.params), jax.tree.leaves(expected.params), strict=True
    ):
        assert np.abs(got - np.asarray(other)).max() < 1e-3, jax.tree_util.keystr(path)
    # The folder's moments are those of the parameters that they stand beside here.
    for name in ("mu", "nu"):
        for (path, got), other in zip(
            jax.tree_util.tree_leaves_with_path(getattr(trained.opt_state, name)),
            jax.tree.leaves(getattr(expected.opt_state, name)),
            strict=True,
        ):
            if not jax.tree_util.keystr(path).endswith(NO_GRADIENT):
                largest = np.abs(np.asarray(other)).max()
                assert np.abs(got - np.asarray(other)).max() <= 1e-2 * largest, (name, jax.tree_util.keystr(path))
    assert int(trained.opt_state.count) == int(expected.opt_state.count)
    assert int(trained.opt_state.schedule_count) == int(expected.opt_state.schedule_count)


def test_decay_of_stacked_vectors_is_what_the_trace_needs(four_shards: CausalTransformerV2) -> None:
    plain = network(2, 4, v2_decay_vectors=False)
    for net in (four_shards, plain):
        net.load_ckpt(GOLDEN / "step_0")
        for tokens in np.load(GOLDEN / "train_batches.npz")["tokens"][:3]:
            net.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
    layers = "causal_transformer_shard/~/transformer_layer_shard"
    scales = [np.asarray(net.state.params[layers]["norm_scale"]) for net in (four_shards, plain)]
    assert np.abs(scales[0] - scales[1]).max() > 1e-5


@pytest.mark.parametrize(("dp", "mp"), [(1, 1), (2, 2), (1, 8)])
def test_merged_heads_do_not_depend_on_the_mesh(four_shards: CausalTransformerV2, dp: int, mp: int) -> None:
    """At mp 8 the four merged heads cannot be split: every shard attends with all of them."""
    four_shards.load_ckpt(LAST)
    obs = batch_of(2, 32, vocab=128)["obs"]
    other = network(dp, mp)
    other.load_ckpt(LAST)
    np.testing.assert_allclose(other.logits(obs), four_shards.logits(obs), atol=1e-5, rtol=0)


def test_gradients_of_merged_heads_that_cannot_be_split(four_shards: CausalTransformerV2) -> None:
    batch = {key: rows[:, None].repeat(2, 1) for key, rows in batch_of(2, 32, vocab=128).items()}
    four_shards.load_ckpt(LAST)
    wide = network(1, 8, per_replica_batch=2)
    wide.load_ckpt(LAST)
    norms = [float(net.train(batch)["grad_norm"]) for net in (four_shards, wide)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_real_heads_are_another_function(four_shards: CausalTransformerV2) -> None:
    """Merging is a quirk of the checkpoint: the same weights with real heads give other logits."""
    four_shards.load_ckpt(LAST)
    real = CausalTransformerV2(load_config({**four_shards.config.to_dict(), "v2_merged_heads": None}), four_shards.mesh)
    real.state = four_shards.state
    obs = batch_of(2, 32, vocab=128)["obs"]
    assert np.abs(np.asarray(real.logits(obs)) - np.asarray(four_shards.logits(obs))).max() > 1e-2


def test_a_reference_folder_without_merged_heads_is_refused(tmp_path: Path) -> None:
    net = network(1, 4, v2_merged_heads=None, version=2)
    with pytest.raises(CheckpointError, match='set "v2_merged_heads" in the config to the cores_per_replica'):
        net.load_ckpt(LAST)


def test_damaged_and_foreign_reference_folders(tmp_path: Path) -> None:
    shutil.copytree(LAST, tmp_path / "a")
    (tmp_path / "a/opt_state/shard_0.npz").write_bytes(b"PK")
    with pytest.raises(DamagedError, match="opt_state/shard_0.npz"):
        network(1, 4).load_ckpt(tmp_path / "a")
    network(1, 4).load_ckpt(tmp_path / "a", optimizer=False)
    meta = json.loads((LAST / "meta.json").read_text())
    (tmp_path / "a/meta.json").write_text(json.dumps(meta | {"total_hosts": 2}))
    with pytest.raises(DamagedError, match=r"params/shard_1.npz missing, of 2 hosts"):
        network(1, 4).load_ckpt(tmp_path / "a")
    (tmp_path / "a/meta.json").write_text(json.dumps(meta | {"param_order": meta["param_order"][::-1]}))
    with pytest.raises(CheckpointError, match="param_order is not version 2's"):
        network(1, 4).load_ckpt(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"arr_6 is \[2, 64\], the config expects \[3, 64\]"):
        network(1, 4, layers=3).load_ckpt(LAST)


def test_slices_of_several_hosts_are_joined(tmp_path: Path) -> None:
    """Each host's file has its part of the tensors that were split, and the whole of the others."""
    shutil.copytree(LAST, tmp_path / "two")
    meta = json.loads((LAST / "meta.json").read_text())
    (tmp_path / "two/meta.json").write_text(json.dumps(meta | {"total_hosts": 2}))
    for group in ("params", "opt_state"):
        whole = list(np.load(LAST / group / "shard_0.npz").values())
        halves = [np.split(x, 2, axis=int(np.argmax(x.shape))) if x.ndim > 1 else [x, x] for x in whole]
        for host in range(2):
            np.savez(tmp_path / "two" / group / f"shard_{host}.npz", *[half[host] for half in halves])
    one, two = (four_shards_on_path(network(1, 2), path) for path in (LAST, tmp_path / "two"))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def four_shards_on_path(net: CausalTransformerV2, path: Path) -> Any:
    net.load_ckpt(path)
    return jax.device_get(net.state)


def test_columns_are_taken_apart_shard_by_shard() -> None:
    """Two shards of [q, v] with widths 2 and 1."""
    q, v = reference_v2._apart(np.arange(6)[None], 2, (2, 1), axis=-1)
    np.testing.assert_array_equal(q, [[0, 1, 3, 4]])
    np.testing.assert_array_equal(v, [[2, 5]])


# New models


@pytest.mark.parametrize(("dp", "mp"), [(4, 2), pytest.param(1, 8, marks=pytest.mark.long)])
def test_real_heads_of_any_size_do_not_depend_on_the_mesh(dp: int, mp: int) -> None:
    nets = [network_of(*shape, seed=3, **V2) for shape in ((1, 1), (dp, mp))]
    obs = batch_of(4, 16)["obs"]
    np.testing.assert_allclose(nets[0].logits(obs), nets[1].logits(obs), atol=1e-5, rtol=0)
    assert nets[0].model.d_attention == 48 != nets[0].model.d_model


def test_evaluation_of_a_new_model_is_cross_entropy_alone() -> None:
    net = network_of(1, 1, seed=3, **V2)
    rows = batch_of(2, 16)
    logits = np.asarray(net.logits(rows["obs"]), np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    expected = log_z - np.take_along_axis(logits, rows["target"][..., None], 2)[..., 0]
    np.testing.assert_allclose(net.eval(rows)["all_loss"], expected, atol=1e-5)


@pytest.mark.parametrize("merged", [None, pytest.param(4, marks=pytest.mark.long)])
def test_generation_equals_the_full_forward_pass(merged: int | None) -> None:
    """Which the 2021 library's version 2 never did; on 8 shards with 4 merged heads too."""
    net = network_of(1, 8, seed=3, **({"v2_merged_heads": merged, "version": 2} if merged else V2))
    context = batch_of(2, 8)["obs"]
    out = net.generate(context, [8, 5], 6, {"temp": 0}, return_logits=True)
    for row, length in enumerate((8, 5)):
        text = np.concatenate([context[row, 8 - length :], out["tokens"][row]])[None]
        full = np.asarray(net.logits(text))[0, length - 1 : -1]
        np.testing.assert_allclose(out["logits"][row], full, atol=1e-4, rtol=0)
        np.testing.assert_array_equal(out["tokens"][row], full.argmax(-1))


def test_the_version_decides_the_network() -> None:
    one, two = load_config(tiny()), load_config(tiny(**V2, norm="rmsnorm", pe="t5"))
    assert type(network_by_version(one, mesh_of(1, 1))) is CausalTransformer
    assert type(network_by_version(two, mesh_of(1, 1))) is CausalTransformerV2
    assert (two.model.norm, two.model.pe) == ("layernorm", "rotary"), "always, whatever the config says"
    assert (one.mesh.zero_stage, two.mesh.zero_stage) == (0, 3)
    assert load_config(tiny(), version=2).version == 2
    taken = CausalTransformerV2(one, mesh_of(1, 1))
    assert (taken.config.version, taken.zero.stage) == (2, 3)


# Meshes beyond 8 shards and not of powers of two


@pytest.mark.parametrize(
    ("dp", "mp", "version", "stage"),
    [
        (1, 3, 2, 3),
        (3, 2, 1, 3),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 3, 1, 0), (1, 6, 1, 0), (3, 1, 1, 1))),
    ],
)
def test_meshes_that_are_no_power_of_two(dp: int, mp: int, version: int, stage: int) -> None:
    sizes = {"d_model": 48, "n_heads": 6, "n_vocab": 66, "version": version, "per_replica_batch": 6 // dp}
    sizes["zero_stage"] = stage
    batch = batch_of(1, 6, 16, vocab=66)
    losses = [
        [float(net.train(batch)["loss"]) for _ in range(3)]
        for net in (network_of(1, 1, **sizes | {"per_replica_batch": 6}), network_of(dp, mp, **sizes))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][2] < losses[0][0]
