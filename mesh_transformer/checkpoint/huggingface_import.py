"""A Hugging Face GPT-J as a slim checkpoint of the published layout, with a config that trains and samples from it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mesh_transformer import parameters, storage
from mesh_transformer.checkpoint import huggingface_config, huggingface_tensors, layout
from mesh_transformer.checkpoint.casting import FLOAT_TYPES
from mesh_transformer.checkpoint.huggingface_files import TensorFiles
from mesh_transformer.checkpoint.huggingface_tensors import transposed_rows
from mesh_transformer.checkpoint.huggingface_tokenizer import without_fillers
from mesh_transformer.checkpoint.publish import destination, write_weights
from mesh_transformer.checkpoint.streaming import Tensor, tensor_leaves
from mesh_transformer.config import Config, load_config
from mesh_transformer.errors import CheckpointError, ConfigError

CONFIG = "config.json"
# Made from the config by every release that had them, so they say nothing; the names without `h.` are newer.
_BUFFER = re.compile(r"transformer\.(h\.\d+\.attn\.)?(bias|masked_bias|embed_positions)")
# Logit of a row that was added: no softmax ever chooses it, and float16 holds it.
_NEVER = -1e4
# What the original's fine-tuning example has; the data are the user's.
_TRAINING = {"train_set": "text.train.index", "epochs": 1, "lr": 5e-5, "end_lr": 1e-5, "weight_decay": 0.1}
_TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))
_AGREED = ("layers", "d_model", "n_heads", "n_vocab", "norm", "pe", "pe_rotary_dims")


@dataclasses.dataclass(frozen=True)
class Import:
    """What was written: the step's folder, its shards, the config's path, and the tokenizer's (None: there is none)."""

    path: str
    shards: int
    config: str
    tokenizer: str | None


def from_hf(
    folder: storage.PathLike,
    out: storage.PathLike,
    shards: int = 1,
    dtype: str | None = None,
    n_vocab: int | None = None,
) -> Import:
    """Write the weights of a Hugging Face GPT-J folder as `out`/step_N, with `out`/config.json and its tokenizer.

    `dtype`: f32, f16 or bf16; None keeps each tensor's own. `n_vocab`: add rows to the vocabulary, up to so many, so
    that it can be cut into `shards`; they are never chosen. The embedding's bias, which GPT-J lacks, is zero. N is the
    step that to_hf_weights.py recorded, else 0.

    Raises CheckpointError where the folder is no GPT-J, its tensors are not exactly a GPT-J's, files are damaged or
    hold more than weights, or `out` has that step or a config already; StorageError where there is no room.
    """
    source, target = storage.normalise(folder), storage.normalise(out)
    if dtype is not None and dtype not in FLOAT_TYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; use f32, f16 or bf16")
    raw = huggingface_config.from_hf(
        huggingface_config.read(source), where := storage.join(source, huggingface_config.CONFIG)
    )
    rows = raw["n_vocab"]
    if n_vocab is not None and n_vocab < rows:
        raise ConfigError(f"n_vocab {n_vocab}: the model has {rows} rows already, and rows are only added")
    raw |= {"n_vocab": n_vocab or rows, "cores_per_replica": shards, **_TRAINING}
    with TensorFiles(source) as files:
        noted = files.metadata.get("source_step", "")
        step = int(noted) if noted.isdecimal() else 0
        model_dir = destination(target, step)[0]
        raw["model_dir"] = f"runs/{storage.name(model_dir)}_tuned"  # `out` itself belongs to no run
        tokenizer = _tokenizer(source)
        if tokenizer:
            raw["tokenizer"] = _tokenizer_path(model_dir, tokenizer)
        config = _load(raw, where)
        config_path = storage.join(model_dir, CONFIG)
        if storage.exists(config_path):
            raise CheckpointError(f"{config_path} is already there; choose another output folder, or move it away")
        _check(files, config, rows)
        mine = config.agreement()
        details = {"config": config.to_dict(), "agreement": {key: mine[key] for key in _AGREED}}
        tensors = _tensors(files, config, rows, FLOAT_TYPES[dtype] if dtype else None)
        path = write_weights(target, config.model, shards, tensors, {layout.STEP: step}, details)
    for name, body in tokenizer.items():
        storage.write_atomic(storage.join(model_dir, name), body)
    storage.write_atomic(config_path, json.dumps(raw, indent=2).encode())
    return Import(path, shards, config_path, raw.get("tokenizer"))


def _load(raw: Mapping[str, Any], where: str) -> Config:
    try:
        return load_config(raw)
    except ConfigError as error:
        raise ConfigError(
            "\n".join(f"{where}: {line.removeprefix('config: ')}" for line in str(error).splitlines())
        ) from error


def _tokenizer(source: str) -> dict[str, bytes]:
    """The files of the folder's tokenizer, none if it has none."""
    present = set(storage.listdir(source))
    names = next((names for names in _TOKENIZERS if present.issuperset(names)), ())
    files = {name: storage.read_bytes(storage.join(source, name)) for name in names}
    for name in files.keys() & {"tokenizer.json"}:
        files[name] = without_fillers(files[name], storage.join(source, name))
    return files


def _tokenizer_path(model_dir: str, files: Mapping[str, bytes]) -> str:
    folder = model_dir if storage.is_url(model_dir) else os.path.abspath(model_dir)
    return storage.join(folder, *files) if len(files) == 1 else folder


def _check(files: TensorFiles, config: Config, rows: int) -> None:
    """Raises CheckpointError listing every tensor that is missing, unknown, or of another shape or type."""
    found = {name: header for name, header in files.headers.items() if not _BUFFER.fullmatch(name)}
    places = huggingface_tensors.places(config.model, config.mesh.cores_per_replica, rows)
    expected = {name: place.shape for name, place in places.items()}
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not a tensor of GPT-J" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        header = found[name]
        if header.shape != expected[name]:
            problems.append(f"{name} is {list(header.shape)}, expected {list(expected[name])}")
        elif header.dtype not in FLOAT_TYPES.values():
            problems.append(f"{name} is not of a float type that this project knows: float32, float16 or bfloat16")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{files.folder} does not hold the tensors of its {huggingface_config.CONFIG}: "
            f"{'; '.join(sorted(problems)[:8])}{more}"
        )


def _tensors(files: TensorFiles, config: Config, rows: int, dtype: np.dtype | None) -> Iterator[Tensor]:
    """The leaves in the published order."""
    shards = config.mesh.cores_per_replica
    places = huggingface_tensors.places(config.model, shards, rows)
    of_leaf = {place.leaf.label: name for name, place in places.items()}
    embedding = next(name for name, place in places.items() if place.embedding)
    headers = files.headers
    for leaf in tensor_leaves(config.model, shards):
        kind = leaf.leaf.kind  # type: ignore[union-attr]
        if huggingface_tensors.merged(kind):
            value = np.zeros(kind.layer_shape, headers[embedding].dtype)
        else:
            value = files.read(of_leaf[leaf.label])
            if kind.hf_transposed:
                value = transposed_rows(value, 0, value.shape[1])
        yield Tensor(leaf, _padded(value, kind), dtype or value.dtype)


def _padded(value: np.ndarray, kind: parameters.Kind) -> np.ndarray:
    """With the rows that the vocabulary has got more: zero, but for the output's bias, which keeps them from use."""
    if value.shape == kind.layer_shape:
        return value
    out = np.full(kind.layer_shape, _NEVER if value.ndim == 1 else 0, value.dtype)
    out[tuple(slice(n) for n in value.shape)] = value
    return out
