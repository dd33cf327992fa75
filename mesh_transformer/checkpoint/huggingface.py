"""Weights of the published layout as a Hugging Face GPT-J: a folder that `GPTJForCausalLM.from_pretrained` loads.

Tensors pass one at a time, each cast once, from float32 where it was summed. The embedding's bias has no place in
GPT-J: it is added to every row of the embedding, in float32. No torch, no device and no memory of a model is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import huggingface_config, huggingface_tokenizer, safetensors
from mesh_transformer.checkpoint.casting import FLOAT_TYPES, cast
from mesh_transformer.checkpoint.convert import described
from mesh_transformer.checkpoint.huggingface_tensors import Place, embedding_bias, places, transposed_rows
from mesh_transformer.checkpoint.npz import CHUNK, Header
from mesh_transformer.checkpoint.streaming import Weights, open_weights
from mesh_transformer.config import Config, load_config
from mesh_transformer.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from mesh_transformer.errors import CheckpointError, ConfigError, DataError, StorageError

logger = logging.getLogger(__name__)

_AHEAD = 4  # pieces of a tensor that are made while one is written

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
        found = _write(folder, weights, places(weights.model, weights.shards, n_vocab), target, limit)
    huggingface_tokenizer.write(folder, extra)
    end = _end_of_text(settings, vocabulary, n_vocab)
    ends = {} if end is None else {"bos_token_id": end, "eos_token_id": end}
    hf = huggingface_config.to_hf(settings.model, n_vocab, end, target, found.source_dtype)
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


def _source_dtype(weights: Weights, places: Iterable[Place]) -> str:
    return ", ".join(sorted({weights.dtype(place.leaf).name for place in places}))


def _write(folder: str, weights: Weights, places: Mapping[str, Place], dtype: np.dtype, limit: int) -> Export:
    """The files of weights, and their index where there are several."""
    headers = {name: Header(place.shape, dtype) for name, place in places.items()}
    total = sum(safetensors.byte_size(header) for header in headers.values())
    free = storage.free_bytes(folder)
    if free is not None and free < total + CHUNK:
        raise StorageError(
            f"{folder}: {free / 1e9:.2f} GB free, and the weights take {total / 1e9:.2f} GB: free some, or choose "
            "another output folder"
        )
    runs = safetensors.split(headers, limit)
    files = dict(zip(safetensors.file_names(len(runs)), runs, strict=True))
    source = _source_dtype(weights, places.values())
    metadata = {"format": "pt", "dtype": dtype.name, "source_dtype": source, "source_step": str(weights.step)}
    storage.makedirs(folder)
    paths = [storage.join(folder, file) for file in files]
    with _Reader(weights, places, dtype) as reader, _removed_on_failure(paths):
        for path, run in zip(paths, files.values(), strict=True):
            safetensors.write(path, run, reader.pieces, metadata)
    if len(files) > 1:
        content = safetensors.index({file: list(run) for file, run in files.items()}, total, metadata)
        storage.write_atomic(storage.join(folder, safetensors.INDEX), content)
    n_vocab = next(place.shape[0] for place in places.values() if place.embedding)
    return Export(folder, tuple(files), total, len(headers), n_vocab, dtype.name, source)


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

    def __init__(self, weights: Weights, places: Mapping[str, Place], dtype: np.dtype) -> None:
        self._weights, self._places, self._dtype = weights, places, dtype
        self._following = dict(zip(places, [*list(places)[1:], None], strict=True))
        # Used in turn: fresh memory for every tensor costs more than reading it.
        leaves = [place.leaf for place in places.values()]
        size = max(math.prod(leaf.whole_shape) * weights.dtype(leaf).itemsize for leaf in leaves)
        self._buffers = dict(zip(places, itertools.cycle([np.empty(size, np.uint8) for _ in range(2)]), strict=False))
        self._pool = ThreadPoolExecutor(1)
        self._workers = ThreadPoolExecutor(_AHEAD)
        self._ahead = {name: self._pool.submit(self._read, name) for name in list(places)[:1]}

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """A tensor's rows in order, some MB at a time; the tensors have to be asked for in order."""
        place, dtype = self._places[name], self._dtype
        value, bias = self._ahead.pop(name).result()
        following = self._following[name]
        if following is not None:
            self._ahead[following] = self._pool.submit(self._read, following)
        logger.debug("%s %s %s from %s %s", name, list(place.shape), dtype, place.leaf.label, value.dtype)
        label = f"{name} (from {place.leaf.label})"
        step = _rows_of(place.shape)

        def piece(start: int) -> np.ndarray:
            stop = min(start + step, place.shape[0])  # of a trimmed vocabulary the last rows are left out
            part = transposed_rows(value, start, stop) if place.kind.hf_transposed else value[start:stop]
            if bias is not None:
                part = part.astype(np.float32) + bias[None, :]
            return cast(part, dtype, label)

        # A few pieces ahead of the writing, by several cores: transposing is the most work of all.
        waiting: deque[Future[np.ndarray]] = deque()
        for start in range(0, place.shape[0], step):
            waiting.append(self._workers.submit(piece, start))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _read(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        """A leaf's value, and for the embedding, what has to be added to its rows."""
        place, bias = self._places[name], None
        if place.embedding:
            leaf = embedding_bias(self._weights.model, self._weights.shards)
            found = self._weights.read(leaf).value.astype(np.float32)
            bias = found if found.any() else None  # adding zero would turn -0.0 into 0.0
        return self._weights.read(place.leaf, self._buffers[name]).value, bias

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._workers.shutdown(cancel_futures=True)
        self._ahead.clear()


def _rows_of(shape: tuple[int, ...]) -> int:
    """How many rows of a tensor are a piece."""
    return max(1, CHUNK // (4 * int(np.prod(shape[1:], dtype=np.int64))))
