"""Weights of the published layout as a Hugging Face GPT-J: a folder that `GPTJForCausalLM.from_pretrained` loads.

Tensors pass one at a time, each cast once, from float32 where it was summed. The embedding's bias has no place in
GPT-J: it is added to every row of the embedding, in float32. No torch, no device and no memory of a model is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mesh_transformer import parameters, storage
from mesh_transformer.checkpoint import huggingface_config, huggingface_tokenizer, safetensors
from mesh_transformer.checkpoint.casting import FLOAT_TYPES, cast
from mesh_transformer.checkpoint.convert import described
from mesh_transformer.checkpoint.layout import StateLeaf
from mesh_transformer.checkpoint.npz import CHUNK, Header
from mesh_transformer.checkpoint.streaming import Weights, open_weights, tensor_leaves
from mesh_transformer.config import Config, load_config
from mesh_transformer.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from mesh_transformer.errors import CheckpointError, ConfigError, DataError, StorageError

logger = logging.getLogger(__name__)

DEFAULT_DTYPE = "fp16"  # the 2021 script's
DEFAULT_SHARD_SIZE = "5GB"
GPT2_END = 50256
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True)
class Export:
    """What was written: folder, files of weights, their bytes and tensors, and their dtype and that of the source."""

    path: str
    files: tuple[str, ...]
    bytes: int
    tensors: int
    n_vocab: int
    dtype: str
    source_dtype: str


@dataclasses.dataclass(frozen=True)
class _Target:
    """One tensor of the export: the leaf it comes from, and its shape and dtype there."""

    leaf: StateLeaf
    kind: parameters.Kind
    header: Header


def convert(
    ckpt: storage.PathLike,
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    out: storage.PathLike,
    dtype: str = DEFAULT_DTYPE,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    trim_vocab: bool = False,
    tokenizer: str | None = None,
) -> Export:
    """Write the weights of `ckpt` (a step_N folder or a model_dir, full or slim) as a Hugging Face folder `out`.

    `config`: of the model, a path, dict or Config. `dtype`: fp16, fp32 or bf16. `max_shard_size`: bytes of a file of
    weights, or "5GB", "200MiB". `tokenizer`: a path or hub name; by default the config's, and without one, said in
    the log, if that cannot be loaded. `trim_vocab`: leave out the rows of the vocabulary that it has no token for.

    Raises CheckpointError where GPT-J cannot express the model (before anything is read), the weights are missing,
    damaged or of another model, a value is too large for `dtype`, or `out` holds a model already; ConfigError,
    DataError, StorageError likewise. config.json is written last: without it, the folder is not a model.
    """
    settings = config if isinstance(config, Config) else load_config(config)
    huggingface_config.check_expressible(settings)
    if dtype not in FLOAT_TYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; use fp16, fp32 or bf16")
    limit, target = parse_size(max_shard_size), FLOAT_TYPES[dtype]
    folder = storage.normalise(out)
    _check_folder(folder)
    vocabulary = _tokenizer(settings, tokenizer, trim_vocab)
    n_vocab = vocabulary.vocab_size if vocabulary and trim_vocab else settings.model.n_vocab
    extra = huggingface_tokenizer.files(vocabulary, n_vocab, settings.model.seq) if vocabulary else {}
    with open_weights(ckpt, settings.model) as weights:
        described(weights, settings)  # refuses weights of another model
        targets = _targets(weights, n_vocab, target)
        source = _source_dtype(weights, targets.values())
        found = _write(folder, weights, targets, limit, source)
    huggingface_tokenizer.write(folder, extra)
    end = _end_of_text(settings, vocabulary, n_vocab)
    ends = {} if end is None else {"bos_token_id": end, "eos_token_id": end}
    hf = huggingface_config.to_hf(settings.model, n_vocab, end, target, source)
    for name, body in ((huggingface_config.GENERATION_CONFIG, ends), (huggingface_config.CONFIG, hf)):
        storage.write_atomic(storage.join(folder, name), json.dumps(body, indent=2).encode())
    return found


def parse_size(size: str | int) -> int:
    """Bytes of "5GB", "200MiB", "1000" or an integer; at least 1. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B|)", str(size).strip().upper())
    count = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if count < 1:
        raise ConfigError(f"max_shard_size {size!r}: expected a number of bytes, such as 5GB, 200MiB or 1000000")
    return count


def _check_folder(folder: str) -> None:
    """Refuse a folder with weights in it: files of two exports side by side would be read as one."""
    weights = (".safetensors", ".bin", safetensors.INDEX, huggingface_config.CONFIG)
    names = [name for name in storage.listdir(folder) if name.endswith(weights)]
    if names:
        raise CheckpointError(
            f"{folder} holds a model already ({', '.join(names[:4])}); choose another output folder, or remove it"
        )


def _tokenizer(config: Config, asked: str | None, trim_vocab: bool) -> Tokenizer | None:
    """The tokenizer to go with the weights; None where nobody named one and the default's cannot be loaded or used."""
    needed = asked is not None or trim_vocab
    try:
        found = load_tokenizer(asked or config.data.tokenizer)
        found.eot_token  # noqa: B018  raises where there is none
        needed = needed or "tokenizer" in config.given  # that one can be loaded, so it has to fit
        check_vocabulary(found, config.model.n_vocab)
    except (DataError, StorageError) as error:
        if needed:
            raise
        logger.warning("no tokenizer files are written: %s; --tokenizer PATH names one", error)
        return None
    return found


def _end_of_text(config: Config, tokenizer: Tokenizer | None, n_vocab: int) -> int | None:
    """The id that ends a text: the tokenizer's, or GPT-2's where the config names that and it could not be loaded."""
    if tokenizer is not None:
        return tokenizer.eot_id
    return GPT2_END if config.data.tokenizer == "gpt2" and n_vocab > GPT2_END else None


def _targets(weights: Weights, n_vocab: int, dtype: np.dtype) -> dict[str, _Target]:
    """Every tensor of the export by its name, in the order in which the files are cheapest to read."""
    targets = {}
    for leaf in tensor_leaves(weights.model, weights.shards):
        if leaf.leaf is None or leaf.leaf.kind.hf_name is None:
            continue
        kind = leaf.leaf.kind
        shape = tuple(n_vocab if axis == "vocab" else kind.sizes[axis] for axis in kind.axes)
        header = Header(shape[::-1] if kind.hf_transposed else shape, dtype)
        targets[leaf.leaf.kind.hf_name.replace("{i}", str(leaf.leaf.layer))] = _Target(leaf, kind, header)
    return targets


def _source_dtype(weights: Weights, targets: Iterable[_Target]) -> str:
    return ", ".join(sorted({weights.dtype(target.leaf).name for target in targets}))


def _write(folder: str, weights: Weights, targets: Mapping[str, _Target], limit: int, source: str) -> Export:
    """The files of weights, and their index where there are several."""
    headers = {name: target.header for name, target in targets.items()}
    total = sum(safetensors.byte_size(header) for header in headers.values())
    free = storage.free_bytes(folder)
    if free is not None and free < total + CHUNK:
        raise StorageError(
            f"{folder}: {free / 1e9:.2f} GB free, and the weights take {total / 1e9:.2f} GB: free some, or choose "
            "another output folder"
        )
    runs = safetensors.split(headers, limit)
    files = dict(zip(safetensors.file_names(len(runs)), runs, strict=True))
    storage.makedirs(folder)
    dtype = next(iter(headers.values())).dtype.name
    metadata = {"format": "pt", "dtype": dtype, "source_dtype": source, "source_step": str(weights.step)}
    with _Reader(weights, targets) as reader, _removed_on_failure([storage.join(folder, file) for file in files]):
        for file, run in files.items():
            safetensors.write(storage.join(folder, file), run, reader.pieces, metadata)
    if len(files) > 1:
        content = safetensors.index({file: list(run) for file, run in files.items()}, total, metadata)
        storage.write_atomic(storage.join(folder, safetensors.INDEX), content)
    n_vocab = next(target.header.shape[0] for target in targets.values() if target.kind.module == parameters.EMBEDDING)
    return Export(folder, tuple(files), total, len(headers), n_vocab, dtype, source)


@contextlib.contextmanager
def _removed_on_failure(paths: Iterable[str]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for path in paths:
            with contextlib.suppress(StorageError):  # the error that brought us here says more
                storage.remove(path)
        raise


class _Reader:
    """Tensors in the form of the export. One is read ahead while another is cast and written: two at most exist."""

    def __init__(self, weights: Weights, targets: Mapping[str, _Target]) -> None:
        self._weights, self._targets = weights, targets
        self._following = dict(zip(targets, [*list(targets)[1:], None], strict=False))
        self._pool = ThreadPoolExecutor(1)
        self._ahead = {name: self._pool.submit(self._read, name) for name in list(targets)[:1]}

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """A tensor's rows in order, a few MB at a time; the tensors have to be asked for in order."""
        target = self._targets[name]
        value, bias = self._ahead.pop(name).result()
        following = self._following[name]
        if following is not None:
            self._ahead[following] = self._pool.submit(self._read, following)
        if target.kind.hf_transposed:
            value = value.T
        logger.debug("%s %s %s from %s %s", name, list(target.header.shape), target.header.dtype, target.leaf.label,
                     value.dtype)  # fmt: skip
        # Rows that the tokenizer has no token for lie at the end.
        rows = target.header.shape[0]
        step = max(1, CHUNK // (4 * max(1, int(np.prod(target.header.shape[1:], dtype=np.int64)))))
        for start in range(0, rows, step):
            part = value[start : min(start + step, rows)]
            if bias is not None:
                part = part.astype(np.float32) + bias[None, :]
            yield cast(part, target.header.dtype, f"{name} (from {target.leaf.label})")

    def _read(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        """A leaf's value, and for the embedding, what has to be added to its rows."""
        target = self._targets[name]
        bias = None
        if target.kind.module == parameters.EMBEDDING:
            found = self._weights.read(self._embedding_bias()).value.astype(np.float32)
            bias = found if found.any() else None  # adding zero would turn -0.0 into 0.0
        return self._weights.read(target.leaf).value, bias

    def _embedding_bias(self) -> StateLeaf:
        leaves = tensor_leaves(self._weights.model, self._weights.shards)
        return next(leaf for leaf in leaves if leaf.leaf is not None and huggingface_config.merged(leaf.leaf.kind))

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for ahead in self._ahead.values():
            with contextlib.suppress(Exception):  # the error that ended the export says more
                ahead.cancel() or ahead.exception()
        self._ahead.clear()
