"""Checkpoints that do not fit, or are not whole: every problem is named at once, and nothing is changed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tools import assert_states_equal, config_of, host, random_state, without_fsync, write_2021
from conftest import mesh_of, tiny

from mesh_transformer.checkpoint import __main__ as command
from mesh_transformer.checkpoint import inventory
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.inspect import inspect, verify
from mesh_transformer.checkpoint.shards import read_step, snapshot, write_step
from mesh_transformer.errors import CheckpointError

ROOT = Path(__file__).parent.parent
SHARDS = 4
CONFIG = config_of(SHARDS)
MESH = mesh_of(1, SHARDS)


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    without_fsync(monkeypatch)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The same state as the 2021 library writes it, and as this project does."""
    folder = tmp_path_factory.mktemp("originals")
    state = random_state(CONFIG.model, MESH)
    write_2021(folder / "theirs", CONFIG.model, host(state), SHARDS)
    write_step(folder / "ours", snapshot(state), CONFIG.model, SHARDS, config=CONFIG.to_dict())
    return folder


@pytest.fixture(params=["theirs", "ours"])
def step(request, originals, tmp_path):
    """A copy that a test may harm, with or without manifest."""
    return Path(shutil.copytree(originals / request.param, tmp_path / "step_5"))


@pytest.fixture
def theirs(originals, tmp_path):
    return Path(shutil.copytree(originals / "theirs", tmp_path / "step_5"))


def spellings(path):
    return [str(path), f"{path}/", f"file://{path}", f"file://{path}/", path]


def test_every_spelling_of_a_path_loads_the_same(step):
    expected = random_state(CONFIG.model, MESH)
    for spelling in spellings(step):
        assert_states_equal(read_step(spelling, CONFIG.model, MESH), expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers": 1}, r"layers 1 in the config, 2 in the checkpoint \(differs\).*first leaf that differs: .*layer_1"),
        (
            {"layers": 3},
            r"layers 3 in the config, 2 in the checkpoint \(differs\).*layer_2/~/linear/w is expected, and not",
        ),
        (
            {"d_model": 64},
            r"d_model 64 in the config, 32 in the checkpoint \(differs\).*linear/b is \[32\] on a shard, expected \[64",
        ),
        (
            {"n_vocab": 128},
            r"n_vocab 128 in the config, 64 in the checkpoint \(differs\).*w is \[16, 32\] .* expected \[32, 32\]",
        ),
        (
            {"pe": "t5"},
            r"pe t5 in the config, rotary in the checkpoint \(differs\).*rel_embedding is expected, and not",
        ),
        ({"norm": "scalenorm"}, r"norm scalenorm in the config, layernorm.* in the checkpoint \(differs\)"),
    ],
)
def test_another_model_is_refused_with_both_sides_named(step, changes, expected):
    other = config_of(SHARDS, **changes).model
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_step(step, other, MESH)
    assert "shards 4 in the checkpoint (any number is read)" in str(caught.value)
    assert str(step) in str(caught.value)
    assert not isinstance(caught.value, DamagedError), "an older step of the same run would not fit either"


def test_equal_shapes_of_another_norm_are_refused_by_the_manifest(originals):
    other = config_of(SHARDS, norm="rmsnorm-bias").model
    with pytest.raises(
        CheckpointError, match=r"norm rmsnorm-bias in the config, layernorm in the checkpoint \(differs\)"
    ):
        read_step(originals / "ours", other, MESH)


def test_loading_into_a_network_that_does_not_fit_changes_nothing(theirs):
    from mesh_transformer.transformer_shard import CausalTransformer

    network = CausalTransformer(config_of(SHARDS, layers=1), MESH)
    before = network.state
    with pytest.raises(CheckpointError, match="layers 1 in the config, 2 in the checkpoint"):
        network.load_ckpt(theirs)
    assert network.state is before


def test_all_missing_and_broken_files_are_named_at_once(step):
    os.remove(step / "shard_0" / "3.npz")
    os.remove(step / "shard_2" / "15.npz")
    (step / "shard_1" / "0.npz").write_bytes(b"")
    (step / "shard_3" / "7.npz").write_bytes(b"garbage")
    content = (step / "shard_3" / "8.npz").read_bytes()
    (step / "shard_3" / "8.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedError) as caught:
        read_step(step, CONFIG.model, MESH)
    message = str(caught.value)
    for part in (
        "shard_0/3.npz is missing",
        "shard_2/15.npz is missing",
        "shard_1/0.npz has 0 bytes",
        "shard_3/7.npz is corrupt",
        "shard_3/8.npz is corrupt",
        "Expected 4 x 16 files: shard_0 to shard_3, each with 0.npz to 15.npz",
    ):
        assert part in message
    assert message.count("npz is") + message.count("npz has") == 5


def test_a_missing_shard_is_one_line(step):
    shutil.rmtree(step / "shard_1")
    with pytest.raises(DamagedError, match="complete: shard_1 is missing with all its files. Expected 4 x 16"):
        inventory.take(step)


@pytest.mark.parametrize("shard", [0, 2])
@pytest.mark.parametrize("with_model", [True, False])
def test_a_file_with_an_array_less_is_named_with_the_count(theirs, shard, with_model):
    path = theirs / f"shard_{shard}" / "15.npz"
    with np.load(path) as npz:
        arrays = [npz[f"arr_{i}"] for i in range(len(npz.files))]
    np.savez(path, *arrays[:-1])
    with pytest.raises(
        DamagedError, match=f"shard_{shard}/15.npz holds {len(arrays) - 1} arrays, expected {len(arrays)}"
    ):
        inventory.take(theirs, CONFIG.model if with_model else None)


def test_an_array_of_another_shape_in_one_shard_is_named(theirs):
    path = theirs / "shard_2" / "9.npz"
    with np.load(path) as npz:
        arrays = [npz[f"arr_{i}"] for i in range(len(npz.files))]
    arrays[0] = arrays[0][..., :-1]
    np.savez(path, *arrays)
    with pytest.raises(DamagedError, match=r"shard_2/9\.npz: arr_0 \(.*\) is float32\[.*\], in shard_0 float32\["):
        read_step(theirs, CONFIG.model, MESH)


def test_a_flipped_byte_is_found_without_a_manifest(theirs):
    path = theirs / "shard_1" / "9.npz"
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"shard_1/9\.npz is corrupt: Bad CRC-32"):
        read_step(theirs, CONFIG.model, MESH)
    with pytest.raises(DamagedError, match=r"shard_1/9\.npz is corrupt: Bad CRC-32"):
        verify(theirs)


def test_a_file_of_another_save_is_found_by_the_manifest(originals, tmp_path):
    """Whole, readable, and of the right shapes, but not the file that was written with the others."""
    step = Path(shutil.copytree(originals / "ours", tmp_path / "step_5"))
    write_step(tmp_path / "other", snapshot(random_state(CONFIG.model, MESH, seed=9)), CONFIG.model, SHARDS)
    shutil.copy(tmp_path / "other" / "shard_1" / "9.npz", step / "shard_1" / "9.npz")
    with pytest.raises(DamagedError, match=r"shard_1/9\.npz has checksum \w+, expected \w+"):
        read_step(step, CONFIG.model, MESH)


def test_paths_that_are_no_step_say_what_they_are(theirs, tmp_path):
    with pytest.raises(CheckpointError, match="nothing does not exist, or is empty; expected a folder with shard_0"):
        read_step(tmp_path / "nothing", CONFIG.model, MESH)
    with pytest.raises(CheckpointError, match="is a folder of steps; name one of them: step_5"):
        read_step(theirs.parent, CONFIG.model, MESH)
    (tmp_path / "v2" / "params").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds a checkpoint of version 2"):
        read_step(tmp_path / "v2", CONFIG.model, MESH)


def test_inspection_needs_no_jax(originals):
    """An 8-shard checkpoint can be looked into where no JAX could hold it; here it is not even importable."""
    code = (
        "import sys; sys.modules['jax'] = None; from mesh_transformer.checkpoint.__main__ import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    for name, layout in (("theirs", "without manifest"), ("ours", "with manifest")):
        command = [sys.executable, "-c", code, "verify", str(originals / name), "--leaves"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for line in (
            f"full (with optimizer), {layout}",
            "shards          4, each of 16 files",
            "layers 2, d_model 32,",
            "norm layernorm, pe rotary",
            "params/causal_transformer_shard/~/embedding_shard/~/linear/w  [64, 32] float32, [16, 32] on a shard",
            "step            9",
            "verified",
        ):
            assert line in done.stdout


def test_the_command_lists_every_problem(step, capsys):
    os.remove(step / "shard_0" / "3.npz")
    os.remove(step / "shard_2" / "15.npz")
    (step / "shard_1" / "4.npz").write_bytes(b"")
    cut = step / "shard_3" / "5.npz"
    cut.write_bytes(cut.read_bytes()[:-700])
    altered = bytearray((step / "shard_3" / "9.npz").read_bytes())
    altered[1200] ^= 1  # within the first array: the file's size and directory stay
    (step / "shard_3" / "9.npz").write_bytes(altered)
    assert command.main(["inspect", str(step)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["error:", f"shard_{name}.npz"] for name in ("0/3", "1/4", "2/15", "3/5")
    ]
    assert command.main(["verify", str(step)]) == 1
    assert "shard_3/9.npz" in "".join(set(capsys.readouterr().err.splitlines()) - set(lines))
    assert command.main(["inspect", str(step / "nothing")]) == 1
    assert command.main(["inspect", str(step), "--config", "nothing.json"]) == 2


def test_the_command_says_what_a_config_finds_different(theirs, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny(n_vocab=128)))
    assert command.main(["inspect", str(theirs)]) == 0
    assert command.main(["inspect", str(theirs), "--config", str(config)]) == 1
    assert "n_vocab 128 in the config, 64 in the checkpoint (differs)" in capsys.readouterr().err


@pytest.mark.parametrize("norm", ["scalenorm", "rmsnorm-bias", "layernorm-desync"])
@pytest.mark.parametrize("pe", ["rotary", "fixed", "t5"])
def test_the_model_is_recognised_from_shapes(tmp_path, norm, pe):
    model = config_of(SHARDS, norm=norm, pe=pe, layers=3).model
    write_2021(tmp_path, model, host(random_state(model, MESH)), SHARDS)
    found = inspect(tmp_path)
    assert any((m.norm, m.pe, m.layers, m.d_model, m.n_vocab) == (norm, pe, 3, 32, 64) for m in found.models)
    assert all(m.pe == pe for m in found.models)
    assert found.counters == {"opt_state/count": 7, "opt_state/schedule_count": 5, "step": 9}
