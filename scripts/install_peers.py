"""Install torch and transformers, which some tests and `make bench` compare this project with.

python scripts/install_peers.py --install auto    only where pip would take a CPU build of torch
python scripts/install_peers.py --install 1       whatever the build and its size
python scripts/install_peers.py --install 0       not at all

Where they are left out, the tests that need them are skipped and say so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA_NAMES = ("nvidia-", "cuda-", "triton")


def peers() -> list[str]:
    """The requirements of the extra `peers` in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"]["peers"]


def cuda_packages(report: dict) -> list[str]:
    """Names of the CUDA packages in pip's installation report (`pip install --dry-run --report`)."""
    names = [str(item["metadata"]["name"]).lower() for item in report.get("install", [])]
    return sorted(name for name in names if name.startswith(CUDA_NAMES))


def would_install_cuda(requirements: list[str]) -> bool:
    """Ask pip, without installing anything, whether these requirements bring CUDA libraries along."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *requirements]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        # Not an error: a Python without such a torch, or no network. The comparisons are then skipped.
        print(answer.stderr.strip().splitlines()[-1] if answer.stderr.strip() else "pip cannot resolve torch")
        return True
    return bool(cuda_packages(json.loads(answer.stdout)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", choices=("auto", "0", "1"), default="auto")
    choice = parser.parse_args(arguments).install
    requirements = peers()
    if choice == "auto" and would_install_cuda(requirements):
        print(
            f"left out {' '.join(requirements)}: pip has no CPU build here, only the CUDA one of several GB. The tests "
            "that compare with Hugging Face's GPT-J will be skipped; PEERS=1 in front of make installs it all the same."
        )
        return 0
    if choice == "0":
        return 0
    return subprocess.run([sys.executable, "-m", "pip", "install", *requirements], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
