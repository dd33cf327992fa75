"""Compiles the training step for a TPU topology, on a machine that has none, and reads the program.

    echo '{"config": {...}, "topology": "v5e:2x4", "remat": "dots"}' | python -m mesh_transformer.planning.compiler

prints one JSON object. It is a process of its own, since libtpu, which has the compiler, can be in one at a time and
its settings are the environment's. `exact` starts it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from mesh_transformer.planning.program import accessed_bytes, collectives, product_flops


def compile_step(request: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes, argument bytes, FLOPs, bytes accessed and collectives of one device's training step.

    Raises what the compiler raises; RESOURCE_EXHAUSTED where the program is too large for the chip.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import mesh_utils, topologies

    from mesh_transformer import fused_attention, parameters, steps
    from mesh_transformer.config import check_mesh, load_config
    from mesh_transformer.mesh import DP, MP
    from mesh_transformer.state import OptimizerState, TrainState
    from mesh_transformer.transformer_shard import Zero, train_step

    name, _, shape = request["topology"].partition(":")
    options = {"chip_config_name": "megacore"} if name == "v4" else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **options)
    config = load_config(request["config"])
    dp, mp = check_mesh(config, len(found.devices))
    devices = mesh_utils.create_device_mesh((dp, mp), list(found.devices), allow_split_physical_axes=True)
    mesh = jax.sharding.Mesh(devices, (DP, MP))
    model = dataclasses.replace(config.model, compute_dtype=config.model.compute_dtype or "bfloat16",
                                remat=request["remat"])  # fmt: skip
    zero = Zero(config.mesh.zero_stage, config.version == 2 and config.run.early_collect)
    tree = parameters.tree((k, jax.ShapeDtypeStruct(k.shape, jnp.float32)) for k in parameters.kinds(model, mp))
    count: Any = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(tree, OptimizerState(count, tree, tree, count), count)
    rows = (config.mesh.gradient_accumulation_steps, config.mesh.per_replica_batch * dp, model.seq)
    ids, mask = jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32)
    with fused_attention.compiling_for("tpu"):
        lowered = train_step(model, config.optim, mesh, zero).lower(state, steps.Batch(ids, ids, mask))
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "dp": dp,
        "mp": mp,
        "peak": memory.peak_memory_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "flops": product_flops(text),
        "accessed": accessed_bytes(text),
        "collectives": [
            {"kind": c.kind, "devices": c.group_size, "runs": c.runs, "bytes": c.bytes, "axis": _axis(c, mesh)}
            for c in collectives(text)
        ],
    }


def _axis(collective: Any, mesh: Any) -> str:
    """Which mesh axis a collective runs over, by its first group: devices that differ in one coordinate."""
    from mesh_transformer.mesh import DP, MP

    dp, mp = mesh.shape[DP], mesh.shape[MP]
    if collective.group_size == dp * mp and min(dp, mp) > 1:
        return f"{DP} and {MP}"
    return MP if len({device // mp for device in collective.first_group}) == 1 and mp > 1 else DP


def main() -> int:
    json.dump(compile_step(json.load(sys.stdin)), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
