"""A copy of the train state in host memory, taken between two steps; training may then reuse the device's buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mesh_transformer import parameters
from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.blocks import Blocks, Region, region_of
from mesh_transformer.errors import CheckpointError
from mesh_transformer.mesh import DP, MP

if TYPE_CHECKING:
    from jax.sharding import Mesh

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

    `mesh_shards` is the model-parallel size of the mesh that the state lay on; `own_shards` those of the published
    layout that this process is to write, None where it holds no choice of them.
    """

    tensors: Mapping[str, Mapping[str, Mapping[str, Held]]]
    counters: Mapping[str, int]
    mesh_shards: int
    own_shards: tuple[int, ...] | None = None

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


def snapshot(state: TrainState, by_shard: bool = False) -> Snapshot:
    """Copies every block once (of equal copies on several devices, one); waits for the arrays to be computed.

    by_shard: of several processes, each copies the whole shards that `writers` gives it, and those that ZeRO cuts are
    gathered first, one array at a time; else each copies the blocks of its devices that no process before it has.
    """
    trees = {layout.PARAMS: state.params}
    counters = {layout.STEP: int(state.step)}
    if state.opt_state is not None:
        trees |= {layout.MU: state.opt_state.mu, layout.NU: state.opt_state.nu}
        counters[layout.COUNT] = int(state.opt_state.count)
        counters[layout.SCHEDULE_COUNT] = int(state.opt_state.schedule_count)
    shards, own = _mesh_shards(state.params), None
    if by_shard and jax.process_count() > 1:
        mesh = jax.tree.leaves(state.params)[0].sharding.mesh
        own = tuple(m for m, process in enumerate(writers(mesh)) if process == jax.process_index())
        tensors = {section: jax.tree.map(lambda x: _copy_shards(x, mesh, own), tree) for section, tree in trees.items()}
        return Snapshot(tensors, counters, shards, own)
    for array in jax.tree.leaves(trees):
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    return Snapshot({section: jax.tree.map(_copy, tree) for section, tree in trees.items()}, counters, shards)


def writers(mesh: Mesh) -> list[int]:
    """The process that writes each shard: of those that hold it, another for each."""
    found = []
    for shard in range(int(mesh.shape[MP])):
        column = np.take(mesh.devices, shard, axis=mesh.axis_names.index(MP))
        holders = sorted({device.process_index for device in column.flat})
        found.append(holders[shard % len(holders)])
    return found


def _copy(array: jax.Array | np.ndarray) -> Held:
    """The blocks of this process's devices, of equal ones anywhere one, as host arrays that nothing else owns."""
    shape = tuple(np.shape(array))
    if not isinstance(array, jax.Array):
        return Held(shape, array.dtype, shape, {tuple((0, n) for n in shape): np.array(array)})
    blocks = {region_of(each.index, shape): _host(each) for each in array.addressable_shards if each.replica_id == 0}
    return Held(shape, np.dtype(array.dtype), array.sharding.shard_shape(shape), blocks)


def _copy_shards(array: jax.Array, mesh: Mesh, own: tuple[int, ...]) -> Held:
    """The blocks of the shards `own`, whole over replicas."""
    sharding: Any = array.sharding
    spec = sharding.spec
    if DP in spec:
        array = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*(a if a != DP else None for a in spec))))
    at = mesh.axis_names.index(MP)
    shape, blocks = tuple(array.shape), {}
    for each in array.addressable_shards:
        region = region_of(each.index, shape)
        if region not in blocks and (np.argwhere(mesh.devices == each.device)[0][at] in own or MP not in spec):
            blocks[region] = _host(each)
    return Held(shape, np.dtype(array.dtype), array.sharding.shard_shape(shape), blocks if own else {})


def _host(shard: jax.Shard) -> np.ndarray:
    host = np.asarray(shard.data)
    # On CPU this is a view of the device's own buffer, which the next step overwrites.
    return np.array(host) if shard.device.platform == "cpu" else host


def _mesh_shards(params: Params) -> int:
    """Model-parallel size of the mesh that the parameters lie on; 1 for arrays that lie on none."""
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise CheckpointError("the state has no parameters; there is nothing to save")
    sharding = getattr(leaves[0], "sharding", None)
    return int(sharding.mesh.shape.get(MP, 1)) if isinstance(sharding, jax.sharding.NamedSharding) else 1
