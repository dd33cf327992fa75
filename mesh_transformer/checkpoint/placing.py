"""From blocks in host memory to a train state on a mesh, whatever layout they were read from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mesh_transformer import parameters, steps
from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.blocks import Blocks, region_of
from mesh_transformer.mesh import MP, replicated
from mesh_transformer.optimizer import init as fresh_moments
from mesh_transformer.parameters import Kind
from mesh_transformer.state import OptimizerState, Params, TrainState

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig

logger = logging.getLogger(__name__)

Trees = dict[str, dict[str, dict[str, jax.Array]]]


class Target:
    """The blocks of one kind that this process's devices hold: to be filled, then placed."""

    def __init__(self, kind: Kind, sharding: NamedSharding, dtype: np.dtype) -> None:
        self._sharding = sharding
        self._devices = {
            device: region_of(index or (), kind.shape)
            for device, index in sharding.addressable_devices_indices_map(kind.shape).items()
        }
        self.blocks = Blocks(kind, {
            region: np.empty([stop - start for start, stop in region], dtype) for region in set(self._devices.values())
        })  # fmt: skip

    def place(self) -> jax.Array:
        """All of the kind as one array; the blocks are gone afterwards."""
        arrays: dict[jax.Device, jax.Array] = {}
        blocks = self.blocks.blocks
        for region in sorted(blocks):
            block = blocks.pop(region)
            arrays |= {device: jax.device_put(block, device) for device, at in self._devices.items() if at == region}
            jax.block_until_ready(list(arrays.values()))
        shape = self.blocks.kind.shape
        placed = [arrays[device] for device in self._devices]
        return jax.make_array_from_single_device_arrays(shape, self._sharding, placed)


def place_all(
    fill: Callable[[str, Kind, Blocks], None], sections: Sequence[str], model: ModelConfig, mesh: Mesh, dtype: np.dtype,
    zero_stage: int,
) -> Trees:  # fmt: skip
    """The tensors of these sections, each with the values that `fill(section, kind, blocks)` puts into its blocks.

    `dtype`: of the parameters; moments are float32. `zero_stage`: see `parameters.storage_specs`.
    """
    kinds = parameters.kinds(model, int(mesh.shape[MP]))
    wanted = [(section, kind) for section in sections for kind in kinds]
    # Largest first: the extra memory of a kind's blocks then falls into the time when most arrays are still to come.
    wanted.sort(key=lambda item: -int(np.prod(item[1].shape, dtype=np.int64)))
    done: dict[tuple[str, tuple[str, str]], jax.Array] = {}
    for section, kind in wanted:
        over_replicas = zero_stage == 3 or (zero_stage == 1 and section != layout.PARAMS)
        sharding = NamedSharding(mesh, kind.spec(over_replicas))
        target = Target(kind, sharding, dtype if section == layout.PARAMS else np.dtype(np.float32))
        fill(section, kind, target.blocks)
        done[section, kind.path] = target.place()
    return {section: parameters.tree((kind, done[section, kind.path]) for kind in kinds) for section in sections}


def to_state(
    path: str, trees: Trees, counters: Mapping[str, int], optimizer: bool, model: ModelConfig, mesh: Mesh,
    zero_stage: int,
) -> TrainState:  # fmt: skip
    """The state of placed tensors; with `optimizer`, where none were read, a fresh one, said in the log with `path`."""

    def scalar(section: str) -> jax.Array:
        placed: jax.Array = steps.place(mesh, jax.sharding.PartitionSpec(), np.int32(counters[section]))
        return placed

    params, opt_state = trees[layout.PARAMS], None
    if optimizer and layout.MU in trees:
        moments = trees[layout.MU], trees[layout.NU]
        opt_state = OptimizerState(scalar(layout.COUNT), *moments, scalar(layout.SCHEDULE_COUNT))
    elif optimizer:
        logger.warning("%s is slim: it holds no optimizer state, so Adam starts fresh", path)
        opt_state = _fresh_optimizer(params, model, mesh, zero_stage)
    return TrainState(params, opt_state, scalar(layout.STEP))


def _fresh_optimizer(params: Params, model: ModelConfig, mesh: Mesh, zero_stage: int) -> OptimizerState:
    """Zero moments, placed as the stage wants them."""
    specs = parameters.storage_specs(model, int(mesh.shape[MP]), zero_stage, moments=True)
    placed: Any = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
    counter: Any = replicated(mesh)
    fresh: OptimizerState = jax.jit(fresh_moments, out_shardings=OptimizerState(counter, placed, placed, counter))(
        params
    )
    return fresh


def _is_spec(x: Any) -> bool:
    return isinstance(x, jax.sharding.PartitionSpec)
