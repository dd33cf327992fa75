"""The benchmark scripts run; their figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.slow
def test_accelerator_script_on_this_cpu(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "accelerator.py"),
        "--sizes",
        "125M",
        "--remats",
        "dots",
        "--steps",
        "1",
        "--batches",
        "2",
    ]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert max(result["parity"].values()) < 1e-4
    assert result["rows"][0]["tokens_per_second"] > 0
    assert "| 125M | dots |" in done.stdout
    assert result["decoded"][0]["tokens_per_second"] > 0
    assert "| 125M | 2 |" in done.stdout


def test_accelerator_script_stops_at_its_deadline(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    command = [sys.executable, str(BENCHMARKS / "accelerator.py"), "--deadline", "2", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, "parity was not measured"
    assert "Traceback" not in done.stderr
    assert {row["error"] for row in json.loads(output.read_text())["rows"]} == {"no time left before the deadline"}


@pytest.mark.long
def test_generation_beside_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "generate.py"), "--small", "--rounds", "1", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(output.read_text())["batches"].values():
        assert row["ratio"] > 0 and row["first_ratio"] > 0
        assert row["same_texts"] == 1, "greedy texts of the same weights are the same"
