"""Configs that are sound: what loads, what defaults and derived values become, what a resume compares."""

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.config import GROUPS, SPECS, check_mesh, differences, load_config, resolve_epochs
from mesh_transformer.config_fields import REQUIRED, fields_of
from mesh_transformer.errors import ConfigError

ROOT = Path(__file__).parent.parent
MINIMAL = {
    "layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 128, "seq": 32, "train_set": "text.train.index",
    "total_steps": 100,
}  # fmt: skip
REFERENCE = {
    **MINIMAL, "norm": "layernorm", "pe": "rotary", "pe_rotary_dims": 4, "cores_per_replica": 4, "per_replica_batch": 1,
    "gradient_accumulation_steps": 2, "warmup_steps": 2, "anneal_steps": 20, "lr": 0.003, "end_lr": 0.0003,
    "weight_decay": 0.1, "model_dir": "run",
}  # fmt: skip


def test_minimal_config_has_sound_defaults():
    config = load_config(MINIMAL)
    assert (config.mesh.cores_per_replica, config.mesh.per_replica_batch) == (1, 1)
    assert (config.optim.lr, config.optim.end_lr) == (1e-4, pytest.approx(1e-5))
    assert (config.optim.warmup_steps, config.optim.anneal_steps) == (5, 95)
    assert config.model.pe_rotary_dims == config.model.d_head == 8
    assert config.model.d_ff == 256
    assert (config.run.name, config.run.directory) == ("run", "runs/run")
    assert (config.run.val_every, config.run.ckpt_every, config.run.eval_every) == (0, 0, 0)
    assert (config.run.keep_best, config.run.trackers) == (None, ("jsonl",))
    assert config.run.wandb_entity is None and config.version == 1


def test_reference_config_loads_as_written():
    config = load_config(REFERENCE)
    flat = config.to_dict()
    assert {key: flat[key] for key in REFERENCE} == REFERENCE
    assert config.given == set(REFERENCE)
    assert config.heads_per_shard == 2
    assert (config.sequences_per_step(3), config.tokens_per_step(3)) == (6, 192)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_config_loads(path):
    config = load_config(path)
    assert config.source == str(path)
    assert load_config(config.to_dict()) == config


def test_version_2_keys_load():
    config = load_config({**REFERENCE, "d_head": 8, "v2_merged_heads": 4, "v2_decay_vectors": True})
    assert config.model.v2_merged_heads == 4 and config.optim.v2_decay_vectors
    assert load_config({**REFERENCE, "version": 2, "d_head": 16, "pe_rotary_dims": 12}).model.d_head == 16


def test_flat_keys_load_back_equal():
    for extra in ({"epochs": 2, "total_steps": None}, {"val_set": {"a": "b.index"}, "trackers": ["wandb"]}):
        config = load_config({**REFERENCE, **extra})
        again = load_config(json.loads(json.dumps(config.to_dict())))
        assert again == config and hash(again) == hash(config)
    assert load_config({**REFERENCE, "val_set": {"a": "c.index"}}) != load_config({**REFERENCE, "val_set": {"a": "b"}})


def test_config_is_frozen_and_travels():
    config = load_config({**REFERENCE, "val_set": {"a": "b.index"}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.layers = 3
    assert pickle.loads(pickle.dumps(config)) == config


def test_two_configs_share_no_mapping():
    load_config(MINIMAL).data.val_set["a"] = "b"
    assert load_config(MINIMAL).data.val_set == {}


@pytest.mark.parametrize("key", [key for key in SPECS if key.endswith("_every")])
@pytest.mark.parametrize("value", [0, None, "missing"])
def test_zero_null_and_missing_periods_are_off(key, value):
    config = load_config(MINIMAL if value == "missing" else {**MINIMAL, key: value})
    assert getattr(config.run, key) == (1 if key == "log_every" and value == "missing" else 0)


def test_eval_every_follows_val_every_unless_given():
    assert load_config({**MINIMAL, "val_every": 7}).run.eval_every == 7
    assert load_config({**MINIMAL, "val_every": 7, "eval_every": None}).run.eval_every == 0
    assert load_config({**MINIMAL, "val_every": 7, "eval_every": 3}).run.eval_every == 3


def test_flags_count_by_their_value_not_their_presence():
    assert load_config({**MINIMAL, "early_cast": False, "bf16_optimizer": False}).model.early_cast is False
    config = load_config({**MINIMAL, "early_cast": True, "bf16_optimizer": True})
    assert config.model.early_cast is True and config.optim.bf16_optimizer is True


def test_json_spellings_of_numbers_and_blanks():
    config = load_config({**MINIMAL, "total_steps": 1e5, "lr": 1, "comment": "", "wandb_project": "", "bucket": ""})
    assert config.run.total_steps == 100000 and isinstance(config.run.total_steps, int)
    assert isinstance(config.optim.lr, float)
    assert config.run.comment is config.run.wandb_project is config.run.bucket is None


def test_partly_given_schedules():
    assert load_config({**MINIMAL, "warmup_steps": 30}).optim.anneal_steps == 70
    assert load_config({**MINIMAL, "warmup_steps": 130}).optim.anneal_steps == 0
    zero = load_config({**MINIMAL, "warmup_steps": 0, "anneal_steps": 0, "end_lr": 0}).optim
    assert (zero.warmup_steps, zero.anneal_steps, zero.end_lr) == (0, 0, 0)


def test_rotary_dimensions():
    assert load_config({**MINIMAL, "d_model": 768, "n_heads": 16}).model.pe_rotary_dims == 48
    model = load_config(REFERENCE).model
    with pytest.raises(ConfigError, match=r"pe_rotary_dims \(4\).*head size \(2\)"):
        dataclasses.replace(model, n_heads=32)
    odd = load_config({**MINIMAL, "pe": "t5", "d_model": 24}).model  # only rotary needs pairs
    assert odd.d_head == 3


def test_keep_best_is_the_first_validation_set():
    assert load_config({**MINIMAL, "val_set": {"b": "b.index", "a": "a.index"}}).run.keep_best == "b"
    assert load_config({**MINIMAL, "val_set": {"b": "b", "a": "a"}, "keep_best": "a"}).run.keep_best == "a"


@pytest.mark.parametrize(
    ("model_dir", "bucket", "directory"),
    [
        ("/x/run/", None, "/x/run"),
        ("run", None, "run"),
        ("run/", "my-bucket", "gs://my-bucket/run"),
        ("./run", "my-bucket", "gs://my-bucket/run"),
        ("gs://b/run/", None, "gs://b/run"),
        ("file:///x/run/", None, "file:///x/run"),
        ("/", None, "/"),
    ],
)
def test_directory(model_dir, bucket, directory):
    assert load_config({**MINIMAL, "model_dir": model_dir, "bucket": bucket}).run.directory == directory


def test_data_paths_are_under_data_dir_unless_absolute():
    val_set = {"a": "/x/a.index", "b": "gs://bucket/b.index", "c": "c.index"}
    data = load_config({**MINIMAL, "data_dir": "folder/", "val_set": val_set}).data
    assert data.train_path == "folder/text.train.index"
    assert data.val_paths == {"a": "/x/a.index", "b": "gs://bucket/b.index", "c": "folder/c.index"}
    assert load_config(MINIMAL).data.train_path == "data/text.train.index"
    assert load_config({**MINIMAL, "data_dir": "gs://b/data"}).data.train_path == "gs://b/data/text.train.index"


def test_files_by_path_string_and_url(tmp_path):
    path = tmp_path / "small.json"
    path.write_text("\ufeff" + json.dumps(MINIMAL), encoding="utf-8")
    for source in (path, str(path), path.as_uri()):
        config = load_config(source)
        assert (config.run.name, config.run.directory) == ("small", "runs/small")


@pytest.mark.parametrize(("records", "dp", "epochs", "steps"), [(1147, 1, 1, 72), (1147, 2, 1, 36), (1147, 1, 2, 144)])
def test_epochs_become_steps(records, dp, epochs, steps):
    raw = {**MINIMAL, "gradient_accumulation_steps": 16, "total_steps": None, "epochs": epochs}
    config = load_config(raw)
    assert config.run.total_steps is None and config.optim.anneal_steps is None
    resolved = resolve_epochs(config, records, dp)
    assert resolved.run.total_steps == steps and resolved.data.epochs is None
    assert resolved.optim.warmup_steps + resolved.optim.anneal_steps == steps
    assert load_config(resolved.to_dict()) == resolved


def test_epochs_leave_a_given_schedule_and_total_steps_alone():
    raw = {**REFERENCE, "total_steps": None, "epochs": 0.5}
    resolved = resolve_epochs(load_config(raw), 100, 1)
    assert (resolved.run.total_steps, resolved.optim.warmup_steps, resolved.optim.anneal_steps) == (25, 2, 20)
    config = load_config(REFERENCE)
    assert resolve_epochs(config, 100, 1) == config


def test_meshes_that_fit():
    config = load_config(REFERENCE)
    assert [check_mesh(config, n) for n in (4, 8, 12)] == [(1, 4), (2, 4), (3, 4)]


def test_agreement_ignores_what_may_differ():
    base = load_config({**REFERENCE, "tokenizer": "/here/tokenizer.json"})
    free = {
        "cores_per_replica": 1, "per_replica_batch": 2, "gradient_accumulation_steps": 4, "total_steps": 999,
        "val_every": 3, "ckpt_every": 3, "model_dir": "other", "train_set": "/there/text.index", "data_dir": "there",
        "trackers": ["wandb"], "name": "other", "remat": "full", "tokenizer": "there/tokenizer.json", "keep_n": 9,
    }  # fmt: skip
    other = load_config({**REFERENCE, **free})
    assert differences(base.agreement(dp=4), other.agreement(dp=1)) == []
    assert differences(base.agreement(dp=4), other.agreement(dp=2)) == [
        "sequences_per_step was 8 in the run and is 16 in this config"
    ]


CHANGES = {
    "layers": 3, "d_model": 128, "n_heads": 16, "n_vocab": 256, "seq": 64, "norm": "rmsnorm", "pe": "t5",
    "pe_rotary_dims": 2, "z_loss": "log_z", "compute_dtype": "float32", "lr": 0.002, "end_lr": 0.001, "warmup_steps": 3,
    "anneal_steps": 21, "weight_decay": 0.2, "b1": 0.8, "b2": 0.99, "eps": 1e-7, "max_grad_norm": 2, "shuffle": True,
    "seed": 43, "tokenizer": "other", "bf16_optimizer": True, "v2_merged_heads": 4, "v2_decay_vectors": True,
    "version": 2,
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(CHANGES))
def test_agreement_notices(key):
    lines = differences(load_config(REFERENCE).agreement(), load_config({**REFERENCE, key: CHANGES[key]}).agreement())
    assert any(line.startswith(f"{key} was ") for line in lines)


def test_agreement_on_hashes_and_on_the_mesh_of_desynchronised_norms():
    config = load_config(REFERENCE)
    assert differences(config.agreement(tokenizer="a", data="b"), config.agreement(tokenizer="c", data="b")) == [
        "tokenizer_hash was 'a' in the run and is 'c' in this config"
    ]
    assert differences(config.agreement(tokenizer="a"), config.agreement()) == []
    assert len(differences(config.agreement(data="b"), config.agreement(data="c"))) == 1
    desync = [load_config({**REFERENCE, "norm": "layernorm-desync", "cores_per_replica": m}) for m in (2, 4)]
    assert len(differences(desync[0].agreement(), desync[1].agreement())) == 1


def test_a_schedule_that_followed_total_steps_says_how_to_keep_it():
    runs = [load_config({**MINIMAL, "total_steps": total}).agreement() for total in (100, 200)]
    assert '"anneal_steps": 95' in "\n".join(differences(*runs))


def test_every_agreeing_key_has_a_change_in_this_test():
    assert {key for key, spec in SPECS.items() if spec.agrees} - {"d_head"} <= CHANGES.keys()


def test_the_table_and_the_dataclasses_are_one():
    for group in GROUPS.values():
        assert len(fields_of(group)) == len(dataclasses.fields(group))
    for key, spec in SPECS.items():
        assert spec.meaning, key
        if spec.default is not REQUIRED and spec.default is not None and spec.choices:
            assert set([spec.default] if isinstance(spec.default, str) else spec.default) <= set(spec.choices)


def test_loading_a_config_imports_no_jax_and_no_heavy_package():
    code = (
        f"import sys; from mesh_transformer.config import load_config; load_config({MINIMAL!r});"
        "heavy = {'jax', 'haiku', 'optax', 'numpy', 'tensorflow', 'transformers', 'wandb', 'smart_open'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
