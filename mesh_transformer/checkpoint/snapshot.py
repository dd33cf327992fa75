"""A copy of the train state in host memory, taken between two steps; training may then reuse the device's buffers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import numpy as np

from mesh_transformer import parameters
from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.blocks import Blocks, region_of
from mesh_transformer.errors import CheckpointError
from mesh_transformer.mesh import MP

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig
    from mesh_transformer.state import Params, TrainState


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """`tensors`: (section, module, name) -> blocks of whole tensors; `counters`: section -> int."""

    tensors: dict[tuple[str, str, str], Blocks]
    counters: dict[str, int]
    full: bool

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for tensor in self.tensors.values() for block in tensor.blocks.values())

    def blocks(self, leaf: layout.StateLeaf) -> Blocks:
        if leaf.leaf is None:
            raise ValueError(f"{leaf.label} is a counter")
        return self.tensors[leaf.section, *leaf.leaf.kind.path]


def snapshot(state: TrainState, model: ModelConfig) -> Snapshot:
    """Copies every block once (of equal copies on several devices, one); waits for the arrays to be computed.

    Raises CheckpointError listing leaves that do not fit the model.
    """
    shards = _mesh_shards(state.params)
    kinds = {kind.path: kind for kind in parameters.kinds(model, shards)}
    trees = {layout.PARAMS: state.params}
    counters = {layout.STEP: int(state.step)}
    if state.opt_state is not None:
        trees |= {layout.MU: state.opt_state.mu, layout.NU: state.opt_state.nu}
        counters[layout.COUNT] = int(state.opt_state.count)
        counters[layout.SCHEDULE_COUNT] = int(state.opt_state.schedule_count)
    for tree in trees.values():
        parameters.check_tree(tree, model, shards)
    for tree in trees.values():
        for array in jax.tree.leaves(tree):
            if isinstance(array, jax.Array):
                array.copy_to_host_async()
    tensors = {
        (section, module, name): Blocks(kinds[module, name], _copy(array))
        for section, tree in trees.items()
        for module, group in tree.items()
        for name, array in group.items()
    }
    return Snapshot(tensors, counters, state.opt_state is not None)


def _copy(array: jax.Array | np.ndarray) -> dict[tuple[tuple[int, int], ...], np.ndarray]:
    """The distinct blocks of this process's devices, as host arrays that nothing else owns."""
    if not isinstance(array, jax.Array):
        return {tuple((0, n) for n in np.shape(array)): np.array(array)}
    blocks = {}
    for shard in array.addressable_shards:
        region = region_of(shard.index, array.shape)
        if region not in blocks:
            # On CPU this is a view of the device's own buffer, which the next step overwrites.
            host = np.asarray(shard.data)
            blocks[region] = np.array(host) if shard.device.platform == "cpu" else host
    return blocks


def _mesh_shards(params: Params) -> int:
    """Model-parallel size of the mesh that the parameters lie on; 1 for arrays that lie on none."""
    for array in jax.tree.leaves(params):
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            return int(sharding.mesh.shape.get(MP, 1))
    if not jax.tree.leaves(params):
        raise CheckpointError("the state has no parameters; there is nothing to save")
    return 1
