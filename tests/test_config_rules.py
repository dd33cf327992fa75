"""Configs that are refused: one per rule, each named with key, value, rule and remedy, also under `python -O`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.config import (
    SPECS,
    check_mesh,
    check_training,
    load_config,
    mesh_notice,
    resolve_epochs,
)
from mesh_transformer.errors import ConfigError

ROOT = Path(__file__).parent.parent
GOOD = {
    "layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 128, "seq": 32, "cores_per_replica": 4, "per_replica_batch": 1,
    "lr": 1e-3, "train_set": "text.train.index", "model_dir": "run", "total_steps": 100,
}  # fmt: skip
MISSING = object()

# (what is changed in GOOD, pattern of the one line that refuses it)
BAD = [
    ({"layer": 3}, r"layer is not a known key; the nearest is 'layers'"),
    ({"warmup": 3}, r"warmup is not a known key; the nearest is 'warmup_steps'"),
    ({"Gradient-Accumulation": 3}, r"nearest is 'gradient_accumulation_steps'"),
    ({"zzz": 3}, r"zzz is not a known key; the nearest is '"),
    ({"layers": MISSING}, r"layers is missing; it must be an integer >= 1"),
    ({"train_set": MISSING}, r"train_set is missing; it must be a string"),
    ({"total_steps": MISSING}, r"total_steps is missing.*epochs"),
    ({"epochs": 2}, r"total_steps \(100\) and epochs \(2\) both"),
    ({"epochs": 0, "total_steps": MISSING}, r"epochs is 0; it must be a number > 0, or null"),
    ({"total_steps": 0}, r"total_steps is 0; it must be an integer >= 1"),
    ({"layers": 0}, r"layers is 0; it must be an integer >= 1"),
    ({"layers": 2.5}, r"layers is 2.5; it must be an integer"),
    ({"layers": True}, r"layers is true; it must be an integer"),
    ({"layers": None}, r"layers is null; it must be an integer"),
    ({"layers": 10**400}, r"layers is 1000"),
    ({"total_steps": 10**20}, r"total_steps is 100000000000000000000; it must be at most 2147483647"),
    ({"anneal_steps": 2**31}, r"anneal_steps is 2147483648; it must be at most 2147483647"),
    ({"lr": "5e-5"}, r"lr is '5e-5'; it must be a number > 0.*without quotes"),
    ({"lr": float("nan")}, r"lr is nan; it must be a number"),
    ({"lr": float("inf")}, r"lr is inf; it must be a number"),
    ({"lr": 0}, r"lr is 0; it must be a number > 0"),
    ({"lr": 1e-5, "end_lr": 1e-4}, r"end_lr \(0.0001\) must be at most lr \(1e-05\).*1e-06"),
    ({"warmup_steps": -1}, r"warmup_steps is -1; it must be an integer >= 0"),
    ({"anneal_steps": -1}, r"anneal_steps is -1; it must be an integer >= 0"),
    ({"weight_decay": -0.1}, r"weight_decay is -0.1; it must be a number >= 0"),
    ({"b1": 1}, r"b1 is 1; it must be a number >= 0 and < 1"),
    ({"b2": -1}, r"b2 is -1; it must be a number >= 0 and < 1"),
    ({"eps": 0}, r"eps is 0; it must be a number > 0"),
    ({"max_grad_norm": 0}, r"max_grad_norm is 0; it must be a number > 0"),
    ({"seed": -1}, r"seed is -1; it must be an integer >= 0"),
    ({"seed": 2**32}, r"seed is 4294967296; it must be an integer >= 0 and <= "),
    ({"max_skipped": 0}, r"max_skipped is 0; it must be an integer >= 1"),
    ({"keep_n": 0}, r"keep_n is 0; it must be an integer >= 1"),
    ({"noise_scale_alpha": 1.5}, r"noise_scale_alpha is 1.5; it must be a number > 0 and <= 1"),
    *(({key: -1}, rf"{key} is -1; it must be an integer >= 0, or null") for key in SPECS if key.endswith("_every")),
    ({"norm": "layer_norm"}, r"norm is 'layer_norm'; it must be one of layernorm, .*did you mean 'layernorm'"),
    ({"pe": "alibi"}, r"pe is 'alibi'; it must be one of rotary, t5, fixed"),
    ({"compute_dtype": "bf16"}, r"compute_dtype is 'bf16'.*did you mean 'bfloat16'"),
    ({"remat": "some"}, r"remat is 'some'; it must be one of auto, none, dots, full"),
    ({"z_loss": True}, r"z_loss is true; it must be one of reference, log_z, off"),
    ({"early_cast": "false"}, r"early_cast is 'false'; it must be true or false"),
    ({"early_cast": 0}, r"early_cast is 0; it must be true or false"),
    ({"val_set": "x.index"}, r"val_set is 'x.index'; it must be a mapping from name to path.*\{\"text\": \"text.val"),
    ({"val_set": {"a": 3}}, r"val_set has 'a': 3; names and paths must be strings"),
    ({"val_set": {"": "a.index"}}, r"val_set has '': 'a.index'"),
    ({"train_set": " "}, r"train_set is ' '; it must be a string"),
    ({"eval_harness_tasks": "piqa"}, r"eval_harness_tasks is 'piqa'; it must be a list of strings"),
    ({"trackers": ["csv"]}, r"trackers is \['csv'\]; it must be a list of jsonl, tensorboard, wandb"),
    ({"wandb_mode": "on"}, r"wandb_mode is 'on'; it must be one of offline, online, disabled"),
    ({"wandb_mode": "online"}, r'wandb_mode is "online", but trackers does not name wandb'),
    ({"zero_stage": 2}, r"zero_stage is 2; it must be one of 0, 1, 3"),
    ({"version": 1, "v2_merged_heads": 4}, r"v2_merged_heads \(4\) belongs to version 2"),
    ({"v2_merged_heads": 3}, r"n_heads \(\d+\) must be divisible by v2_merged_heads \(3\)"),
    ({"ckpt_format": "ocdbt"}, r"ckpt_format is 'ocdbt'; it must be one of shards, orbax"),
    ({"version": 3}, r"version is 3; it must be an integer >= 1 and <= 2"),
    ({"n_heads": 6, "d_model": 48}, r"n_heads \(6\) must be divisible by cores_per_replica \(4\)"),
    ({"n_vocab": 126}, r"n_vocab \(126\) must be divisible by cores_per_replica \(4\)"),
    (
        {"d_model": 70, "n_heads": 10, "cores_per_replica": 5, "d_head": 8, "version": 2, "n_vocab": 130},
        None,
    ),
    (
        {"d_model": 66, "n_heads": 4, "d_head": 16, "version": 2},
        r"d_model \(66\) must be divisible by cores_per_replica \(4\)",
    ),
    ({"d_model": 60}, r"d_model \(60\) must be divisible by n_heads \(8\)"),
    ({"d_head": 16}, r"d_head \(16\) must be d_model / n_heads \(8\).*version"),
    ({"tpu_size": 6}, r"tpu_size \(6\) must be divisible by cores_per_replica \(4\)"),
    ({"pe_rotary_dims": 64}, r"pe_rotary_dims \(64\) must be at most the head size \(8 = .*or leave it out"),
    ({"pe_rotary_dims": 5}, r"pe_rotary_dims \(5\) must be even.*use 4 or 6"),
    ({"d_model": 24}, r"the head size \(3\) is odd"),
    ({"bucket": "gs://my-bucket"}, r"bucket is 'gs://my-bucket'; it must be a bucket's bare name"),
    ({"bucket": "my-bucket", "model_dir": "gs://b/run"}, r"model_dir \(gs://b/run\) is absolute.*bucket \(my-bucket\)"),
    ({"bucket": "my-bucket", "model_dir": "/x"}, r"model_dir \(/x\) is absolute"),
    ({"keep_best": "text"}, r"keep_best is 'text', but val_set is empty"),
    ({"keep_best": "txt", "val_set": {"text": "a"}}, r"keep_best is 'txt', which is not in val_set.*'text'"),
]


def problems_of(change):
    """The lines that refuse GOOD with `change`; none where it loads."""
    raw = {key: value for key, value in {**GOOD, **change}.items() if value is not MISSING}
    try:
        load_config(raw)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def fault(change, pattern):
    """What is wrong with how GOOD with `change` is refused, or None. No asserts: it also runs under `python -O`."""
    lines = problems_of(change)
    if pattern is None:
        return f"refused: {lines}" if lines else None
    if len(lines) != 1:
        return f"expected one line, found {lines}"
    return None if re.search(pattern, lines[0]) else f"{lines[0]!r} does not say {pattern!r}"


@pytest.mark.parametrize(("change", "pattern"), BAD, ids=lambda value: str(value)[:40])
def test_refused_in_one_line(change, pattern):
    assert fault(change, pattern) is None


def test_refused_without_asserts_too():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_config_rules as rules;"
        "faults = [f for f in (rules.fault(*bad) for bad in rules.BAD) if f]; print(faults); sys.exit(bool(faults))"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_wrong_is_reported_at_once():
    change = {"layers": "2", "warmup": 3, "seq": MISSING, "val_set": "x", "n_heads": 6, "d_model": 48, "bucket": "a/b"}
    lines = "\n".join(problems_of(change))
    for key in ("layers", "warmup", "seq", "val_set", "n_heads", "bucket"):
        assert re.search(rf"^config: {key} ", lines, re.M), key
    assert "total_steps" not in lines


def test_a_wrong_value_causes_no_second_complaint():
    assert len(problems_of({"cores_per_replica": "4"})) == 1
    assert len(problems_of({"val_set": 3, "keep_best": "a"})) == 1


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(
        ConfigError, match=r"absent.json: the config cannot be read: cannot open: No such file"
    ) as caught:
        load_config(tmp_path / "absent.json")
    assert caught.value.__cause__ is not None
    for text, words in (
        ('{"layers": 2,}', r"bad.json: this is not JSON: .*line 1"),
        ("[1]", r"bad.json: a config is one JSON object"),
        (json.dumps(GOOD)[:-1] + ', "layers": 3}', r"bad.json: layers is given twice: 2 and 3"),
        (json.dumps({**GOOD, "layers": 0}), r"bad.json: layers is 0"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_config(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"bad.json: "):
        load_config(tmp_path / "bad.json")


def test_flags_of_inference_are_refused_in_training_with_their_cost():
    check_training(load_config({**GOOD, "early_cast": False, "bf16_optimizer": False}))
    for key in ("early_cast", "bf16_optimizer"):
        with pytest.raises(ConfigError, match=rf"{key} cannot be used in training: .*1/256.*set it to false"):
            check_training(load_config({**GOOD, key: True}))
    with pytest.raises(ConfigError) as caught:
        check_training(load_config({**GOOD, "early_cast": True, "bf16_optimizer": True, "eval_only": True}))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (1, r"^1 device cannot .*cores_per_replica \(4\).*--platform cpu --devices 4"),
        (6, r"6 devices cannot .*cores_per_replica \(4\): use 4 of them with --devices 4"),
        (0, r"^0 devices were asked for; a replica takes cores_per_replica \(4\)$"),
        (-2, r"^-2 devices were asked for"),
    ],
)
def test_devices_that_do_not_fit(devices, words):
    with pytest.raises(ConfigError, match=words):
        check_mesh(load_config(GOOD), devices)


def test_a_tpu_size_that_is_not_used_is_said():
    config = load_config({**GOOD, "tpu_size": 8})
    assert mesh_notice(config, 8) is None and mesh_notice(load_config(GOOD), 4) is None
    assert re.search(r"tpu_size is 8, but 4 devices", mesh_notice(config, 4))


def test_epochs_of_nothing():
    with pytest.raises(ConfigError, match=r"epochs \(2\) needs a train_set with records, found 0"):
        resolve_epochs(load_config({**GOOD, "epochs": 2, "total_steps": None}), 0, 1)


def test_epochs_without_end():
    with pytest.raises(ConfigError, match=r"epochs \(1e\+18\) of 100 records are 1e\+20 steps, above 2147483647"):
        resolve_epochs(load_config({**GOOD, "epochs": 1e18, "total_steps": None}), 100, 1)
