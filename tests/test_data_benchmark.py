"""benchmarks/data.py runs, and what it measures is fast enough by a wide margin."""

from __future__ import annotations

import json

import pytest

from benchmarks import data


@pytest.mark.slow
def test_benchmark_of_data(tmp_path):
    assert data.main(["--megabytes", "0.5", "--repeats", "1", "--output", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["text_mb"] == 0.5 and figures["tokens"] > 50_000
