"""Compiles a step for a TPU topology, on a machine that has none, and reads the program.

    echo '{"config": {...}, "topology": "v5e:2x4", "task": "train", "remat": "dots"}' \
        | python -m mesh_transformer.planning.compiler

prints one JSON object. It is a process of its own, since libtpu, which has the compiler, can be in one at a time and
its settings are the environment's. `exact` starts it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh_transformer.planning.accessed import accessed_bytes
from mesh_transformer.planning.footprint import gathers_all
from mesh_transformer.planning.program import collectives, product_flops, stacked_bytes

if TYPE_CHECKING:
    from mesh_transformer.config import Config, ModelConfig

PROMPT = 512  # tokens of a prompt that generation reads at once


def compile_step(request: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes, argument bytes, FLOPs, bytes accessed and collectives of one device's step.

    Of a generation the step is one token of every row; its peak is that of the step, or of reading a prompt.
    Raises what the compiler raises; RESOURCE_EXHAUSTED where the program is too large for the chip.
    """
    from mesh_transformer import weight_products
    from mesh_transformer.config import load_config

    config = load_config(request["config"])
    mesh = _mesh(config, request["topology"])
    model = dataclasses.replace(config.model, compute_dtype=config.model.compute_dtype or "bfloat16",
                                remat=request["remat"])  # fmt: skip
    with weight_products.compiling_for("tpu"):
        programs = [lowered.compile() for lowered in _TASKS[request["task"]](config, model, mesh)]
    return read(programs[0], config, mesh, request["task"]) | {"peak": max(_peak(program) for program in programs)}


def read(compiled: Any, config: Config, mesh: Any, task: str) -> dict[str, Any]:
    """What a compiled step says of itself. `kept`: from the forward pass to the backward pass; `copies`: weights in the
    compute dtype, which XLA makes once a step where it can.

    Of a generation a step is one round of its loop over tokens, whose length no program knows: what two rounds take
    less what one takes. Weights that are laid out anew before the loop are not in it.
    """
    from mesh_transformer import parameters
    from mesh_transformer.mesh import DP, MP

    dp, mp = mesh.shape[DP], mesh.shape[MP]
    text = compiled.as_text()
    layers = [kind for kind in parameters.kinds(config.model, mp) if kind.stacked]
    cuts = [1, dp] if config.mesh.zero_stage == 3 and dp > 1 else [1]
    if gathers_all(config, dp):
        cuts.append(1)  # gradients of what is gathered
    shapes = [kind.local_shape(mp, parts) for kind in layers for parts in cuts]
    kept, copies = stacked_bytes(text, config.model.layers, shapes)
    rounds = (1, 2) if task == "generate" else (0, 1)

    def of_a_step(count: Callable[[str, float], float]) -> float:
        return count(text, rounds[1]) - (count(text, rounds[0]) if rounds[0] else 0)

    fewer = [each.runs for each in collectives(text, rounds[0])] if rounds[0] else itertools.repeat(0)
    return {
        "dp": dp,
        "mp": mp,
        "peak": _peak(compiled),
        "arguments": compiled.memory_analysis().argument_size_in_bytes,
        "kept": kept,
        "copies": copies,
        "flops": of_a_step(product_flops),
        "accessed": of_a_step(accessed_bytes),
        "collectives": [
            {"kind": c.kind, "devices": c.group_size, "runs": c.runs - less, "bytes": c.bytes, "axis": _axis(c, dp, mp)}
            for c, less in zip(collectives(text, rounds[1]), fewer, strict=False)
            if c.runs > less
        ],
    }


def _peak(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    found = int(memory.peak_memory_in_bytes)
    # A platform that reports no peak (some CPU builds): arguments and temporaries, of which the peak is at most.
    return found or int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)


def _mesh(config: Config, topology: str) -> Any:
    import jax
    from jax.experimental import mesh_utils, topologies

    from mesh_transformer.config import check_mesh
    from mesh_transformer.mesh import DP, MP

    name, _, shape = topology.partition(":")
    options: dict[str, Any] = {"chip_config_name": "megacore"} if name == "v4" else {}
    if math.prod(int(n) for n in shape.split("x")) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    dp, mp = check_mesh(config, len(found.devices))
    devices = mesh_utils.create_device_mesh((dp, mp), list(found.devices), allow_split_physical_axes=True)
    return jax.sharding.Mesh(devices, (DP, MP))


def _train(config: Config, model: ModelConfig, mesh: Any) -> list[Any]:
    """The very step that trains."""
    import jax
    import jax.numpy as jnp

    from mesh_transformer import parameters, steps
    from mesh_transformer.mesh import DP, MP
    from mesh_transformer.state import OptimizerState, TrainState
    from mesh_transformer.transformer_shard import Zero, train_step

    zero = Zero(config.mesh.zero_stage, config.version == 2 and config.run.early_collect)
    kinds = parameters.kinds(model, mesh.shape[MP])
    tree = parameters.tree((kind, jax.ShapeDtypeStruct(kind.shape, jnp.float32)) for kind in kinds)
    count: Any = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(tree, OptimizerState(count, tree, tree, count), count)
    rows = (config.mesh.gradient_accumulation_steps, config.mesh.per_replica_batch * mesh.shape[DP], model.seq)
    ids, mask = jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32)
    return [train_step(model, config.optim, mesh, zero).lower(state, steps.Batch(ids, ids, mask))]


def _eval(config: Config, model: ModelConfig, mesh: Any) -> list[Any]:
    """The step that scores, on weights as `inference` loads them: in the compute dtype, whole on every replica."""
    import jax
    import jax.numpy as jnp

    from mesh_transformer import parameters
    from mesh_transformer.mesh import DP, MP
    from mesh_transformer.transformer_shard import eval_step

    dtype = jnp.dtype(model.compute_dtype)
    kinds = parameters.kinds(model, mesh.shape[MP])
    params = parameters.tree((kind, jax.ShapeDtypeStruct(kind.shape, dtype)) for kind in kinds)
    rows = config.mesh.per_replica_batch * mesh.shape[DP]
    ids, length = jax.ShapeDtypeStruct((rows, model.seq), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    return [eval_step(model, mesh).lower(params, ids, ids, length)]


def _generate(config: Config, model: ModelConfig, mesh: Any) -> list[Any]:
    """The token loop on a cache of the whole context, and the prefill of a prompt into it."""
    import jax
    import jax.numpy as jnp

    from mesh_transformer import decoder_weights, decoding, parameters
    from mesh_transformer.mesh import DP, MP
    from mesh_transformer.sampler import PLAIN, Sampler

    dtype, rows = jnp.dtype(model.compute_dtype), config.mesh.per_replica_batch * mesh.shape[DP]

    def shaped(spec: Any, shape: tuple[int, ...], of: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, of, sharding=jax.sharding.NamedSharding(mesh, spec))

    placed = decoder_weights.specs(model, mesh).params
    weights = decoder_weights.Weights(
        parameters.tree(
            (kind, shaped(placed[kind.module][kind.name], kind.shape, dtype))
            for kind in parameters.kinds(model, mesh.shape[MP])
        ),
        None,
    )
    heads = decoder_weights.cache_heads(model, mesh.shape[MP])
    cache = shaped(decoder_weights.cache_spec(mesh),
                   (model.layers, rows, heads, model.seq, model.attention_width), dtype)  # fmt: skip
    row = jax.sharding.PartitionSpec(DP)
    ids, floats = shaped(row, (rows,)), shaped(row, (rows,), jnp.float32)
    stop = shaped(row, (rows, 1))
    sampler = Sampler(floats, floats, ids, floats, shaped(row, (rows, 2), jnp.uint32))
    state = decoding.Rows(cache, cache, ids, ids, ids, ids, ids, stop, sampler, None)
    prompts = decoding.Prompts(shaped(row, (rows, min(PROMPT, model.seq))), ids, ids, stop, sampler)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    step, prefill = decoding.decode_steps(model, mesh, PLAIN), decoding.prefill_step(model, mesh, model.seq, PLAIN)
    return [
        jax.jit(step, donate_argnums=1).lower(weights, state, number, number),
        jax.jit(prefill).lower(weights, prompts, number),
    ]


_TASKS = {"train": _train, "eval": _eval, "generate": _generate}


def _axis(collective: Any, dp: int, mp: int) -> str:
    """Which mesh axis a collective runs over, by its first group: devices that differ in one coordinate."""
    from mesh_transformer.mesh import DP, MP

    if collective.group_size == dp * mp and min(dp, mp) > 1:
        return f"{DP} and {MP}"
    return MP if len({device // mp for device in collective.first_group}) == 1 and mp > 1 else DP


def main() -> int:
    json.dump(compile_step(json.load(sys.stdin)), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
