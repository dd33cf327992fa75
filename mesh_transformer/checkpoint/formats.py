"""Which layout a step is in, and the one door through which networks and the store read and write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import inventory, manifest, orbax_files, orbax_steps, reference_v2
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.manifest import Manifest
from mesh_transformer.checkpoint.orbax_layout import FOLDER

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mesh_transformer.checkpoint.snapshot import Snapshot
    from mesh_transformer.config import Config, ModelConfig
    from mesh_transformer.state import TrainState

SHARDS, ORBAX = "shards", "orbax"  # of the config key ckpt_format
REFERENCE_V2 = "version 2 (2021)"


def format_of(step_dir: str) -> str:
    """SHARDS, ORBAX or REFERENCE_V2; SHARDS for a folder that is no step. Raises DamagedError for a bad manifest."""
    described = manifest.read(step_dir)
    if described is not None:
        return ORBAX if described.format == manifest.ORBAX else SHARDS
    if storage.exists(storage.join(step_dir, FOLDER, "_METADATA")):
        raise DamagedError(
            f"{step_dir} holds arrays of Orbax's, but no {manifest.NAME}, without which it is not complete; copy the "
            "step again, or use another"
        )
    return REFERENCE_V2 if reference_v2.is_reference(step_dir) else SHARDS


def check_installed(config: Config) -> None:
    """Raises CheckpointError where the config's layout needs a package that is missing; starts nothing."""
    if config.run.ckpt_format == ORBAX:
        orbax_files.check_installed()


def check(step_dir: str, model: ModelConfig, mesh_shards: int) -> Manifest | None:
    """A look at every file of a step, without reading arrays; returns its manifest, where it has one.

    Raises one DamagedError naming what is missing, and CheckpointError where the step is of another model.
    """
    kind = format_of(step_dir)
    if kind == REFERENCE_V2:
        reference_v2.Reference(step_dir, model).check()
        return None
    if kind == ORBAX:
        described = _described(step_dir)
        orbax_steps.check(step_dir, described, model, mesh_shards)
        return described
    found = inventory.take(step_dir, model)
    inventory.match(found, model, mesh_shards)
    return found.manifest


def read_step(
    step_dir: storage.PathLike,
    model: ModelConfig,
    mesh: Mesh,
    optimizer: bool = True,
    dtype: Any = np.float32,
    zero_stage: int = 0,
) -> TrainState:
    """A step of any layout that this project reads; options and errors as in `shards.read_step`."""
    from mesh_transformer.checkpoint import shards

    path = storage.normalise(step_dir)
    kind = format_of(path)
    if kind == REFERENCE_V2:
        return reference_v2.read_step(path, model, mesh, optimizer, dtype, zero_stage)
    if kind == ORBAX:
        return orbax_steps.read_step(path, _described(path), model, mesh, optimizer, dtype, zero_stage)
    return shards.read_step(path, model, mesh, optimizer, dtype, zero_stage)


def write_step(
    step_dir: storage.PathLike, state: TrainState, config: Config, details: Mapping[str, Any] | None = None
) -> None:
    """Writes a state as a step in the config's layout, with `details` (config, mesh, position, ...) in its manifest.

    In a run of several processes, which "orbax" alone is for, each calls this and writes its part.
    """
    from mesh_transformer.checkpoint.snapshot import snapshot

    write_snapshot(step_dir, snapshot(state), config, details or {})


def write_snapshot(step_dir: storage.PathLike, state: Snapshot, config: Config, details: Mapping[str, Any]) -> int:
    """The same for a copy of a state; its bytes."""
    if config.run.ckpt_format == ORBAX:
        orbax_steps.write_step(step_dir, state, config.model, **details)
        return state.nbytes
    from mesh_transformer.checkpoint import shards

    shards.write_step(step_dir, state, config.model, config.mesh.cores_per_replica, **details)
    return state.nbytes


def _described(step_dir: str) -> Manifest:
    found = manifest.read(step_dir)
    if found is None:
        raise DamagedError(f"{step_dir}/{manifest.NAME} is missing; copy the step again, or use another")
    return found
