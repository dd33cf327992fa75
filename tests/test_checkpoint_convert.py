"""From one layout to the other by one command, bit for bit; version 2 in both; and what other tools take."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_tools import assert_states_equal, config_of, host, random_state
from conftest import mesh_of

import slim_model
from mesh_transformer import inference
from mesh_transformer.checkpoint import __main__ as command
from mesh_transformer.checkpoint import formats, manifest, streaming
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import load_config
from mesh_transformer.errors import CheckpointError

GOLDEN = Path(__file__).parent / "data" / "golden_v2"
V2 = {"version": 2, "d_head": 6}
MESH = mesh_of(2, 4)


def golden_config(**changes):
    keys = json.loads((GOLDEN / "config.json").read_text()) | {
        "train_set": "none.index",
        "total_steps": 9,
        "name": "v2",
    }
    return load_config(keys | {"compute_dtype": "float32", "cores_per_replica": 4, "v2_merged_heads": 4} | changes)


def config_file(folder, config):
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return str(folder / "config.json")


def last_golden():
    return max(GOLDEN.glob("step_*"), key=lambda path: int(path.name[5:]))


@pytest.mark.parametrize("keys", [{}, V2], ids=["version 1", "version 2"])
def test_there_and_back_keeps_every_bit(tmp_path, capsys, keys):
    config = config_of(4, **keys, ckpt_format="orbax")
    state = random_state(config.model, MESH)
    store = CheckpointStore(tmp_path / "a")
    store.save(3, state, config, {"file_idx": 5})
    store.wait()
    assert command.main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "shards"]) == 0
    assert "4 shards, float32" in capsys.readouterr().out
    assert command.main(["convert", f"{tmp_path}/b/step_3", str(tmp_path / "c"), "--format", "orbax"]) == 0
    assert ", orbax, float32" in capsys.readouterr().out
    for name, kind in (("b", formats.SHARDS), ("c", formats.ORBAX)):
        assert formats.format_of(f"{tmp_path}/{name}/step_3") == kind
        found = CheckpointStore(tmp_path / name).restore(config, mesh_of(1, 2))
        assert_states_equal(found.state, state)
        assert found.aux == store.aux(3) and found.aux["train_loader"] == {"file_idx": 5}


def test_other_shards_on_the_way(tmp_path):
    config = config_of(4, **V2)
    state = random_state(config.model, MESH, full=False)
    formats.write_step(tmp_path / "a" / "step_9", state, config, {"step": 9, "config": config.to_dict()})
    arguments = ["convert", f"{tmp_path}/a/step_9", f"{tmp_path}/b", "--format", "shards", "--shards", "2"]
    assert command.main(arguments) == 0
    assert manifest.read(f"{tmp_path}/b/step_9").shards == 2
    assert_states_equal(formats.read_step(tmp_path / "b/step_9", config.model, MESH, optimizer=False), state)


@pytest.mark.parametrize("to", ["shards", "orbax"])
def test_the_2021_librarys_version_2_is_converted(tmp_path, to):
    config = golden_config()
    arguments = ["convert", str(last_golden()), f"{tmp_path}/out", "--format", to]
    assert command.main([*arguments, "--config", config_file(tmp_path, config)]) == 0
    step = f"{tmp_path}/out/{last_golden().name}"
    expected = formats.read_step(last_golden(), config.model, MESH)
    assert_states_equal(formats.read_step(step, config.model, MESH, zero_stage=3), expected)
    assert manifest.read(step).details["config"]["v2_merged_heads"] == 4


def test_what_cannot_be_converted_is_refused_in_words(tmp_path, capsys):
    assert command.main(["convert", str(last_golden()), f"{tmp_path}/out", "--format", "orbax"]) == 1
    assert "does not say its model: name its config, with v2_merged_heads in it" in capsys.readouterr().err
    path = config_file(tmp_path, golden_config(v2_merged_heads=None, version=2))
    assert command.main(["convert", str(last_golden()), f"{tmp_path}/out", "--format", "orbax", "--config", path]) == 1
    assert 'set "v2_merged_heads" in the config' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        command.main(["convert", str(last_golden()), "--format", "orbax"])


def test_a_tensor_at_a_time(tmp_path):
    """What `open_weights` gives of "orbax" is what it gives of the same step in shards, in the same order."""
    config = config_of(4)
    state = random_state(config.model, MESH)
    for name in ("shards", "orbax"):
        written = config_of(4, ckpt_format=name)
        formats.write_step(tmp_path / name / "step_9", state, written, {"step": 9, "config": written.to_dict()})
    with (
        streaming.open_weights(tmp_path / "shards/step_9") as a,
        streaming.open_weights(tmp_path / "orbax/step_9") as b,
    ):
        assert a.counters == b.counters and a.model == b.model
        for x, y in zip(a.tensors(), b.stream(), strict=True):
            assert x.leaf == y.leaf and x.dtype == y.dtype
            np.testing.assert_array_equal(x.value, y.value)


# Looking into it


@pytest.mark.parametrize("to", ["orbax", "shards"])
def test_inspect_and_verify(tmp_path, capsys, to):
    config = config_of(4, **V2, ckpt_format=to)
    formats.write_step(tmp_path / "step_9", random_state(config.model, MESH), config,
                       {"step": 9, "config": config.to_dict()})  # fmt: skip
    assert command.main(["verify", str(tmp_path / "step_9"), "--leaves"]) == 0
    out = capsys.readouterr().out
    expected = ["version 2", "full (with optimizer), with manifest", "step            9", "checksums of all files"]
    expected += ["opt_state/mu/transformer_layer_shard/w_gate  [2, 32, 128] float32, [2, 32, 32] in a chunk"] * (
        to == "orbax"
    )
    for words in expected:
        assert words in out
    victim = sorted((tmp_path / "step_9").rglob("0.0.1" if to == "orbax" else "3.npz"))[0]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert command.main(["inspect", str(tmp_path / "step_9")]) == 0
    assert command.main(["verify", str(tmp_path / "step_9")]) == 1
    assert f"{victim.relative_to(tmp_path / 'step_9')} has checksum" in capsys.readouterr().err
    victim.unlink()
    assert command.main(["inspect", str(tmp_path / "step_9")]) == 1
    assert f"{victim.relative_to(tmp_path / 'step_9')} is missing" in capsys.readouterr().err


def test_inspect_and_verify_the_2021_librarys_version_2(tmp_path, capsys):
    assert command.main(["inspect", str(last_golden())]) == 1
    assert "version 2, which does not say its model: name its config" in capsys.readouterr().err
    path = config_file(tmp_path, golden_config())
    assert command.main(["verify", str(last_golden()), "--config", path]) == 0
    out = capsys.readouterr().out
    assert "version 2 (2021), full (with optimizer), without manifest" in out and "checksums of all arrays" in out
    shutil.copytree(last_golden(), tmp_path / "step_9")
    content = bytearray((tmp_path / "step_9/params/shard_0.npz").read_bytes())
    content[5000] ^= 1
    (tmp_path / "step_9/params/shard_0.npz").write_bytes(content)
    assert command.main(["verify", str(tmp_path / "step_9"), "--config", path]) == 1
    assert "params/shard_0.npz" in capsys.readouterr().err


def test_a_version_2_step_without_manifest_needs_a_config(tmp_path, capsys):
    """Its shapes fit nothing that the 2021 library's shards could be."""
    config = config_of(4, **V2, ckpt_format="shards")
    formats.write_step(tmp_path / "step_9", random_state(config.model, MESH), config)
    (tmp_path / "step_9" / "manifest.json").unlink()
    assert command.main(["inspect", str(tmp_path / "step_9")]) == 1
    assert "fit no model of version 1 (shapes do not tell one of version 2)" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="fit no model of version 1 by shape; name its config"):
        streaming.open_weights(tmp_path / "step_9")
    assert command.main(["inspect", str(tmp_path / "step_9"), "--config", config_file(tmp_path, config)]) == 0
    with streaming.open_weights(tmp_path / "step_9", config.model) as weights:
        assert sum(1 for _ in weights.tensors()) == 3 * (2 * 15 + 6)


# What inference and slim_model.py take


@pytest.mark.parametrize("to", ["orbax", "shards", "reference"])
def test_slim_weights_of_version_2_are_taken_for_inference(tmp_path, capsys, to):
    config = golden_config(model_dir=str(tmp_path / "run"), **({"ckpt_format": to} if to != "reference" else {}))
    reference = formats.read_step(last_golden(), config.model, MESH)
    if to == "reference":
        shutil.copytree(last_golden(), tmp_path / "run" / last_golden().name)
        step = int(last_golden().name[5:])
        (tmp_path / "run" / "meta.json").write_text(json.dumps({"step": step, "checkpoints": [step], "aux": {}}))
    else:
        store = CheckpointStore(tmp_path / "run")
        store.save(5, reference, config)
        store.wait()
    assert slim_model.main(["--config", config_file(tmp_path, config)]) == 0
    assert "slim" in capsys.readouterr().out
    for ckpt in (None, str(tmp_path / "run_slim")):  # the full one of model_dir as well
        chosen = inference.choose_steps(config, ckpt, "latest", random_init=False)
        network = inference.load_network(config, mesh_of(1, 4), chosen)
        assert network.state.opt_state is None
        got = jax.tree.map(lambda x: np.asarray(x, np.float32), network.state.params)
        wanted = host(reference.params)
        if ckpt is not None:
            wanted = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16).astype(np.float32), wanted)
        assert_states_equal(got, wanted)


def test_a_config_of_another_version_is_refused(tmp_path):
    config = config_of(4, **V2)
    formats.write_step(tmp_path / "step_9", random_state(config.model, MESH, full=False), config,
                       {"step": 9, "config": config.to_dict(), "agreement": config.agreement()})  # fmt: skip
    with pytest.raises(CheckpointError, match="version 1 in the config, 2 in the checkpoint"):
        inference.choose_steps(config_of(4), str(tmp_path / "step_9"), "latest", random_init=False)
