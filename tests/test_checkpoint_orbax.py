"""The "orbax" layout: any mesh reads it, Orbax by itself reads it, and damage, kills and other models are met as in the
published layout."""

import importlib.util
import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_tools import assert_states_equal, config_of, host, random_state
from conftest import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from mesh_transformer import parameters, steps
from mesh_transformer.checkpoint import formats, manifest, orbax_files, orbax_layout, orbax_steps, retention
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.snapshot import snapshot
from mesh_transformer.checkpoint.store import CheckpointStore, find_step
from mesh_transformer.errors import CheckpointError, StorageError
from mesh_transformer.state import OptimizerState, TrainState

pytestmark = pytest.mark.usefixtures("uncached")

CONFIG = config_of(4, ckpt_format="orbax")
MESH = mesh_of(2, 4)


def write(folder, state, config=CONFIG):
    formats.write_step(folder, state, config, {"step": 9, "config": config.to_dict()})


@pytest.fixture(scope="module")
def state():
    return random_state(CONFIG.model, MESH)


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    """A model_dir with steps 1 and 2, the same state in both."""
    folder = tmp_path_factory.mktemp("saved")
    store = CheckpointStore(folder)
    for step in (1, 2):
        store.save(step, state, CONFIG, {"file_idx": step})
    store.wait()
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def a_chunk(step_dir, section="params"):
    return step_dir / "state" / f"{section}.transformer_layer_shard.q" / "0.0.1"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(("dp", "mp", "stage"), [(2, 4, 0), (1, 1, 0), (4, 2, 1), (2, 4, 3), (8, 1, 3)])
def test_any_mesh_and_stage_reads_every_bit(saved, state, dp, mp, stage):
    read = formats.read_step(saved / "step_2", CONFIG.model, mesh_of(dp, mp), zero_stage=stage)
    assert_states_equal(read, state)
    specs = parameters.storage_specs(CONFIG.model, mp, stage)
    placed = jax.tree.map(lambda array: array.sharding, read.params)
    assert placed == steps.shardings(mesh_of(dp, mp), specs)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_that_is_cut_over_replicas_is_written_whole(state, tmp_path, stage):
    specs = [parameters.storage_specs(CONFIG.model, 4, stage, moments) for moments in (False, True)]
    params, mu, nu = (
        jax.tree.map(jax.device_put, tree, steps.shardings(MESH, spec))
        for tree, spec in ((state.params, specs[0]), (state.opt_state.mu, specs[1]), (state.opt_state.nu, specs[1]))
    )
    write(tmp_path / "step_9", TrainState(params, state.opt_state._replace(mu=mu, nu=nu), state.step))
    assert_states_equal(formats.read_step(tmp_path / "step_9", CONFIG.model, mesh_of(1, 2)), state)


def test_parameters_alone_in_another_type(copy, state):
    """Only the parameters' files are looked into: damage to the moments does not matter to inference."""
    flip(a_chunk(copy / "step_2", "opt_state.mu"))
    read = formats.read_step(copy / "step_2", CONFIG.model, MESH, optimizer=False, dtype=jnp.bfloat16)
    assert read.opt_state is None
    expected = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), state.params)
    assert_states_equal(read.params, expected)


def test_a_slim_state_begins_with_a_fresh_optimizer_and_a_notice(state, tmp_path, caplog):
    write(tmp_path / "step_9", TrainState(state.params, None, state.step))
    read = formats.read_step(tmp_path / "step_9", CONFIG.model, MESH, zero_stage=1)
    assert "is slim: it holds no optimizer state" in caplog.text
    assert isinstance(read.opt_state, OptimizerState) and not int(read.opt_state.count)
    assert not any(leaf.any() for leaf in jax.tree.leaves(host(read.opt_state.mu)))


def test_orbax_alone_reads_it(saved, state):
    """Its checkpointer, with no word of this project's, on a mesh of its own."""
    import orbax.checkpoint as ocp

    folder = (saved / "step_2" / "state").absolute()
    plain = ocp.PyTreeCheckpointer().restore(folder)
    layers = state.params["causal_transformer_shard/~/transformer_layer_shard"]
    np.testing.assert_array_equal(plain["params"]["transformer_layer_shard"]["q"], layers["q"])
    assert plain["step"] == 9 and plain["opt_state"]["count"] == 7
    other = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec())
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=other), plain)
    placed = ocp.StandardCheckpointer().restore(folder, wanted)
    mu = state.opt_state.mu["causal_transformer_shard/~/embedding_shard"]["w"]
    np.testing.assert_array_equal(placed["opt_state"]["mu"]["embedding_shard"]["w"], mu)


def test_the_manifest_says_what_is_there(saved):
    found = manifest.read(str(saved / "step_2"))
    shapes = {leaf.name: (leaf.shape, leaf.dtype) for leaf in found.leaves}
    assert shapes["opt_state/nu/transformer_layer_shard/w1"] == ((2, 32, 128), "float32")
    assert shapes["step"] == ((), "int32")
    assert found.details["mesh"] == {"dp": 2, "mp": 4} and found.details["aux"]["train_loader"] == {"file_idx": 2}
    on_disk = {str(path.relative_to(saved / "step_2")) for path in (saved / "step_2").rglob("*") if path.is_file()}
    assert set(found.files) == on_disk - {"manifest.json"}


def test_each_block_of_devices_has_its_own_chunks():
    assert orbax_layout.chunks((28, 4096, 512), 4, stacked=True) == (4, 4096, 512)
    assert orbax_layout.chunks((28, 4096, 512), 4, stacked=True, layer_by_layer=True) == (1, 4096, 512)
    assert orbax_layout.chunks((28, 4096, 16384), 4, stacked=True) == (1, 2048, 4096)
    assert orbax_layout.chunks((50400, 4096), 4, stacked=False) == (3150, 2048)
    assert orbax_layout.chunks((2, 32), 4, stacked=True) == (2, 32)
    regions = list(orbax_layout.grid((5, 4), (2, 4)))
    assert regions == [((0, 2), (0, 4)), ((2, 4), (0, 4)), ((4, 5), (0, 4))]


def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    """Training goes on, and gives its buffers away, while the files are written."""
    state = random_state(CONFIG.model, MESH, seed=4)
    expected = host(state)
    release, real = threading.Event(), orbax_files.save

    def save(*arguments):
        assert release.wait(60)
        real(*arguments)

    monkeypatch.setattr(orbax_files, "save", save)
    store = CheckpointStore(tmp_path)
    store.save(1, state, CONFIG)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    state = step(step(state))
    jax.block_until_ready(state)
    assert store.latest() is None
    release.set()
    store.wait()
    assert_states_equal(store.restore(CONFIG, MESH).state, expected)


# Damage, kills, other models


def test_a_flipped_byte_is_noticed_and_the_step_before_used(copy, state, caplog):
    flip(a_chunk(copy / "step_2"))
    store = CheckpointStore(copy)
    with pytest.raises(DamagedError, match=r"params.transformer_layer_shard.q/0.0.1 has checksum .* without --strict"):
        store.restore(CONFIG, MESH, strict=True)
    found = store.restore(CONFIG, MESH)
    assert found.step == 1 and found.aux["train_loader"] == {"file_idx": 1}
    assert_states_equal(found.state, state)
    assert "passing over step 2" in caplog.text


def test_all_that_is_missing_is_named_at_once(copy):
    step = copy / "step_2"
    a_chunk(step).unlink()
    shutil.rmtree(step / "state" / "opt_state.nu.projection_shard.b")
    (step / "state" / "step" / "0").write_bytes(b"")
    with pytest.raises(DamagedError) as caught:
        formats.check(str(step), CONFIG.model, 4)
    assert len(caught.value.problems) == 1 + 5 + 1
    assert "state/params.transformer_layer_shard.q/0.0.1 is missing" in str(caught.value)
    assert "state/step/0 has 0 bytes, expected 4" in str(caught.value)


def test_without_its_manifest_it_is_not_complete(copy):
    (copy / "step_2" / "manifest.json").unlink()
    with pytest.raises(DamagedError, match="holds arrays of Orbax's, but no manifest.json"):
        formats.read_step(copy / "step_2", CONFIG.model, MESH)
    assert CheckpointStore(copy).restore(CONFIG, MESH).step == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 3}, r"layers 3 in the config, 2 in the checkpoint; first array that differs: \w+"),
        ({"d_model": 64, "pe_rotary_dims": 8}, "d_model 64 in the config, 32 in the checkpoint"),
        ({"norm": "layernorm-nobias"}, "norm layernorm-nobias in the config, layernorm in the checkpoint"),
        ({"version": 2}, "version 2 in the config, 1 in the checkpoint"),
    ],
)
def test_another_model_is_refused(saved, changes, words):
    with pytest.raises(CheckpointError, match=words):
        formats.read_step(saved / "step_2", config_of(4, **changes).model, MESH)


def test_norms_of_their_own_stay_with_their_shards(tmp_path):
    config = config_of(4, norm="layernorm-desync", ckpt_format="orbax")
    state = random_state(config.model, MESH)
    write(tmp_path / "step_9", state, config)
    assert_states_equal(formats.read_step(tmp_path / "step_9", config.model, mesh_of(1, 4)), state)
    with pytest.raises(CheckpointError, match="was saved on 4 shards, the config has cores_per_replica 2"):
        formats.read_step(tmp_path / "step_9", config.model, mesh_of(1, 2))


@pytest.mark.parametrize("moment", ["arrays", "manifest"])
def test_a_save_that_is_cut_short_leaves_the_step_before(copy, state, monkeypatch, moment):
    """As a kill would: nothing is tidied up but by the next run, and nothing is being written any more by then."""
    store = CheckpointStore(copy)
    monkeypatch.setattr(CheckpointStore, "_discard", lambda *_: None)
    writes = []

    def cut(self, *_):
        writes.extend(future for _, future in getattr(self, "_writing", ()))
        raise StorageError("cut short")

    monkeypatch.setattr(*((orbax_files.Arrays, "finish") if moment == "arrays" else (manifest, "write")), cut)
    store.save(3, state, CONFIG)
    with pytest.raises(StorageError, match=r"saving failed: cut short; the last complete checkpoint is .*step_2"):
        store.wait()
    monkeypatch.undo()
    assert bool(writes) == (moment == "arrays") and all(future.done() for future in writes)
    assert retention.is_unfinished(str(copy / "step_3")) and list((copy / "step_3").iterdir())
    store = CheckpointStore(copy)
    with store.hold():
        assert not (copy / "step_3").exists()
        assert_states_equal(store.restore(CONFIG, MESH).state, state)


def test_a_full_disk_surfaces_and_what_was_written_is_removed(copy, state, monkeypatch):
    def full(self):
        raise StorageError("state: cannot write: No space left on device; free some space")

    store = CheckpointStore(copy)
    with monkeypatch.context() as patch:
        patch.setattr(orbax_files.Arrays, "finish", full)
        store.save(3, state, CONFIG)
        with pytest.raises(StorageError, match=r"No space left on device.*the last complete checkpoint is .*step_2"):
            store.wait()
    assert not (copy / "step_3").exists(), "the half-written step still takes the space"
    assert_states_equal(store.restore(CONFIG, MESH).state, state)
    store.save(4, state, CONFIG)
    store.wait()
    assert store.steps() == [1, 2, 4]


def test_retention_and_new_leave_what_is_not_theirs(copy, state):
    store = CheckpointStore(copy, keep_n=1)
    (copy / "step_1" / "state" / "notes.txt").write_text("mine")
    (copy / "step_2" / "state" / "step" / "mine").write_text("mine")
    store.save(3, state, CONFIG)
    store.wait()
    assert store.steps() == [3]
    left = [str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file() and "step_3" not in str(path)]
    assert sorted(left) == ["meta.json", "step_1/state/notes.txt", "step_2/state/step/mine"]
    store.delete_own()
    assert not (copy / "step_3").exists()


def test_what_the_disk_says_is_told_in_one_line_with_a_remedy(state, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        StorageError, match="step_9/state: cannot write: .*Not a directory; a file stands where"
    ) as told:
        write(tmp_path / "file" / "step_9", state)
    assert "\n" not in str(told.value)
    text = """UNKNOWN: Error writing "/x/0.0": Failed to write [os_error_code='28'] [tensorstore_spec='{}']"""
    with pytest.raises(StorageError, match="^/x: cannot write: No space left on device; free some space$"):
        with orbax_files._errors("/x", "write"):
            raise ValueError(text)


def test_a_missing_package_is_told_before_anything_starts(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "orbax" else real(name, *a))
    with pytest.raises(CheckpointError, match=r"pip install 'mesh-transformer\[orbax\]', or set \"ckpt_format\""):
        formats.check_installed(CONFIG)
    formats.check_installed(config_of(4))


def test_every_process_writes_its_own_part(state):
    """Of equal blocks on several devices, of this or another process, one is written."""
    taken = snapshot(state)
    held = taken.tensors["params"]["causal_transformer_shard/~/projection_shard"]
    assert held["norm_scale"].blocks.keys() == {((0, 32),)}
    assert len(held["w"].blocks) == 4 and held["w"].block_shape == (32, 16)
    assert taken.nbytes == sum(x.nbytes for x in jax.tree.leaves(host(state))) - 3 * 4


def test_steps_are_found_by_folder_and_by_run(saved):
    assert find_step(saved) == str(saved / "step_2")
    assert find_step(f"{saved}/step_1/") == str(saved / "step_1")
    found = json.loads((saved / "meta.json").read_text())
    assert found["checkpoints"] == [1, 2]
    with pytest.raises(DamagedError, match="does not exist, or is empty"):
        formats.check(str(saved / "step_7"), CONFIG.model, 4)
    assert orbax_steps.file_names(str(saved / "step_1"))
