"""TensorBoard events and W&B's offline file, written by the trackers and read back."""

import json
import os
import struct
import sys

import pytest

from mesh_transformer.config import load_config
from mesh_transformer.errors import ConfigError, StorageError
from mesh_transformer.training.trackers import open_trackers, remove_tracks


def config_of(model_dir, *trackers, **keys):
    return load_config(
        {
            "layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 16, "seq": 8, "train_set": "x", "total_steps": 4,
            "model_dir": str(model_dir), "name": "trial", "trackers": list(trackers), **keys,
        }
    )  # fmt: skip


def log_run(config, first, last, value, run_id="abc123"):
    trackers = open_trackers(config, run_id)
    for tracker in trackers:
        tracker.start(first - 1)
    for step in range(first, last + 1):
        for tracker in trackers:
            tracker.log(step, {"train/loss": value + step, "val/loss_pile": 0.5})
    for tracker in trackers:
        tracker.flush()
        tracker.close(0)


def hide(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)


def test_jsonl_alone_needs_no_other_package(tmp_path, monkeypatch):
    hide(monkeypatch, "wandb")
    hide(monkeypatch, "tensorboardX")
    log_run(config_of(tmp_path), 1, 3, 0.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize(("tracker", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_missing_package_is_named_before_anything_is_written(tmp_path, monkeypatch, tracker, package):
    hide(monkeypatch, package)
    with pytest.raises(ConfigError, match=rf"trackers has {tracker}.*{package}.*pip install"):
        open_trackers(config_of(tmp_path, tracker), "abc123")
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_events_read_back_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(tmp_path, "tensorboard")
    log_run(config, 1, 4, 0.0)
    log_run(config, 3, 5, 10.0)  # a kill after step 4, resumed from step 2
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0),
    ]  # fmt: skip
    assert [event.value for event in events.Scalars("val/loss_pile")] == [0.5] * 5


def offline_records(path):
    """The records of a W&B file: LevelDB's log format, 32 KiB blocks of chunks (crc, length, first/middle/last)."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_writes_offline_without_account_or_network(tmp_path, monkeypatch):
    import wandb

    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    log_run(config_of(tmp_path, "wandb", wandb_project="p", wandb_entity="team", comment="why"), 1, 3, 0.0)
    wandb.teardown()  # as at the end of the process: its writer, a process of its own, may still be at it
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(offline_records(path))
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.entity, run.display_name, run.notes, run.run_id) == ("p", "team", "trial", "why", "abc123")
    history = []
    for record in records:
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            history.append((record.history.step.num, float(items["train/loss"]), float(items["val/loss_pile"])))
    assert history == [(1, 1.0, 0.5), (2, 2.0, 0.5), (3, 3.0, 0.5)]


def test_a_new_run_removes_only_what_trackers_wrote(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    log_run(config_of(tmp_path, "tensorboard"), 1, 2, 0.0)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "metrics.jsonl", "tensorboard"}
    remove_tracks(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("tracker", ["jsonl", "tensorboard"])
def test_a_full_disk_is_an_error_and_neither_a_hang_nor_a_traceback(tmp_path, monkeypatch, tracker):
    """tensorboardX's own SummaryWriter waits for ever here, for a thread that has died."""
    config = config_of(tmp_path, tracker)
    opened = open_trackers(config, "abc123")[-1]
    real = open
    monkeypatch.setattr("builtins.open", lambda path, *more, **named: real("/dev/full", *more, **named))
    opened.start(0)
    monkeypatch.undo()

    def fill():
        for step in range(1, 1000):
            opened.log(step, {"train/loss": 0.5})
        opened.flush()

    for action in (fill, lambda: opened.close(2)):
        with pytest.raises(StorageError, match="No space left"):
            action()
