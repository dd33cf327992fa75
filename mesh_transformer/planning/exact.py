"""The plan from the program itself: the very step that runs, compiled ahead of time for a TPU topology."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mesh_transformer.config import Config
from mesh_transformer.errors import DeviceError, MeshTransformerError
from mesh_transformer.planning.analytic import analytic
from mesh_transformer.planning.chips import Topology
from mesh_transformer.planning.estimate import Estimate
from mesh_transformer.planning.traffic import Traffic

LIBRARY = "TPU_LIBRARY_PATH"  # where libtpu.so is, if it is not an installed package
_SECONDS = 1800


class TooLargeError(MeshTransformerError):
    """The program does not fit the chip's memory; the message is the compiler's."""


def folder() -> Path:
    """Where `scripts/install_compiler.py` puts libtpu: in this virtual environment, but not among its packages."""
    return Path(sys.prefix) / "compiler"


def library() -> str | None:
    """The path of libtpu.so: of $TPU_LIBRARY_PATH, in `folder()`, or of the package libtpu; or None."""
    named = os.environ.get(LIBRARY)
    if named:
        return named if Path(named).is_file() else None
    found = importlib.util.find_spec("libtpu")
    places = [folder() / "libtpu", *map(Path, (found.submodule_search_locations or []) if found else [])]
    return next((str(place / "libtpu.so") for place in places if (place / "libtpu.so").is_file()), None)


def exact(config: Config, topology: Topology, remat: str, task: str = "train") -> Estimate:
    """The estimate of one step of `task` with `remat`, from its compiled program.

    Takes seconds to minutes, in a process of its own. Raises TooLargeError where the step does not fit, DeviceError
    where the topology is no TPU slice or there is no compiler.
    """
    if not topology.is_tpu or topology.slices > 1:
        raise DeviceError(f"{topology.name}: only steps for one TPU slice can be compiled without the devices")
    return estimate_of(config, topology, remat, task, compiled(request_of(config, topology, remat, task)))


def request_of(config: Config, topology: Topology, remat: str, task: str) -> dict[str, Any]:
    """What `compiled` is asked: everything that the program depends on."""
    return {"config": config.to_dict(), "topology": topology.name, "task": task, "remat": remat}


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """What `compiler.compile_step` finds, in a process that has libtpu. Raises TooLargeError and DeviceError."""
    path = library()
    if path is None:
        raise DeviceError(
            "the exact plan compiles for TPUs, which needs libtpu: pip install 'mesh-transformer[plan]', or name its "
            f"libtpu.so in {LIBRARY}; --analytic does without"
        )
    environment = os.environ | {
        LIBRARY: path, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1",
        "XLA_FLAGS": "",  # of this machine's platform, and a TPU's compiler takes some of them
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mesh_transformer.planning.compiler"], input=json.dumps(request), capture_output=True,
        text=True, env=environment, timeout=_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "RESOURCE_EXHAUSTED" in done.stderr:
            raise TooLargeError(next(line for line in done.stderr.splitlines() if "RESOURCE_EXHAUSTED" in line))
        raise DeviceError(f"the step cannot be compiled for {request['topology']}: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def estimate_of(config: Config, topology: Topology, remat: str, task: str, found: dict[str, Any]) -> Estimate:
    """The estimate that `compiled` found. What the state takes is known from the config; what is kept and the copies
    stand in the program; all the rest of the peak comes and goes. For a token of one row XLA has sums, no matrix
    products, and their FLOPs are the known ones."""
    known = analytic(config, topology, remat, task)
    gathered: dict[tuple[str, str, int, int], int] = {}
    for one in found["collectives"]:
        key = (one["kind"], one["axis"], one["devices"], one["bytes"])
        gathered[key] = gathered.get(key, 0) + one["runs"]
    traffic = tuple(Traffic(kind, axis, n, runs, size) for (kind, axis, n, size), runs in gathered.items())
    return dataclasses.replace(
        known, exact=True, peak=found["peak"], copies=found["copies"], activations=found["kept"],
        accessed=found["accessed"], flops=found["flops"] or known.flops, traffic=traffic,
    )  # fmt: skip
