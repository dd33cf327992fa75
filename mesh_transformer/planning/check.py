"""Before a run starts: refuse what cannot fit, by arithmetic, with what would help."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Protocol

from mesh_transformer.config import Config
from mesh_transformer.errors import ConfigError
from mesh_transformer.planning import report
from mesh_transformer.planning.analytic import analytic
from mesh_transformer.planning.chips import CHIPS, Topology, chip_of, size

logger = logging.getLogger(__name__)

# What arithmetic may be wrong by: a step is refused only where it would be too large even so.
MARGIN = 1.1


class Device(Protocol):
    """What is asked of a `jax.Device`."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    def memory_stats(self) -> Mapping[str, int] | None: ...


def device_memory(device: Device, local: int) -> int | None:
    """Bytes that a program gets of a device, one of this machine's `local`, if it says so; else None."""
    return simulated_memory(local) if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")


def simulated_memory(devices: int) -> int | None:
    """Bytes that each of `devices` simulated devices of this machine gets: they share its memory."""
    memory = _machine_memory()
    return memory // devices if memory else None


def check_memory(config: Config, device_kind: str, devices: int, memory: int | None = None) -> None:
    """Raises ConfigError where the training step of `config` cannot fit `devices` devices; logs a warning where it is
    close. memory: bytes of each, by default what the table of chips says of `device_kind`; where neither is known,
    nothing is checked.
    """
    known = chip_of(device_kind)
    limit = memory or (known.usable if known else None)
    if limit is None:
        return
    chip = known or CHIPS["cpu" if device_kind.lower() == "cpu" else "h100"]
    found = Topology(dataclasses.replace(chip, usable=float(limit), memory=float(limit)), devices, ())
    remats = ("full",) if config.model.remat == "auto" else (config.model.remat,)
    estimate = analytic(config, found, remats[0])
    takes = (
        f"a training step takes about {size(estimate.peak)} on a device (weights, moments and gradients "
        f"{size(estimate.state)}, the rest with remat {estimate.remat}), of {size(limit)} that it has"
    )
    if estimate.peak > MARGIN * limit:
        raise ConfigError(
            f"{config.source or 'config'}: {takes}; {report.advice(config, found)}; scripts/plan.py --search finds "
            "what fits, --no-plan starts all the same"
        )
    if estimate.peak > limit / MARGIN:
        logger.warning("%s: it may not fit", takes)


def _machine_memory() -> int | None:
    """Bytes of this machine's memory, or of the container's limit where that is smaller."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            allowed = file.read().strip()
    except OSError:
        return total
    return min(total, int(allowed)) if allowed.isdigit() else total
