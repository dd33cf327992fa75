"""Hugging Face's config.json of a GPT-J and ours, each made from the other; and which models GPT-J can express."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mesh_transformer import parameters, storage
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.huggingface_tensors import merged
from mesh_transformer.config import Config
from mesh_transformer.config_groups import ModelConfig
from mesh_transformer.errors import CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
NORM_EPSILON = 1e-5

# What this project computes wherever GPT-J has a choice; several spellings where they mean the same.
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_SIZES = {"layers": "n_layer", "d_model": "n_embd", "n_heads": "n_head", "n_vocab": "vocab_size", "seq": "n_positions",
          "pe_rotary_dims": "rotary_dim"}  # fmt: skip
# Names that transformers takes for the same.
_ALIASES = {"n_positions": "max_position_embeddings", "n_embd": "hidden_size", "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers"}  # fmt: skip


def check_expressible(config: Config) -> None:
    """Raises CheckpointError with the reason where Hugging Face's GPT-J cannot hold the config's model."""
    model = config.model
    reasons = []
    if config.version != 1:
        reasons.append(f"version is {config.version}, whose layers are built in another way")
    if model.pe != "rotary":
        reasons.append(f"pe is {model.pe!r}, and GPT-J knows positions by rotary alone")
    if model.norm != "layernorm":
        reasons.append(f"norm is {model.norm!r}, and GPT-J's is layer norm with one scale and one offset, both in use")
    homeless = [kind.path for kind in parameters.kinds(model, 1) if kind.hf_name is None and not merged(kind)]
    if homeless and not reasons:
        reasons.append(f"GPT-J has no place for {', '.join('/'.join(path) for path in homeless)}")
    if reasons:
        raise CheckpointError(
            f"this model cannot be written as Hugging Face's GPT-J: {'; '.join(reasons)}. Only models with pe 'rotary' "
            "and norm 'layernorm' can; nothing was read or written"
        )


def to_hf(model: ModelConfig, n_vocab: int, end: int | None, dtype: np.dtype, source_dtype: str) -> dict[str, Any]:
    """GPTJConfig's keys. `end`: the id that ends a text, None if not known; `source_dtype`: what the weights had."""
    return {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "vocab_size": n_vocab,
        "n_inner": None,
        "activation_function": _ACTIVATIONS[0],
        "layer_norm_epsilon": NORM_EPSILON,
        "scale_attn_weights": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": str(dtype),  # read by transformers before 5
        "dtype": str(dtype),
        "source_dtype": source_dtype,
    }


def from_hf(hf: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Our keys of the model that a GPTJConfig describes.

    Raises CheckpointError naming every key that is missing or that this project's model cannot express.
    """
    if hf.get("model_type") != "gptj":
        raise CheckpointError(f"{where}: model_type is {hf.get('model_type')!r}, expected 'gptj'")
    sizes = {ours: hf.get(theirs, hf.get(_ALIASES.get(theirs, ""))) for ours, theirs in _SIZES.items()}
    problems = [
        f"{_SIZES[ours]} is {value!r}, expected an integer"
        for ours, value in sizes.items()
        if not isinstance(value, int) or isinstance(value, bool)
    ]
    if hf.get("activation_function", _ACTIVATIONS[0]) not in _ACTIVATIONS:
        problems.append(
            f"activation_function is {hf['activation_function']!r}, expected one of {', '.join(_ACTIVATIONS)}"
        )
    if hf.get("layer_norm_epsilon", NORM_EPSILON) != NORM_EPSILON:
        problems.append(f"layer_norm_epsilon is {hf['layer_norm_epsilon']}, expected {NORM_EPSILON}")
    if not problems and hf.get("n_inner") not in (None, 4 * sizes["d_model"]):
        problems.append(f"n_inner is {hf['n_inner']}, expected null or 4 * n_embd")
    for key, wanted in (("tie_word_embeddings", False), ("scale_attn_weights", True)):
        if hf.get(key, wanted) is not wanted:
            problems.append(f"{key} is {json.dumps(hf[key])}, expected {json.dumps(wanted)}")
    if problems:
        raise CheckpointError(f"{where} is not a GPT-J that this project can hold: {'; '.join(problems)}")
    return {**sizes, "norm": "layernorm", "pe": "rotary"}


def read(folder: str) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises CheckpointError that says what the folder is instead."""
    path = storage.join(folder, CONFIG)
    try:
        body = json.loads(storage.read_bytes(path))
    except storage.StorageError as error:
        if storage.exists(path):
            raise
        raise CheckpointError(
            f"{folder} is not a Hugging Face model: it has no {CONFIG}; expected a folder with that and the weights"
        ) from error
    except ValueError as error:
        raise DamagedError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(body, dict):
        raise DamagedError(f"{path} holds {type(body).__name__}, expected an object")
    return body
