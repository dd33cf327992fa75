"""The published npz layout: ours and the 2021 library's files carry the same values, for any M onto any mesh."""

import json
import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_tools import (
    assert_states_equal,
    cast_params,
    config_of,
    host,
    random_state,
    read_plain,
    without_fsync,
    write_2021,
)
from conftest import mesh_of

from mesh_transformer.checkpoint import inventory, layout, manifest
from mesh_transformer.checkpoint.shards import read_step, snapshot, write_step
from mesh_transformer.config import load_config
from mesh_transformer.config_groups import NORMS, POSITIONS
from mesh_transformer.errors import CheckpointError
from mesh_transformer.parameters import Combine


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    without_fsync(monkeypatch)


GOLDEN = pathlib.Path(__file__).parent / "data" / "golden"
GOLDEN_STEPS = sorted(path for path in GOLDEN.glob("v1_*/*step_*") if path.is_dir())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pe", POSITIONS)
def test_files_of_the_2021_library_give_back_the_whole_tensors(tmp_path, norm, pe):
    shards = 4
    model = config_of(shards, norm=norm, pe=pe).model
    state = random_state(model, mesh_of(2, shards))
    write_2021(tmp_path, model, host(state), shards)
    assert_states_equal(read_step(tmp_path, model, mesh_of(2, shards)), state)


@pytest.mark.parametrize(("shards", "dp", "mp"), [(1, 2, 4), (2, 1, 1), (4, 4, 2), (8, 2, 2), (2, 1, 8), (8, 1, 8)])
def test_any_number_of_shards_reads_onto_any_mesh(tmp_path, shards, dp, mp):
    model = config_of(1, layers=3, pe="t5").model
    state = random_state(model, mesh_of(1, 1))
    write_2021(tmp_path, model, host(state), shards)
    found = read_step(tmp_path, model, mesh_of(dp, mp))
    assert_states_equal(found, state)
    w = found.params["causal_transformer_shard/~/embedding_shard"]["w"]
    assert w.addressable_shards[0].data.shape == (model.n_vocab // mp, model.d_model)


@pytest.mark.parametrize(
    ("shards", "norm", "pe", "layers"),
    [
        (1, "layernorm", "rotary", 11),  # layer_10 sorts before layer_2
        (8, "layernorm", "rotary", 2),
        (4, "scalenorm-bias", "t5", 2),
        (8, "scalenorm", "t5", 1),
        (2, "rmsnorm", "fixed", 3),
        (4, "layernorm-nobias", "fixed", 1),
    ],
)
def test_written_files_are_those_of_the_2021_library(tmp_path, shards, norm, pe, layers):
    model = config_of(1, norm=norm, pe=pe, layers=layers).model
    state = random_state(model, mesh_of(1, 2))
    write_step(tmp_path / "ours", snapshot(state), model, shards)
    write_2021(tmp_path / "theirs", model, host(state), shards)
    for shard in range(shards):
        for ours, theirs in zip(
            read_plain(tmp_path / "ours", shard), read_plain(tmp_path / "theirs", shard), strict=True
        ):
            assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


@pytest.mark.parametrize(("shards", "mp"), [(1, 1), (8, 1), (4, 8), (2, 4), (3, 1), (6, 2)])
def test_a_round_trip_keeps_every_bit(tmp_path, shards, mp):
    """Also where M is not a power of two, which no bias can be divided by exactly."""
    model = config_of(1, d_model=48, n_heads=24, n_vocab=48, pe_rotary_dims=2, pe="t5").model
    state = random_state(model, mesh_of(1, mp))
    write_step(tmp_path, snapshot(state), model, shards)
    assert_states_equal(read_step(tmp_path, model, mesh_of(1, mp)), state)


def test_tiny_biases_survive_the_division(tmp_path):
    """A subnormal number cannot be divided by 8 without loss."""
    model = config_of(1).model
    state = host(random_state(model, mesh_of(1, 1)))
    bias = state.params["causal_transformer_shard/~/embedding_shard"]["b"] = np.full(32, 1e-44, np.float32)
    write_step(tmp_path, snapshot(state), model, 8)
    found = read_step(tmp_path, model, mesh_of(1, 1)).params["causal_transformer_shard/~/embedding_shard"]["b"]
    assert np.asarray(found).tobytes() == bias.tobytes()


def test_desynchronised_norms_stay_with_their_shards(tmp_path):
    model = config_of(4, norm="layernorm-desync").model
    state = random_state(model, mesh_of(2, 4))
    write_step(tmp_path, snapshot(state), model, 4)
    assert_states_equal(read_step(tmp_path, model, mesh_of(1, 4)), state)
    with pytest.raises(CheckpointError, match="has 4 shards, the config cores_per_replica 2.*set it to 4"):
        read_step(tmp_path, model, mesh_of(1, 2))
    with pytest.raises(CheckpointError, match="cannot be written as 2"):
        write_step(tmp_path, snapshot(state), model, 2)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_slim_files_of_any_float_type_read_as_float32_masters(tmp_path, dtype):
    model = config_of().model
    state = random_state(model, mesh_of(1, 1), full=False)
    write_2021(tmp_path, model, host(state), 2, dtype)
    found = read_step(tmp_path, model, mesh_of(1, 2), optimizer=False)
    assert found.opt_state is None
    assert_states_equal(found, cast_params(state, dtype))


def test_bf16_is_kept_and_stored_as_two_raw_bytes(tmp_path):
    model = config_of().model
    state = random_state(model, mesh_of(1, 1), full=False)
    write_2021(tmp_path / "a", model, host(state), 4, ml_dtypes.bfloat16)
    found = read_step(tmp_path / "a", model, mesh_of(1, 2), optimizer=False, dtype=jnp.bfloat16)
    assert found.params["causal_transformer_shard/~/embedding_shard"]["w"].dtype == jnp.bfloat16
    write_step(tmp_path / "b", snapshot(found), model, 4)
    with np.load(tmp_path / "b" / "shard_3" / "0.npz") as npz:
        assert npz["arr_0"].dtype.str == "|V2"
    for a, b in zip(read_plain(tmp_path / "a", 3), read_plain(tmp_path / "b", 3), strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_full_step_loads_without_its_optimizer(tmp_path):
    model = config_of().model
    state = random_state(model, mesh_of(1, 2))
    write_step(tmp_path, snapshot(state), model, 2)
    found = read_step(tmp_path, model, mesh_of(1, 1), optimizer=False)
    assert_states_equal(found, state._replace(opt_state=None))


def test_a_slim_step_trains_with_a_fresh_optimizer_and_a_notice(tmp_path, caplog):
    model = config_of().model
    state = random_state(model, mesh_of(2, 2), full=False)
    write_step(tmp_path, snapshot(state), model, 2)
    found = read_step(tmp_path, model, mesh_of(2, 2))
    assert_states_equal(found._replace(opt_state=None), state)
    assert int(found.opt_state.count) == int(found.opt_state.schedule_count) == 0
    for moments in (found.opt_state.mu, found.opt_state.nu):
        for module, group in moments.items():
            for name, array in group.items():
                assert not np.any(np.asarray(array))
                assert array.sharding == found.params[module][name].sharding
    assert "slim" in caplog.text
    assert "Adam starts fresh" in caplog.text


@pytest.mark.parametrize("step", GOLDEN_STEPS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_golden_steps_are_written_back_as_they_were(tmp_path, step):
    """Every array of every shard, except the norms' copies on shards 1 and up, which nothing reads."""
    raw = json.loads((step.parent / "config.json").read_text())
    config = load_config({**raw, "total_steps": 1, "train_set": "none", "model_dir": "none"})
    model, shards = config.model, config.mesh.cores_per_replica
    slim = step.name.startswith("slim")
    dtype = inventory.take(step).headers[-2].dtype  # of the parameters: only step comes after them
    state = read_step(step, model, mesh_of(1, shards), optimizer=not slim, dtype=dtype)
    write_step(tmp_path, snapshot(state), model, shards)
    leaves = layout.state_leaves(model, shards, not slim)
    for shard in range(shards):
        for leaf, old, new in zip(leaves, read_plain(step, shard), read_plain(tmp_path, shard), strict=True):
            if shard == 0 or leaf.leaf is None or leaf.leaf.kind.combine is not Combine.FIRST:
                assert (old.dtype, old.shape, old.tobytes()) == (new.dtype, new.shape, new.tobytes()), leaf.label


def test_the_manifest_describes_the_step(tmp_path):
    config = config_of(2)
    write_step(tmp_path, snapshot(random_state(config.model, mesh_of(1, 2))), config.model, 2, step=9, config={"a": 1})
    found = manifest.read(str(tmp_path))
    assert found.details["step"] == 9
    assert found.details["config"] == {"a": 1}
    assert found.shards == 2
    assert len(found.files) == 32
    by_name = {leaf.name: leaf for leaf in found.leaves}
    w = by_name["params/causal_transformer_shard/~/embedding_shard/~/linear/w"]
    assert (w.shape, w.shard_shape, w.dtype) == ((64, 32), (32, 32), "float32")
    assert by_name["step"].dtype == "int32"
    for name, entry in found.files.items():
        assert (tmp_path / name).stat().st_size == entry.bytes
    manifest.verify(str(tmp_path), found)


def test_equal_states_give_equal_files(tmp_path):
    model = config_of().model
    state = random_state(model, mesh_of(1, 1))
    for name in ("a", "b"):
        write_step(tmp_path / name, snapshot(state), model, 2)
    for file in (tmp_path / "a").rglob("*.npz"):
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()


def test_a_snapshot_does_not_follow_the_state():
    """The next step reuses the device's buffers, so views of them would change under the writer."""
    model = config_of().model
    state = random_state(model, mesh_of(1, 2), full=False)
    taken = snapshot(state)
    for group in state.params.values():
        for array in group.values():
            for shard in array.addressable_shards:
                view = np.asarray(shard.data)
                module = taken.tensors["params"]
                assert not any(
                    np.shares_memory(view, block)
                    for blocks in module.values()
                    for tensor in blocks.values()
                    for block in tensor.blocks.values()
                )


def test_space_estimate_is_close_and_never_low(tmp_path):
    model = config_of(layers=4, d_model=64).model
    write_step(tmp_path, snapshot(random_state(model, mesh_of(1, 1))), model, 4)
    real = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert real <= layout.step_bytes(model, 4) <= 1.5 * real
