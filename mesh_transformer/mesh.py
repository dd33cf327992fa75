"""The device mesh: axis names, simulated devices, and what platform this is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mesh_transformer.errors import DeviceError

if TYPE_CHECKING:
    from mesh_transformer.config import Config

# The 2021 library called these axes "batch" and "shard" in xmap, "dp" and "mp" in its mesh; here they have one name.
DP = "dp"
MP = "mp"

PLATFORMS = ("cpu", "gpu", "tpu")


def choose_platform(platform: str | None, devices: int | None = None) -> None:
    """Keeps JAX on the CPU when `platform` is "cpu", with `devices` simulated devices; call it before JAX is used.

    Other platforms are what JAX finds by itself; `find_devices` checks what it found. Raises DeviceError for an
    unknown name.
    """
    if platform is not None and platform not in PLATFORMS:
        raise DeviceError(f"platform {platform!r} is unknown: choose one of {', '.join(PLATFORMS)}")
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        if devices:
            simulate_devices(devices)


def simulate_devices(count: int) -> None:
    """Makes the CPU appear as `count` devices; raises DeviceError when JAX has already started with fewer."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if len(jax.devices("cpu")) < count:
            found = len(jax.devices("cpu"))
            raise DeviceError(f"{count} simulated devices were asked for after JAX started with {found}") from error


def find_devices(platform: str | None = None, count: int | None = None) -> list[jax.Device]:
    """The first `count` devices (default all). Raises DeviceError when the platform or the number is not there."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        wanted = platform or os.environ.get("JAX_PLATFORMS", "the one found first")
        raise DeviceError(f"platform {wanted!r} was asked for, but JAX cannot start it: {error}") from error
    kind = devices[0].platform
    if platform is not None and kind != platform:
        raise DeviceError(
            f"platform {platform!r} was asked for, but JAX found {kind!r} ({devices[0].device_kind}): "
            f"install the jax build for {platform}, or pass --platform {kind}"
        )
    if count is not None and count > len(devices):
        remedy = "pass --platform cpu to simulate more" if kind == "cpu" else "lower --devices"
        raise DeviceError(f"--devices {count} was asked for, but {len(devices)} {kind} devices were found: {remedy}")
    return devices[:count]


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The (dp, mp) mesh over `devices` (default: all of them), mp = cores_per_replica.

    Neighbouring devices share a replica, since `mp` communicates in every layer and `dp` once a step.
    Raises ConfigError when the number of devices is not a multiple of `cores_per_replica`.
    """
    from mesh_transformer.config import check_mesh

    found = find_devices() if devices is None else list(devices)
    dp, mp = check_mesh(config, len(found))
    if config.mesh.zero_stage and len(found) > 1 and found[0].platform == "cpu":
        # XLA runs a program from the cache without the order of its collectives, which ZeRO has several of at a time:
        # on CPU they then meet the wrong partners, and the process aborts or waits for ever.
        jax.config.update("jax_enable_compilation_cache", False)
    if found[0].platform == "tpu":
        from jax.experimental import mesh_utils  # topology-aware order; public, though under experimental

        grid = mesh_utils.create_device_mesh((dp, mp), found, allow_split_physical_axes=True)
    else:
        grid = np.asarray(found).reshape(dp, mp)
    return Mesh(grid, (DP, MP))


def describe(mesh: Mesh) -> str:
    """One line for people: platform, device kind, count and mesh."""
    device = mesh.devices.flat[0]
    return (
        f"{mesh.size} {device.platform} devices ({device.device_kind}), mesh dp {mesh.shape[DP]} x mp {mesh.shape[MP]}"
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Placement of a value that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())
