"""slim_model.py: a folder that every other script takes as it is, and that no run continues by mistake."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tools import read_plain, without_fsync, write_2021
from conftest import mesh_of
from serving_tools import serving
from training_tools import Run, make_data
from weights_tools import config_file, state_of

import device_sample
import slim_model
import to_hf_weights
from mesh_transformer import inference, load_config
from mesh_transformer.checkpoint import inventory
from mesh_transformer.checkpoint.casting import FLOAT_TYPES
from mesh_transformer.checkpoint.shards import read_step
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.data.tokenizer import train_tokenizer
from mesh_transformer.evaluation import perplexity


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    without_fsync(monkeypatch)


@pytest.fixture
def config_path(tmp_path):
    """A model_dir with steps 10 and 20 of the 2021 library, and its config."""
    path = config_file(tmp_path, model_dir=str(tmp_path / "run"))
    model = load_config(path).model
    for step in (10, 20):
        write_2021(tmp_path / "run" / f"step_{step}", model, state_of(model, "trained", step), 4)
    meta = {"step": 20, "checkpoints": [10, 20], "aux": {"10": {}, "20": {}}}
    (tmp_path / "run" / "meta.json").write_text(json.dumps(meta))
    return path


@pytest.mark.parametrize(("flags", "name", "folder"), [([], "bf16", "run_slim"), (["--f16"], "f16", "run_slim_f16")])
def test_every_parameter_has_the_asked_type_and_the_optimizer_is_gone(tmp_path, config_path, flags, name, folder):
    assert slim_model.main(["--config", config_path, *flags]) == 0
    model, dtype = load_config(config_path).model, FLOAT_TYPES[name]
    step = tmp_path / folder / "step_20"
    assert not inventory.take(step).full
    write_2021(tmp_path / "expected", model, state_of(model, "trained", 20)._replace(opt_state=None), 4, dtype)
    for shard in range(4):
        for new, expected in zip(read_plain(step, shard), read_plain(tmp_path / "expected", shard), strict=True):
            assert new.dtype == expected.dtype and new.tobytes() == expected.tobytes()
    assert CheckpointStore(tmp_path / folder).steps() == [20]


def test_steps_are_chosen_and_gather_in_one_folder(tmp_path, config_path, capsys):
    out = str(tmp_path / "slim")
    assert slim_model.main(["--config", config_path, "--output", out]) == 0
    assert slim_model.main(["--config", config_path, "--output", out, "--ckpt-step", "10"]) == 0
    assert CheckpointStore(out).steps() == [10, 20]
    assert slim_model.main(["--config", config_path, "--ckpt-step", "15"]) == 2
    assert "has no step 15; it has 10, 20" in capsys.readouterr().err
    assert slim_model.main(["--config", config_path, "--ckpt-step", "best"]) == 2
    with pytest.raises(SystemExit, match="2"):
        slim_model.main(["--config", config_path, "--ckpt-step", "newest"])


def test_full_and_slim_load_into_either_state(tmp_path, config_path, caplog):
    """Full into parameters alone, and slim into a training state: float32 masters, fresh moments, said so."""
    assert slim_model.main(["--config", config_path]) == 0
    model, mesh = load_config(config_path).model, mesh_of(2, 2)
    alone = read_step(tmp_path / "run" / "step_20", model, mesh, optimizer=False)
    training = read_step(tmp_path / "run_slim" / "step_20", model, mesh)
    assert alone.opt_state is None
    assert "slim: it holds no optimizer state, so Adam starts fresh" in caplog.text
    for module, group in training.params.items():
        for name, array in group.items():
            full = np.asarray(alone.params[module][name])
            assert array.dtype == np.float32
            assert np.array_equal(np.asarray(array), full.astype(FLOAT_TYPES["bf16"]).astype(np.float32))
            assert not np.asarray(training.opt_state.mu[module][name]).any()


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_trained_slimmed_sampled_and_tuned_without_a_hand_on_the_files(tmp_path, capsys, version):
    """Every script takes --version, and what the one before it left."""
    train_tokenizer(["a b c"], 300, str(tmp_path / "tokenizer.json"))
    keys = {"tokenizer": str(tmp_path / "tokenizer.json"), "n_vocab": 320, "cores_per_replica": 1, "val_set": {}}
    alone, chosen = ("--devices", "1"), ("--version", str(version))
    run = Run(tmp_path / "run", make_data(tmp_path), **keys)
    assert run(*alone, *chosen, total_steps=1) == 0
    assert slim_model.main([*run.arguments()[:2], *chosen]) == 0
    slim = str(run.model_dir) + "_slim"
    sampled = ("--prompt", "a", "--max-tokens", "3", "--greedy")
    assert device_sample.main([*run.arguments(*alone, *chosen), "--ckpt", slim, *sampled]) == 0
    # Evaluation, export and a server take it as well.
    index = str(tmp_path / "val.index")
    assert perplexity.main([*run.arguments(*alone, *chosen), "--ckpt", slim, "--data", index, "--batches", "1"]) == 0
    assert "perplexity" in capsys.readouterr().out
    if version == 1:
        exported = ["--input-ckpt", slim + "/step_1", "--output-path", str(tmp_path / "hf"), "--cpu"]
        assert to_hf_weights.main([*run.arguments()[:2], *exported]) == 0
    with serving(Path(run.arguments()[1]), *chosen, weights=("--ckpt", slim)) as server:
        assert isinstance(server.wait_ready().complete(context="a", temp=0), str)
    # In place of its run's folder too, as a config's model_dir.
    as_model_dir = load_config(run.keys | {"model_dir": slim}, version=version)
    assert inference.choose_steps(as_model_dir, None, "latest", False) == [slim + "/step_1"]
    tuned = Run(tmp_path / "tuned", tmp_path, **keys)
    assert tuned(*alone, *chosen, "--tune-model-path", slim, total_steps=1) == 0
    assert "Adam starts fresh" in capsys.readouterr().err
    # A run cannot go on from it: what it had learned about its gradients is not there.
    assert run(*alone, *chosen, model_dir=slim, total_steps=3) == 2
    assert "--tune-model-path" in capsys.readouterr().err
