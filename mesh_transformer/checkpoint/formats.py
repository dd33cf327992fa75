"""Which layout a step is in, and the one door through which networks read and write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from mesh_transformer import storage
from mesh_transformer.checkpoint import reference_v2, shards
from mesh_transformer.checkpoint.snapshot import snapshot

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mesh_transformer.config import Config, ModelConfig
    from mesh_transformer.state import TrainState


def read_step(
    step_dir: storage.PathLike,
    model: ModelConfig,
    mesh: Mesh,
    optimizer: bool = True,
    dtype: Any = jnp.float32,
    zero_stage: int = 0,
) -> TrainState:
    """A step of any layout that this project reads; options and errors as in `shards.read_step`."""
    path = storage.normalise(step_dir)
    read = reference_v2.read_step if reference_v2.is_reference(path) else shards.read_step
    return read(path, model, mesh, optimizer, dtype, zero_stage)


def write_step(step_dir: storage.PathLike, state: TrainState, config: Config, **details: Any) -> None:
    """Writes a state as a step in the config's layout, with `details` in its manifest."""
    shards.write_step(step_dir, snapshot(state), config.model, config.mesh.cores_per_replica, **details)
