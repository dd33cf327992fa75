"""What conversions refuse, by name and before anything is left behind."""

import dataclasses
import shutil

import numpy as np
import pytest
from checkpoint_tools import without_fsync, write_2021
from weights_tools import config_file, model_of, state_of

from mesh_transformer import load_config
from mesh_transformer.checkpoint import convert, layout, manifest, publish, streaming
from mesh_transformer.checkpoint.casting import FLOAT_TYPES
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.errors import CheckpointError, StorageError


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    without_fsync(monkeypatch)


def test_a_value_too_large_for_its_type_is_refused_by_name_and_nothing_is_left(tmp_path):
    config = load_config(config_file(tmp_path))
    state = state_of(config.model, "trained")
    layers = state.params["causal_transformer_shard/~/transformer_layer_shard"]
    layers["w1"][1, 3, 4] = 1e5
    write_2021(tmp_path / "in", config.model, state, 2)
    with pytest.raises(CheckpointError, match=r"layer_1/~/linear_4/w holds 100000, and float16 ends at 65504.*bf16"):
        convert.reshard(tmp_path / "in", tmp_path / "out", 1, FLOAT_TYPES["f16"], config)
    assert not list((tmp_path / "out").rglob("*.npz")) and not (tmp_path / "out" / "meta.json").exists()
    layers["w1"][1, 3, 4] = np.inf  # what is infinite already stays so
    write_2021(tmp_path / "in", config.model, state, 2)
    convert.reshard(tmp_path / "in", tmp_path / "out", 1, FLOAT_TYPES["f16"], config)


def test_numbers_of_shards_that_do_not_fit_are_refused(tmp_path):
    config = load_config(config_file(tmp_path))
    write_2021(tmp_path / "in", config.model, state_of(config.model, "trained"), 2)
    with pytest.raises(CheckpointError, match=r"3 shards cannot share .*heads"):
        convert.reshard(tmp_path / "in", tmp_path / "out", 3, config=config)
    with pytest.raises(CheckpointError, match=r"16 shards cannot share n_heads \(8\)"):
        convert.reshard(tmp_path / "in", tmp_path / "out", 16, config=config)
    with pytest.raises(CheckpointError, match="0 shards were asked for"):
        convert.reshard(tmp_path / "in", tmp_path / "out", 0, config=config)
    with pytest.raises(CheckpointError, match="vocab"):
        publish.check_shards(model_of(n_vocab=66), 4)
    assert not (tmp_path / "out").exists()


def test_another_models_config_is_refused(tmp_path):
    config = load_config(config_file(tmp_path))
    write_2021(tmp_path / "in" / "step_9", config.model, state_of(config.model, "trained"), 2)
    convert.reshard(tmp_path / "in" / "step_9", tmp_path / "out", 2, config=config)
    other = load_config(config_file(tmp_path, pe_rotary_dims=2))
    with pytest.raises(CheckpointError, match="pe_rotary_dims was 4 in the run and is 2 in this config"):
        convert.reshard(tmp_path / "out", tmp_path / "again", 2, config=other)


def test_room_is_checked_first(tmp_path, monkeypatch):
    config = load_config(config_file(tmp_path))
    write_2021(tmp_path / "in", config.model, state_of(config.model, "trained"), 2)
    monkeypatch.setattr("mesh_transformer.storage.free_bytes", lambda _path: 1000)
    with pytest.raises(StorageError, match=r"0.00 GB free, and the weights take"):
        convert.reshard(tmp_path / "in", tmp_path / "out", 1, config=config)
    assert not (tmp_path / "out").exists()


def test_tensors_out_of_order_are_refused(tmp_path):
    config = load_config(config_file(tmp_path))
    write_2021(tmp_path / "in", config.model, state_of(config.model, "trained"), 2)
    with streaming.open_weights(tmp_path / "in", config.model) as weights:
        tensors = list(weights.tensors(optimizer=False))
        counters = {layout.STEP: 9}
        tensors[3], tensors[4] = tensors[4], tensors[3]
        with pytest.raises(CheckpointError, match="was expected next"):
            publish.write_weights(tmp_path / "out", config.model, 2, tensors, counters)
        with pytest.raises(CheckpointError, match="the end came"):
            publish.write_weights(tmp_path / "out", config.model, 2, tensors[:3], counters)
    assert not list((tmp_path / "out").rglob("*.npz"))


def test_a_file_of_another_save_is_not_laundered(tmp_path):
    """Sizes and each array's own sum are right; only the manifest knows. The copy would have had a clean manifest."""
    config = load_config(config_file(tmp_path))
    for name, seed in (("a", 0), ("b", 1)):
        write_2021(tmp_path / name / "step_9", config.model, state_of(config.model, "trained", seed), 2)
        convert.reshard(tmp_path / name / "step_9", tmp_path / f"{name}2", 2, config=config)
    shutil.copy(tmp_path / "b2/step_9/shard_1/5.npz", tmp_path / "a2/step_9/shard_1/5.npz")
    with pytest.raises(DamagedError, match=r"shard_1/5\.npz has checksum"):
        convert.reshard(tmp_path / "a2", tmp_path / "out", 1)
    assert not list((tmp_path / "out").rglob("*.npz"))


def test_two_byte_values_that_the_manifest_calls_something_else_are_refused(tmp_path):
    config = load_config(config_file(tmp_path))
    write_2021(tmp_path / "in" / "step_9", config.model, state_of(config.model, "trained"), 2)
    path = convert.slim(tmp_path / "in" / "step_9", tmp_path / "out", FLOAT_TYPES["bf16"], config).path
    described = manifest.read(path)
    leaves = [leaf._replace(dtype="uint16") if leaf.shard_shape else leaf for leaf in described.leaves]
    manifest.write(path, dataclasses.replace(described, leaves=leaves))
    with pytest.raises(DamagedError, match=r"is bfloat16\[32\], in the manifest uint16\[32\]"):
        streaming.open_weights(path)
