"""docs/parallelism.md: its commands and its Python run, its pictures are what the script draws, its figures are the
config report's; and the large configs have the sizes that their names say."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_repository import ROOT, commands

from mesh_transformer import load_config, parameters
from mesh_transformer.config import Config, check_mesh
from mesh_transformer.config_report import device_bytes, main, size
from mesh_transformer.memory import activation_bytes

pytestmark = pytest.mark.usefixtures("uncached")

PAGE = ROOT / "docs/parallelism.md"
LARGE = [ROOT / f"configs/{size}B_v{version}.json" for size in (13, 20, 40, 175) for version in (1, 2)]
GOLDEN = ROOT / "tests/data/golden_v2"


def row(path: Path) -> str:
    """The page's row of a config; activations are bfloat16."""
    config = load_config(path)
    assert config.mesh.tpu_size
    dp, mp = check_mesh(config, config.mesh.tpu_size)
    model, kinds = config.model, parameters.kinds(config.model, mp)
    tokens = config.mesh.per_replica_batch * model.seq
    active = activation_bytes(model, mp, tokens, model.remat, 2)
    layer = sum(math.prod(k.local_shape(mp)) for k in kinds if k.stacked) // model.layers
    in_use = 0 if config.mesh.zero_stage < 3 else (2 * 2 + 4) * layer  # two layers' weights, a layer's gradient
    cells = [f"{parameters.count(model) / 1e9:.2f} B", f"dp {dp} x mp {mp}", str(config.mesh.zero_stage)]
    cells += [
        size(device_bytes(config, dp).total, exact=False),
        size(active, exact=False),
        size(in_use, exact=False) if in_use else "-",
    ]
    return f"| `{path.name}` | {' | '.join(cells)} |"


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_large_configs_have_the_size_of_their_names(path: Path) -> None:
    config = load_config(path)
    billions = int(path.stem.split("B")[0])
    assert parameters.count(config.model) == pytest.approx(billions * 1e9, rel=0.03)
    assert config.version == int(path.stem[-1]) and config.run.name == path.stem
    assert row(path) in PAGE.read_text()
    assert fits(config), "by the page's arithmetic, on devices of 32 GB"


def fits(config: Config) -> bool:
    numbers = re.findall(r"([\d.]+) (MiB|GiB)", row(Path(config.source or "")))
    return sum(float(number) * {"MiB": 2**20, "GiB": 2**30}[unit] for number, unit in numbers) < 0.9 * 32e9


def test_the_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [words[3:] for words in commands(PAGE) if words[1:3] == ["-m", "mesh_transformer.config"]]
    assert len(reports) >= 2
    for arguments in reports:
        assert main([str(ROOT / arguments[0]), *arguments[1:]]) == 0
        assert "zero_stage" in capsys.readouterr().out


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version-2 folder of the 2021 library, on another mesh than its own."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    config = json.loads((GOLDEN / "config.json").read_text())
    config |= {"train_set": "none.index", "total_steps": 10, "v2_merged_heads": 4}
    (tmp_path / "reference_v2.json").write_text(json.dumps(config))
    shutil.copytree(max(GOLDEN.glob("step_*")), tmp_path / "old_model/step_1000")
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    network = runpy.run_path("program.py")["network"]
    assert (network.model.v2_merged_heads, dict(network.mesh.shape)) == (4, {"dp": 4, "mp": 2})


def test_the_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    script = [sys.executable, ROOT / "scripts/draw_parallelism.py", "--output-dir", tmp_path]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("parallelism-held.svg", "parallelism-moved.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "docs/images" / name).read_text(), f"{name} is stale"
        assert f"images/{name}" in PAGE.read_text()
