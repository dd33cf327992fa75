"""Install the compiler for TPUs, which plans are exact with, where this Python can have it.

python scripts/install_compiler.py

It is the release of libtpu that the installed jax names (its extra `tpu`), a download of 200 to 650 MB, put into a
folder of its own in the virtual environment: beside jax it would make every program look for TPUs. Where there is none
for this machine, that is said, and the tests that need it are skipped.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib import metadata


def requirement() -> str | None:
    """The requirement of jax's extra `tpu`, such as `libtpu==0.0.42.*`; None where jax names none."""
    lines = metadata.requires("jax") or []
    return next((line.split(";")[0].strip() for line in lines if line.startswith("libtpu") and "tpu" in line[6:]), None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    from mesh_transformer.planning import exact

    wanted = requirement()
    if wanted is None:
        print("left out the compiler for TPUs: the installed jax does not name a libtpu")
        return 0
    folder = exact.folder()
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--target", str(folder), "--no-deps", wanted]
    if subprocess.run(command, check=False).returncode:
        # Not an error: no build for this Python or machine, no network, or no room. Plans are then arithmetic alone.
        shutil.rmtree(folder, ignore_errors=True)
        print(
            f"left out the compiler for TPUs: pip cannot install {wanted} here. The tests that compile for TPUs skip."
        )
        return 0
    print(f"the compiler for TPUs: {exact.library()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
