"""A copy of the train state in host memory, taken between two steps; training may then reuse the device's buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from mesh_transformer import parameters
from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.blocks import Blocks, Region, region_of
from mesh_transformer.errors import CheckpointError
from mesh_transformer.mesh import MP

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig
    from mesh_transformer.parameters import Kind
    from mesh_transformer.state import Params, TrainState


class Held(NamedTuple):
    """What this process holds of a tensor: whole shape, type, shape of one device's block, and the blocks it writes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    block_shape: tuple[int, ...]
    blocks: dict[Region, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """`tensors`: section -> module -> name -> `Held`; `counters`: section -> int.

    `mesh_shards` is the model-parallel size of the mesh that the state lay on.
    """

    tensors: Mapping[str, Mapping[str, Mapping[str, Held]]]
    counters: Mapping[str, int]
    mesh_shards: int

    @property
    def full(self) -> bool:
        """Whether it has the optimizer's state."""
        return layout.MU in self.tensors

    @property
    def nbytes(self) -> int:
        groups = [group for tree in self.tensors.values() for group in tree.values()]
        return sum(block.nbytes for group in groups for held in group.values() for block in held.blocks.values())

    def held(self, section: str, kind: Kind) -> Held:
        return self.tensors[section][kind.module][kind.name]

    def blocks(self, leaf: layout.StateLeaf) -> Blocks:
        if leaf.leaf is None:
            raise ValueError(f"{leaf.label} is a counter")
        return Blocks(leaf.leaf.kind, self.held(leaf.section, leaf.leaf.kind).blocks)

    def check(self, model: ModelConfig, shards: int) -> None:
        """Raises CheckpointError when the state is not the model's, or cannot be written as `shards` shards."""
        for tree in self.tensors.values():
            parameters.check_tree(tree, model, self.mesh_shards)
        if model.norm == "layernorm-desync" and shards != self.mesh_shards:
            raise CheckpointError(
                f"a state of norm 'layernorm-desync' lies on {self.mesh_shards} shards, each with its own norms; "
                f"it cannot be written as {shards}: set cores_per_replica to {self.mesh_shards}"
            )


def snapshot(state: TrainState) -> Snapshot:
    """Copies every block once (of equal copies on several devices, one); waits for the arrays to be computed."""
    trees = {layout.PARAMS: state.params}
    counters = {layout.STEP: int(state.step)}
    if state.opt_state is not None:
        trees |= {layout.MU: state.opt_state.mu, layout.NU: state.opt_state.nu}
        counters[layout.COUNT] = int(state.opt_state.count)
        counters[layout.SCHEDULE_COUNT] = int(state.opt_state.schedule_count)
    for array in jax.tree.leaves(trees):
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    tensors = {section: jax.tree.map(_copy, tree) for section, tree in trees.items()}
    return Snapshot(tensors, counters, _mesh_shards(state.params))


def _copy(array: jax.Array | np.ndarray) -> Held:
    """The blocks of this process's devices, of equal ones anywhere one, as host arrays that nothing else owns."""
    shape = tuple(np.shape(array))
    if not isinstance(array, jax.Array):
        return Held(shape, array.dtype, shape, {tuple((0, n) for n in shape): np.array(array)})
    blocks = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            # On CPU this is a view of the device's own buffer, which the next step overwrites.
            host = np.asarray(shard.data)
            blocks[region_of(shard.index, shape)] = np.array(host) if shard.device.platform == "cpu" else host
    return Held(shape, np.dtype(array.dtype), array.sharding.shard_shape(shape), blocks)


def _mesh_shards(params: Params) -> int:
    """Model-parallel size of the mesh that the parameters lie on; 1 for arrays that lie on none."""
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise CheckpointError("the state has no parameters; there is nothing to save")
    sharding = getattr(leaves[0], "sharding", None)
    return int(sharding.mesh.shape.get(MP, 1)) if isinstance(sharding, jax.sharding.NamedSharding) else 1
