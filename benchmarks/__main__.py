"""`make bench`: every benchmark that runs on this machine, one after the other; each can be run by itself too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = [
    "training.py",
    "generate.py",
    "compile_time.py",
    "zero.py",
    "pods.py",
    "memory.py",
    "data.py",
    "checkpoint.py",
    "evaluate.py",
    "serve.py",
]


def main() -> int:
    failed = []
    for script in SCRIPTS:
        print(f"== benchmarks/{script}", flush=True)
        if subprocess.run([sys.executable, str(HERE / script)]).returncode:
            failed.append(script)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
