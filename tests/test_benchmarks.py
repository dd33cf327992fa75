"""The benchmark scripts run; their figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import accelerator
from mesh_transformer.planning import exact

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
        "--cases",
        "v1_rotary_mp4_f32",
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


CHILD = """
import json, os, signal, sys, time
if "--parity" in sys.argv:
    print(json.dumps({"parity": {"a case": 0.0}}))
elif "--train" in sys.argv and "125M" in sys.argv:
    time.sleep(60)
elif "--decode" in sys.argv and sys.argv[-2:] == ["6B", "16"]:
    sys.exit("jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.")
elif "--decode" in sys.argv and "1.3B" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does that has no memory left
else:
    found = {"parameters": 5, "tokens_per_second": 7.0, "mfu": None, "peak_gib": None, "compile_seconds": 1.0}
    print(json.dumps(found | {"first_ms": 3.0, "peak_gb": 22.5}))
"""


def test_what_does_not_fit_or_ends_is_a_row_of_the_table(tmp_path: Path, monkeypatch, capsys) -> None:
    """With a script in place of the measurements: training that hangs leaves decoding its time."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(accelerator, "__file__", str(tmp_path / "child.py"))
    began = time.monotonic()
    arguments = ["--deadline", "10", "--reserve", "1", "--remats", "dots", "--output", str(tmp_path / "out.json")]
    assert accelerator.main(arguments) == 0
    assert time.monotonic() - began < 10
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["rows"][0] == {"size": "125M", "remat": "dots", "error": "stopped at the deadline"}
    said = capsys.readouterr().out
    assert "| 125M | 16 | 5 | 7 | 3.0 | 22.50 |" in said and "| 6B | 1 | 5 | 7 | 3.0 | 22.50, above 22.4 |" in said
    for row in ("1.3B | 1", "1.3B | 16", "6B | 16"):
        assert f"| {row} | does not fit in memory |" in said


@pytest.mark.long
def test_memory_of_decoding_by_the_compiler(capfd) -> None:
    """A model of 2 layers: its weights in 16 bits, and peaks that hold them once."""
    if exact.library() is None:
        pytest.skip("there is no libtpu on this machine (python scripts/install_compiler.py)")
    sizes = ["--layers", "2", "--d-model", "1024", "--batches", "1"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "decode_memory.py"), *sizes], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    texts, weights, _, *peaks = map(float, done.stdout.splitlines()[-1].strip("| ").split("|"))
    assert texts == 1 and weights > 0.2
    assert all(weights <= peak < 1.5 * weights for peak in peaks)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "lines"),
    [
        ("memory.py", ["--lengths", "64", "--rounds", "1", "--remats", "full", "--vocabulary", "2048"], 4),
        pytest.param(
            "zero.py", ["--meshes", "2x4", "--versions", "1", "--rounds", "1", "--sequences", "4"], 1,
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_tables_of_memory_and_of_zero(script: str, arguments: list[str], lines: int) -> None:
    done = subprocess.run([sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) == lines, done.stdout + done.stderr
