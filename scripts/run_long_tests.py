"""Run the tests marked long and write a dated log with their figures into docs/measurements/.

python scripts/run_long_tests.py [PYTEST ARGUMENTS]

A test puts a figure into the log with pytest's `record_property("name", value)`. Everything pytest prints is shown as
it comes. The exit status is pytest's. Programs are optimized as users' are, which the short tests leave out, unless
XLA_FLAGS is set.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "measurements"


def machine() -> str:
    """One line: processor, cores, memory, Python and the versions that numbers depend on."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or a processor without a name: the architecture has to do
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "dm-haiku", "optax", "numpy"))
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB; Python {platform.python_version()}, {versions}"


def commit() -> str:
    """The commit that is measured, with a plus where files differ from it."""
    describe = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def rows(junit: Path) -> list[str]:
    """One table row for each test of a JUnit file: name, result, seconds, figures."""
    found = []
    for case in ElementTree.parse(junit).iter("testcase"):
        children = {child.tag for child in case}
        result = next((word for word in ("failure", "error", "skipped") if word in children), "passed")
        figures = "; ".join(f"{item.get('name')} {item.get('value')}" for item in case.iter("property"))
        module = (case.get("classname") or "").rsplit(".", 1)[-1]
        found.append(f"| {module}::{case.get('name')} | {result} | {float(case.get('time') or 0):.1f} | {figures} |")
    return found


def write_log(junit: Path, command: str, folder: Path = FOLDER) -> Path:
    """Write the dated log and return its path; a second run of the same day replaces the first."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    log = folder / f"{today}-long-tests.md"
    lines = [
        f"# Long tests, {today}",
        "",
        f"`{command}` at commit {commit()}.",
        "",
        machine() + ".",
        "",
        "| test | result | seconds | figures |",
        "|---|---|---|---|",
        *rows(junit),
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    log.write_text("\n".join(lines), encoding="utf-8")
    return log


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, extra = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        junit = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "long", "-v", f"--junitxml={junit}", *extra]
        environment = {"XLA_FLAGS": "", **os.environ}
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if junit.exists():
            named = f' PYTEST_ARGS="{" ".join(extra)}"' if extra else ""
            print(f"figures written to {write_log(junit, f'make test-long{named}')}")
    return status


if __name__ == "__main__":
    sys.exit(main())
