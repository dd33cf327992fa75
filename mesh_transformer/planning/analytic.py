"""The plan by arithmetic alone: no compiler, no devices, nothing heavy imported, a millisecond a config."""

from __future__ import annotations

import dataclasses

from mesh_transformer.config import Config, check_mesh
from mesh_transformer.config_report import BF16, F32, device_bytes
from mesh_transformer.planning.accesses import accesses_of
from mesh_transformer.planning.arithmetic import flops_of
from mesh_transformer.planning.chips import Topology
from mesh_transformer.planning.estimate import Estimate
from mesh_transformer.planning.footprint import accumulated_bytes, footprint_of
from mesh_transformer.planning.traffic import traffic_of
from mesh_transformer.training.throughput import flops_per_token


def compute_dtype(config: Config, topology: Topology) -> str:
    """The type of matrix products: the config's, or the platform's."""
    return config.model.compute_dtype or ("float32" if topology.chip.name == "cpu" else "bfloat16")


def analytic(config: Config, topology: Topology, remat: str, task: str = "train") -> Estimate:
    """The estimate of one step of `task` with `remat`. Raises ConfigError where the mesh does not fit."""
    dp, mp = check_mesh(config, topology.devices)
    dtype = compute_dtype(config, topology)
    width = F32 if dtype == "float32" else BF16
    model, mesh = config.model, config.mesh
    if task != "train":  # weights alone, whole on every replica, as `inference` loads them
        config = dataclasses.replace(config, mesh=dataclasses.replace(mesh, zero_stage=0))
    held = device_bytes(config, dp)
    training = task == "train"
    rows = mesh.per_replica_batch * dp
    tokens = config.tokens_per_step(dp) if training else rows * model.seq if task == "eval" else rows
    cache = 2 * model.layers * mesh.per_replica_batch * model.seq * model.d_attention * width // mp
    part = Estimate(
        task=task, exact=False, remat=remat, dp=dp, mp=mp, peak=0,
        weights=held.weights if training else held.weights * width // F32,
        moments=held.optimizer if training else 0,
        gradients=held.gradients + accumulated_bytes(config, dp) if training else 0,
        cache=cache if task == "generate" else 0,
        copies=0, activations=0,
        accessed=accesses_of(config, topology, dp, task, remat, width),
        flops=flops_of(config, dp, task, remat),
        model_flops=flops_per_token(model) * tokens / (dp * mp) / (1 if training else 3),
        tokens=tokens,
        traffic=traffic_of(config, dp, task, width),
    )  # fmt: skip
    found = footprint_of(config, topology, dp, task, remat, width)
    return dataclasses.replace(
        part, copies=found.copies, activations=found.activations,
        peak=part.state + found.copies + found.activations + found.temporaries,
    )  # fmt: skip
