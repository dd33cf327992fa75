"""One of several processes that together write a step of "orbax", and read it again; see test_checkpoint_processes.py.

python tests/orbax_process.py COORDINATOR COUNT NUMBER FOLDER
"""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from mesh_transformer import parameters, steps  # noqa: E402
from mesh_transformer.checkpoint import formats  # noqa: E402
from mesh_transformer.config import load_config  # noqa: E402
from mesh_transformer.state import OptimizerState, TrainState  # noqa: E402

CONFIG = {
    "version": 2, "layers": 2, "d_model": 32, "n_heads": 8, "n_vocab": 64, "seq": 16, "d_head": 6, "total_steps": 9,
    "train_set": "none", "cores_per_replica": 4,
}  # fmt: skip
STAGE = 3


def values(model, seed):
    """{module: {name: array}}, the same in every process."""
    rng = np.random.default_rng(seed)
    return parameters.tree(
        (kind, rng.standard_normal(kind.shape).astype(np.float32)) for kind in parameters.kinds(model, 1)
    )


def made_state(model, mesh, stage):
    placed = [
        steps.place(mesh, parameters.storage_specs(model, mesh.shape["mp"], stage, bool(seed)), values(model, seed))
        for seed in range(3)
    ]
    counts = [steps.place(mesh, jax.sharding.PartitionSpec(), np.int32(n)) for n in (7, 5, 9)]
    return TrainState(placed[0], OptimizerState(counts[0], placed[1], placed[2], counts[1]), counts[2])


def check(model, state):
    """Every block that this process holds is what it should be."""
    trees = (state.params, state.opt_state.mu, state.opt_state.nu)
    for seed, tree in enumerate(trees):
        for array, whole in zip(jax.tree.leaves(tree), jax.tree.leaves(values(model, seed)), strict=True):
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index])
    counts = (state.opt_state.count, state.opt_state.schedule_count, state.step)
    assert [int(count.addressable_shards[0].data) for count in counts] == [7, 5, 9]


def main():
    coordinator, count, number, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // count)
    jax.distributed.initialize(coordinator, count, number, initialization_timeout=120)
    config = load_config(CONFIG)
    devices = np.asarray(jax.devices())
    two_by_four, one_by_eight = (jax.sharding.Mesh(devices.reshape(s), ("dp", "mp")) for s in ((2, 4), (1, 8)))
    details = {"step": 9, "config": config.to_dict()}
    state = made_state(config.model, two_by_four, STAGE)
    formats.write_step(f"{folder}/step_9", state, config, details)
    check(config.model, formats.read_step(f"{folder}/step_9", config.model, one_by_eight, zero_stage=0))
    check(config.model, formats.read_step(f"{folder}/step_9", config.model, two_by_four, zero_stage=1))
    if Path(f"{folder}/alone").exists():  # written by a single process
        check(config.model, formats.read_step(f"{folder}/alone/step_9", config.model, two_by_four, zero_stage=STAGE))
    print("process", number, "is done", flush=True)


if __name__ == "__main__":
    main()
