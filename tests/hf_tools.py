"""What the tests of Hugging Face's form share: its tensors worked out by hand, and a plain reader of its files.

Neither reads the table of parameters or anything of mesh_transformer.checkpoint, so they can contradict both.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from checkpoint_tools import config_of, write_2021

from mesh_transformer import parameters
from mesh_transformer.state import TrainState

PREFIX = "causal_transformer_shard/~/"
EMBEDDING, LAYERS, PROJECTION = (PREFIX + n for n in ("embedding_shard", "transformer_layer_shard", "projection_shard"))
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_MATRICES = {
    "q": "attn.q_proj.weight", "k": "attn.k_proj.weight", "v": "attn.v_proj.weight", "o": "attn.out_proj.weight",
    "w1": "mlp.fc_in.weight", "w2": "mlp.fc_out.weight",
}  # fmt: skip
_VECTORS = {"b1": "mlp.fc_in.bias", "b2": "mlp.fc_out.bias", "norm_scale": "ln_1.weight", "norm_offset": "ln_1.bias"}


def random_tree(model, seed=0, bias=True):
    """Whole parameters whose biases, offsets and scales all matter; logits are of size 1. `bias`: of the embedding."""
    random = np.random.default_rng(seed)
    values = [
        (kind, ((kind.init if not kind.random else 0) + 0.2 * random.normal(size=kind.shape)).astype(np.float32))
        for kind in parameters.kinds(model, 1)
    ]
    tree = parameters.tree(values)
    # Greedy tokens then depend on the text, not on the biases alone, however deep the model.
    tree[EMBEDDING]["w"] *= 5
    for name in ("o", "w2", "b2"):
        tree[LAYERS][name] *= 2 / max(2, model.layers)
    if not bias:
        tree[EMBEDDING]["b"][:] = 0
    return tree


def write_step(folder, shards=1, dtype=np.float32, seed=0, bias=True, full=False, step=7, **sizes):
    """(config, tree) of a checkpoint that the 2021 library could have written, with `shards` shards."""
    config = config_of(shards, **sizes)
    tree = random_tree(config.model, seed, bias)
    opt_state = None
    if full:
        from mesh_transformer.state import OptimizerState

        opt_state = OptimizerState(3, random_tree(config.model, seed + 1), random_tree(config.model, seed + 2), 3)
    write_2021(str(folder), config.model, TrainState(tree, opt_state, step), shards, dtype)
    return config, tree


def hf_tensors(tree):
    """{name: float32 array} that GPTJForCausalLM has for these parameters."""
    embedding, layers, head = tree[EMBEDDING], tree[LAYERS], tree[PROJECTION]
    out = {
        "transformer.wte.weight": embedding["w"] + embedding["b"][None, :],
        "transformer.ln_f.weight": head["norm_scale"],
        "transformer.ln_f.bias": head["norm_offset"],
        "lm_head.weight": head["w"].T,
        "lm_head.bias": head["b"],
    }
    for i in range(len(layers["q"])):
        out |= {f"transformer.h.{i}.{name}": layers[ours][i].T for ours, name in _MATRICES.items()}
        out |= {f"transformer.h.{i}.{name}": layers[ours][i] for ours, name in _VECTORS.items()}
    return out


def read_file(path):
    """({name: array}, metadata) of one safetensors file."""
    content = Path(path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__", {})
    tensors = {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
    return tensors, metadata


def read_folder(folder):
    """{name: array} of all files of an exported model."""
    out = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        out |= read_file(path)[0]
    return out


def write_file(path, tensors, **metadata):
    """A safetensors file of these arrays."""
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items()} | {np.dtype(np.uint8): "U8"}
    header, at = {"__metadata__": {"format": "pt", **metadata}}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]
        }  # fmt: skip
        at += array.nbytes
    text = json.dumps(header).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + body)
