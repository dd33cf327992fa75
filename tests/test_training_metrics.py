"""What is measured and shown: noise scale, MFU, metrics file, schedule, watchdog, progress."""

import dataclasses
import json
import logging
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny

from mesh_transformer.config import load_config
from mesh_transformer.progress import Progress
from mesh_transformer.training import throughput
from mesh_transformer.training.noise import NoiseScale
from mesh_transformer.training.progress import StepProgress
from mesh_transformer.training.trackers import JsonlTracker, keep_lines
from mesh_transformer.training.watchdog import Watchdog

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import show_schedule  # noqa: E402


def test_noise_scale_by_hand():
    noise = NoiseScale(alpha=0.25)
    assert noise.update(4, 4, 1.0, 1.0) == {}, "one batch size says nothing"
    first = noise.update(2, 8, 0.75, 0.25)
    assert first["noise/G_noise"] == pytest.approx((8 * 0.25 - 2 * 0.75) / 6) == first["noise/G_noise_avg"]
    assert first["noise/S_noise"] == pytest.approx(0.5 / (1 / 2 - 1 / 8)) == first["noise/S_noise_avg"]
    large = noise.update(2, 8, 9.0, 2.0)
    assert large["noise/G_noise"] != first["noise/G_noise"]
    assert large["noise/G_noise_avg"] == first["noise/G_noise_avg"], "2 or more stays out of the averages"
    second = noise.update(2, 8, 1.0, 1.0)
    assert second["noise/G_noise_avg"] == pytest.approx(0.75 * first["noise/G_noise"] + 0.25 * 1.0)
    assert second["noise/S_noise_avg"] == pytest.approx(0.75 * first["noise/S_noise"])
    assert second["noise/B_simple"] == pytest.approx(second["noise/S_noise_avg"] / second["noise/G_noise_avg"])


def test_noise_scale_finds_the_batch_size_of_noisy_gradients():
    """Gradients G + noise / sqrt(batch) with known |G|^2 = 0.04 and trace 16: the ratio of the averages is 400."""
    rng = np.random.default_rng(0)
    noise = NoiseScale(alpha=0.003)
    for _ in range(1500):
        mean = np.zeros(64)
        mean[0] = 0.2
        small = mean + rng.normal(size=(64, 64)) * 0.5 / np.sqrt(2)  # 64 small batches of 2, variance 0.25 a dimension
        metrics = noise.update(2, 128, np.mean(np.sum(small**2, axis=1)), np.sum(np.mean(small, axis=0) ** 2))
    assert metrics["noise/B_simple"] == pytest.approx(400, rel=0.2)


def test_mfu_is_flops_over_the_peak_of_all_devices():
    model = load_config(tiny()).model
    wide = dataclasses.replace(model, version=2, head_size=2 * model.d_head)  # and gated
    assert throughput.flops_per_token(wide) == 6 * (2 * 20 * 32 * 32 + 32 * 64) + 12 * 2 * 16 * 64
    assert throughput.flops_per_token(model) == 6 * (2 * 12 * 32 * 32 + 32 * 64) + 12 * 2 * 16 * 32
    rates = throughput.rates(model, tokens=100, seconds=2.0, device_kind="NVIDIA H200", devices=4)
    assert rates["train/model_flops_per_sec"] == throughput.flops_per_token(model) * 50
    assert rates["train/mfu"] == pytest.approx(rates["train/model_flops_per_sec"] / (4 * 989e12))
    kinds = ("TPU v5 lite", "TPU v5p", "TPU v4", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "cpu")
    assert [throughput.peak_flops(kind) for kind in kinds] == [197e12, 459e12, 275e12, 312e12, 756e12, None]


def test_metrics_lines_past_the_restored_step_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "train/lo')
    tracker = JsonlTracker(str(tmp_path), clock=lambda: 5.0)
    tracker.start(2)
    tracker.log(3, {"train/loss": math.inf, "x": 1.5})
    tracker.close(0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2}, {"step": 3, "time": 5.0, "train/loss": None, "x": 1.5}]
    before = path.stat().st_mtime_ns
    keep_lines(str(path), 3)
    assert path.stat().st_mtime_ns == before and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_watchdog_names_the_phase_that_takes_long(caplog):
    with caplog.at_level(logging.WARNING), Watchdog(interval=0.05) as watchdog, watchdog.phase("outer"):
        with watchdog.phase("validating on pile"):
            time.sleep(0.2)
        quick = len(caplog.records)
    assert caplog.records[0].getMessage().startswith("still validating on pile after")
    assert 1 <= quick <= 4


class Screen:
    def __init__(self, terminal):
        self.terminal, self.text = terminal, ""

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


METRICS = {"train/loss": 2.5, "train/learning_rate": 1e-4, "train/tokens_per_sec": 1000.0}


def test_progress_of_a_run_is_a_bar_with_eta_on_a_terminal(caplog):
    screen, times = Screen(True), iter(range(1000))
    with caplog.at_level(logging.INFO), Progress("step", 100, stream=screen, clock=lambda: next(times)) as shown:
        progress = StepProgress(0, 100, shown)
        progress.update(1, METRICS, 60.0)
        progress.update(2, METRICS, 2.0)
    assert "2% |" in screen.text and "| step 2/100  loss 2.5000" in screen.text and "ETA 0:03:16" in screen.text
    assert not caplog.records


def test_progress_of_a_run_is_plain_lines_elsewhere(caplog):
    times = iter(range(0, 1000, 4))
    shown = Progress("step", 6, stream=Screen(False), say=logging.getLogger().info, clock=lambda: next(times))
    with caplog.at_level(logging.INFO), shown:
        progress = StepProgress(0, 6, shown)
        for step in range(1, 7):
            progress.update(step, METRICS | ({"val/loss_v": 3.0} if step == 2 else {}), 1.0)
    lines = [record.getMessage().split()[1] for record in caplog.records]
    assert lines == ["1/6", "2/6", "5/6", "6/6"]
    assert "val/loss_v 3.0000" in caplog.records[1].getMessage()


def test_show_schedule_prints_the_rate_at_the_steps_where_it_turns(capsys):
    assert show_schedule.main([str(ROOT / "configs/example_config.json"), "--devices", "8"]) == 0
    rows = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    rates = {row[0]: (row[2], row[3]) for row in rows if row[0].isdigit() and len(row) == 4}
    assert rates["0"] == ("0", "first update") and rates["7"] == ("5e-05", "warm-up ends")
    assert rates["72"] == ("1e-05", "annealing ends, run ends")
    assert show_schedule.main(["none.json"]) == 2
    assert "none.json" in capsys.readouterr().err
