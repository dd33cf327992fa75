"""What CONTRIBUTING and docs/installation.md promise of fresh environments; what needs pip and a network is long."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny

from scripts import install_peers, quickstart, run_long_tests

ROOT = Path(__file__).resolve().parent.parent
# Other interpreters to try, such as "python3.12 /opt/python3.13/bin/python"; without it, only this one.
PYTHONS = os.environ.get("MESH_TRANSFORMER_PYTHONS", sys.executable).split()
NOT_CORE = ("google.cloud", "wandb", "tensorboardX", "tensorflow", "torch", "transformers", "ftfy", "matplotlib", "ray")


def clean_copy(folder: Path) -> Path:
    """The repository's files without its environment, as a clone has them."""
    ignored = shutil.ignore_patterns(".venv*", ".git", "runs", "*.egg-info", "__pycache__", ".*_cache", "build")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


def run(command: list[str], folder: Path) -> str:
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("interpreter", PYTHONS)
@pytest.mark.parametrize("lowest", [False, True], ids=["newest", "lowest"])
def test_core_alone_trains_and_samples(tmp_path, record_property, interpreter, lowest):
    """A fresh environment with nothing but the core, at either end of the ranges: records, training, a sample."""
    folder = clean_copy(tmp_path / "copy")
    run([interpreter, "-m", "venv", "environment"], folder)
    python = str(folder / "environment" / "bin" / "python")
    constraints = ["-c", "requirements-lowest.txt"] if lowest else []
    run([python, "-m", "pip", "install", "-q", "-e", ".", *constraints], folder)
    imports = f"import importlib.util as u; print([n for n in {NOT_CORE!r} if u.find_spec(n.split('.')[0])])"
    assert run([python, "-c", imports], folder).strip() in ("[]", "['google.cloud']")  # google-crc32c's own namespace

    config = json.loads((folder / quickstart.CONFIG).read_text(encoding="utf-8"))
    config = quickstart.with_steps(quickstart.in_directory(config, folder / "quick"), 4)
    path = folder / "quick.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    for stage in quickstart.stages(config, path, 0.5, prompts=("import",)):
        if "plot_loss" not in stage.command[0]:  # the picture needs the extra
            said = run([python, *stage.command], folder)
    assert "import" in said
    lines = (folder / "quick" / "model" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["step"] == 4
    version = "import jax, haiku, optax, sys; print(sys.version.split()[0], jax.__version__, optax.__version__)"
    record_property("Python, jax, optax", run([python, "-c", version], folder).strip())


CORE_ALONE = """
import json, runpy, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in ABSENT):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for command in json.loads(sys.argv[1]):
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, (command, end.code)
assert not [name for name in ABSENT if name in sys.modules]
"""


@pytest.mark.slow
def test_core_alone_is_enough(tmp_path):
    """The short form of the test above: in this environment, with the packages that are not core out of reach."""
    tokenizer, config = str(tmp_path / "tokenizer.json"), str(tmp_path / "config.json")
    (tmp_path / "text.txt").write_text("a cat sat on a mat, and then another cat sat down there too. " * 40)
    keys = tiny(
        n_vocab=300, cores_per_replica=2, total_steps=2, tokenizer=tokenizer, data_dir=str(tmp_path),
        train_set="set.train.index", model_dir=str(tmp_path / "model"), name="core",
    )  # fmt: skip
    Path(config).write_text(json.dumps(keys))
    on_cpu = ["--config", config, "--platform", "cpu", "--devices", "4"]
    commands = [
        ["scripts/train_tokenizer.py", str(tmp_path / "text.txt"), "--output", tokenizer, "--vocab-size", "270"],
        ["create_finetune_tfrecords.py", str(tmp_path / "text.txt"), "set", "--output-dir", str(tmp_path),
         "--config", config, "--index"],
        ["device_train.py", *on_cpu],
        ["device_sample.py", *on_cpu, "--prompt", "a cat", "--max-tokens", "4"],
    ]  # fmt: skip
    program = f"ABSENT = {NOT_CORE!r}\n{CORE_ALONE}"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "done: 2 of 2 steps" in done.stderr and "a cat" in done.stdout


def test_cuda_builds_are_recognised():
    report = {"install": [{"metadata": {"name": name}} for name in ("torch", "nvidia-cublas", "triton", "sympy")]}
    assert install_peers.cuda_packages(report) == ["nvidia-cublas", "triton"]
    assert install_peers.cuda_packages({"install": [{"metadata": {"name": "torch"}}]}) == []
    assert any(requirement.startswith("torch==") for requirement in install_peers.peers())


def test_log_of_the_long_tests(tmp_path):
    junit = tmp_path / "junit.xml"
    junit.write_text(
        "<testsuites><testsuite>"
        "<testcase classname='tests.test_a' name='test_x' time='1.25'><properties>"
        "<property name='kills' value='30'/><property name='MB' value='7'/></properties></testcase>"
        "<testcase classname='tests.test_a' name='test_y' time='2'><failure message='no'/></testcase>"
        "</testsuite></testsuites>",
        encoding="utf-8",
    )
    log = run_long_tests.write_log(junit, "make test-long", tmp_path / "measurements").read_text(encoding="utf-8")
    assert "| test_a::test_x | passed | 1.2 | kills 30; MB 7 |" in log
    assert "| test_a::test_y | failure | 2.0 |  |" in log
    assert "`make test-long` at commit" in log and "jax " in log
