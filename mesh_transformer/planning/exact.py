"""The plan from the program itself: the very training step, compiled ahead of time for a TPU topology."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mesh_transformer.config import Config
from mesh_transformer.config_report import device_bytes
from mesh_transformer.errors import DeviceError, MeshTransformerError
from mesh_transformer.planning.chips import Topology
from mesh_transformer.planning.estimate import Estimate, Traffic
from mesh_transformer.training.throughput import flops_per_token

LIBRARY = "TPU_LIBRARY_PATH"  # where libtpu.so is, if it is not an installed package
_SECONDS = 1800


class TooLargeError(MeshTransformerError):
    """The program does not fit the chip's memory; the message is the compiler's."""


def library() -> str | None:
    """The path of libtpu.so: of $TPU_LIBRARY_PATH, or of the package libtpu; None where there is neither."""
    named = os.environ.get(LIBRARY)
    if named:
        return named if Path(named).is_file() else None
    found = importlib.util.find_spec("libtpu")
    path = (
        Path(found.submodule_search_locations[0]) / "libtpu.so" if found and found.submodule_search_locations else None
    )
    return str(path) if path and path.is_file() else None


def exact(config: Config, topology: Topology, remat: str) -> Estimate:
    """The estimate of one training step with `remat`, from its compiled program.

    Takes seconds to minutes, in a process of its own. Raises TooLargeError where the step does not fit, DeviceError
    where the topology is no TPU slice or there is no compiler.
    """
    if not topology.is_tpu:
        raise DeviceError(f"{topology.name}: only steps for TPU slices can be compiled without the devices")
    path = library()
    if path is None:
        raise DeviceError(
            "the exact plan compiles for TPUs, which needs libtpu: pip install 'mesh-transformer[plan]', or name its "
            f"libtpu.so in {LIBRARY}"
        )
    request = {"config": config.to_dict(), "topology": topology.name, "remat": remat}
    environment = os.environ | {
        LIBRARY: path, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mesh_transformer.planning.compiler"], input=json.dumps(request), capture_output=True,
        text=True, env=environment, timeout=_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "RESOURCE_EXHAUSTED" in done.stderr:
            raise TooLargeError(next(line for line in done.stderr.splitlines() if "RESOURCE_EXHAUSTED" in line))
        raise DeviceError(f"the step cannot be compiled for {topology.name}: {last}")
    return _estimate(config, json.loads(done.stdout.splitlines()[-1]))


def _estimate(config: Config, found: dict[str, Any]) -> Estimate:
    """Of the peak, what the state takes is known; gradients live through most of the step, the rest comes and goes."""
    held = device_bytes(config, found["dp"])
    devices = found["dp"] * found["mp"]
    tokens = config.tokens_per_step(found["dp"])
    gathered: dict[tuple[str, str, int, int], int] = {}
    for one in found["collectives"]:
        key = (one["kind"], one["axis"], one["devices"], one["bytes"])
        gathered[key] = gathered.get(key, 0) + one["runs"]
    return Estimate(
        weights=held.weights,
        moments=held.optimizer,
        gradients=held.gradients,
        rest=found["peak"] - held.total,
        accessed=found["accessed"],
        flops=found["flops"],
        model_flops=flops_per_token(config.model) * tokens / devices,
        tokens=tokens,
        traffic=tuple(Traffic(kind, axis, n, runs, size) for (kind, axis, n, size), runs in gathered.items()),
    )
