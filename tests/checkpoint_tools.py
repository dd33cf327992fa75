"""What the checkpoint tests share: random states, and the 2021 library's layout written out once more, by hand.

`write_2021` builds the library's own nested state and lets JAX flatten it and numpy save it, so it shares nothing with
mesh_transformer.checkpoint.
"""

import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from conftest import tiny
from jax.sharding import NamedSharding

from mesh_transformer import parameters
from mesh_transformer.config import load_config
from mesh_transformer.mesh import MP, replicated
from mesh_transformer.state import OptimizerState, TrainState


def without_fsync(monkeypatch):
    """Tests of what is written, not of whether the disk has it, need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _handle: None)


def config_of(mp=1, **changes):
    return load_config(tiny(cores_per_replica=mp, **changes))


def random_tree(model, shards, seed):
    """{module: {name: whole float32 array}} of random values."""
    rng = np.random.default_rng(seed)
    return parameters.tree(
        (kind, rng.standard_normal(kind.shape).astype(np.float32)) for kind in parameters.kinds(model, shards)
    )


def place(tree, model, mesh):
    specs = parameters.specs(model, mesh.shape[MP])
    return jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), tree, specs)


def random_state(model, mesh, seed=0, full=True, counts=(7, 5, 9)):
    """A state of random values; `counts` are Adam's, the schedule's, and step."""
    shards = mesh.shape[MP]
    adam, schedule, step = (jax.device_put(np.int32(count), replicated(mesh)) for count in counts)
    params, mu, nu = (place(random_tree(model, shards, 100 * seed + i), model, mesh) for i in range(3))
    return TrainState(params, OptimizerState(adam, mu, nu, schedule) if full else None, step)


def assert_states_equal(a, b):
    """Bit for bit, in structure, type and value."""
    flat_a, tree_a = jax.tree_util.tree_flatten_with_path(a)
    flat_b, tree_b = jax.tree_util.tree_flatten_with_path(b)
    assert tree_a == tree_b
    for (path, x), (_, y) in zip(flat_a, flat_b, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype, path
        assert x.shape == y.shape, path
        assert x.tobytes() == y.tobytes(), f"{jax.tree_util.keystr(path)} differs"


# The 2021 library's names: module after the prefix, parameter, ours, and the axis that shards cut (None: copies).
_LAYER = [
    ("linear", "w", "q", 1),
    ("linear_1", "w", "v", 1),
    ("linear_2", "w", "k", 1),
    ("linear_3", "w", "o", 0),
    ("linear_4", "w", "w1", 1),
    ("linear_4", "b", "b1", 0),
    ("linear_5", "w", "w2", 0),
    ("linear_5", "b", "b2", None),
]
_NORM = {"layernorm": "replicated_layer_norm", "layernorm-nobias": "replicated_layer_norm"}
_NORM |= {"layernorm-desync": "layer_norm"}


def _norms(model, whole, layer, shard):
    group = _NORM.get(model.norm, "rms_norm")
    out = {}
    for name in ("scale", "offset"):
        if f"norm_{name}" in whole:
            array = whole[f"norm_{name}"] if layer is None else whole[f"norm_{name}"][layer]
            out[name] = array[shard] if model.norm == "layernorm-desync" else array
    return group, out


def _cut(array, axis, shard, shards):
    return array if axis is None else np.split(array, shards, axis)[shard]


def _shard_tree(model, tree, shard, shards, moment):
    """One shard's {module: {param: array}} under the library's own names."""
    prefix = "causal_transformer_shard/~/"
    whole = {module.removeprefix(prefix): group for module, group in tree.items()}
    biases = 1 if moment else shards  # every shard adds its bias, but has the moments of the whole one
    embedding, projection = whole["embedding_shard"], whole["projection_shard"]
    out = {
        "embedding_shard/~/linear": {"w": _cut(embedding["w"], 0, shard, shards), "b": embedding["b"] / biases},
        "projection_shard/~/linear": {
            "w": _cut(projection["w"], 1, shard, shards),
            "b": _cut(projection["b"], 0, shard, shards),
        },
    }
    if model.pe == "fixed":
        out["embedding_shard"] = {"pos_embs": _cut(embedding["pos_embs"], 1, shard, shards)}
    if model.pe == "t5":
        table = whole["relative_position_embs"]["rel_embedding"]
        out["relative_position_embs"] = {"rel_embedding": _cut(table, 0, shard, shards)}
    group, values = _norms(model, projection, None, shard)
    out[f"projection_shard/~/{group}"] = values
    layers = whole["transformer_layer_shard"]
    for i in range(model.layers):
        for group, name, ours, axis in _LAYER:
            part = _cut(layers[ours][i], axis, shard, shards)
            out.setdefault(f"layer_{i}/~/{group}", {})[name] = part / biases if ours == "b2" else part
        group, values = _norms(model, layers, i, shard)
        out[f"layer_{i}/~/{group}"] = values
    return {prefix + module: group for module, group in out.items()}


def write_2021(folder, model, state, shards, dtype=np.float32):
    """Write whole host arrays (a TrainState of them) as the 2021 library would."""
    for shard in range(shards):
        cast = lambda tree, moment, shard=shard: jax.tree.map(  # noqa: E731
            lambda array: array.astype(np.float32 if moment else dtype),
            _shard_tree(model, tree, shard, shards, moment),
        )
        published = {"params": cast(state.params, False), "step": np.int32(state.step)}
        if state.opt_state is not None:
            moments = [cast(tree, True) for tree in (state.opt_state.mu, state.opt_state.nu)]
            # chain(scale, clip, adam, decay, scale, by_schedule): only two of them have a state with leaves
            published["opt_state"] = [
                (),
                (),
                (np.int32(state.opt_state.count), *moments),
                (),
                (),
                (np.int32(state.opt_state.schedule_count),),
            ]
        leaves = jax.tree.leaves(published)
        os.makedirs(f"{folder}/shard_{shard}", exist_ok=True)
        for file, numbers in enumerate(np.array_split(np.arange(len(leaves)), 16)):
            np.savez(f"{folder}/shard_{shard}/{file}.npz", *[leaves[i] for i in numbers])


def read_plain(folder, shard):
    """One shard's arrays by numpy alone, in order; |V2 viewed as bfloat16."""
    out = []
    for file in range(16):
        with np.load(f"{folder}/shard_{shard}/{file}.npz") as npz:
            arrays = [npz[f"arr_{i}"] for i in range(len(npz.files))]
        out += [a.view(ml_dtypes.bfloat16) if a.dtype.kind == "V" else a for a in arrays]
    return out


def host(state):
    return jax.tree.map(np.asarray, state)


def cast_params(state, dtype):
    """The params as reading a file of `dtype` into float32 gives them."""
    cast = jax.tree.map(lambda array: jnp.asarray(np.asarray(array).astype(dtype).astype(np.float32)), state.params)
    return state._replace(params=cast)
