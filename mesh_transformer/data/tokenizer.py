"""Tokenizers: from a file, a folder, or by name from the Hugging Face hub; and training one from text.

Everything works without a network as long as a path is given. The `tokenizers` package does the work; a hub name is
fetched by `huggingface_hub`, into Hugging Face's cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer import storage
from mesh_transformer.errors import DataError

if TYPE_CHECKING:
    import tokenizers

_LOG = logging.getLogger(__name__)
END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
# Names of the two halves of a byte-level BPE: Hugging Face's, and those of GPT-2's first release.
_VOCAB_NAMES, _MERGES_NAMES = ("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")
_HUB_SECONDS = 10.0  # to wait for the hub's first answer
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Tokenizer:
    """Text to token ids and back. `eot_id` ends a document."""

    def __init__(self, backend: tokenizers.Tokenizer, source: str) -> None:
        self.backend = backend
        self.source = source

    def encode(self, text: str, literal: bool = False) -> list[int]:
        """Token ids of a text; with `literal`, the names of special tokens in it are text like any other."""
        return [int(i) for i in self.encode_batch([text], literal)[0]]

    def encode_batch(self, texts: Sequence[str], literal: bool = False) -> list[np.ndarray]:
        """Token ids (uint32 [N]) of each text."""
        if self.backend.encode_special_tokens != literal:
            self.backend.encode_special_tokens = literal
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self.backend.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def spell(self, token: int) -> str:
        """A token by itself: its text or, where that is not whole characters, its bytes, as `bytes:\\xe6\\x97`."""
        text = self.decode([token])
        bytes_of = _byte_level_alphabet()
        name = self.backend.id_to_token(int(token)) or ""
        if "\ufffd" not in text or any(char not in bytes_of for char in name):
            return text
        return "bytes:" + "".join(f"\\x{bytes_of[char]:02x}" for char in name)

    @functools.cached_property
    def vocab_size(self) -> int:
        """The largest id + 1: what n_vocab must reach."""
        return max(self._vocab.values(), default=-1) + 1

    @functools.cached_property
    def eot_token(self) -> str:
        """The name of the end-of-text token. Raises DataError if the tokenizer has none of the usual names."""
        for name in _END_NAMES:
            if name in self._vocab:
                return name
        raise DataError(
            f"tokenizer {self.source}: has no end-of-text token (looked for {', '.join(_END_NAMES)}); "
            f"add one of these to its special tokens"
        )

    @property
    def eot_id(self) -> int:
        """The id of the end-of-text token."""
        return self._vocab[self.eot_token]

    @functools.cached_property
    def hash(self) -> str:
        """Equal for tokenizers with the same vocabulary and merges, whichever files they came from."""
        merges = json.loads(self.backend.to_str())["model"].get("merges") or []
        joined = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
        content = json.dumps([sorted(self._vocab.items(), key=lambda item: (item[1], item[0])), joined])
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    @functools.cached_property
    def _vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocab


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level BPE's tokens stands for, as GPT-2 introduced them: printable ones
    stand for themselves, the others, in order, are 256 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def load_tokenizer(path_or_name: str) -> Tokenizer:
    """The tokenizer of a tokenizers JSON file, a folder with one (or with vocab.json and merges.txt), or a hub name.

    Raises DataError that says which file is needed.
    """
    path = storage.normalise(path_or_name)
    if storage.is_url(path):
        return _from_json(storage.read_bytes(path), path)
    if os.path.isfile(path):
        return _from_json(storage.read_bytes(path), path)
    if os.path.isdir(path):
        return _from_folder(path)
    if path.endswith(".json") or not _HUB_NAME.fullmatch(path_or_name):
        raise DataError(f"tokenizer {path_or_name}: no such file or folder; expected {_EXPECTED}")
    return _from_hub(path_or_name)


def check_vocabulary(tokenizer: Tokenizer, n_vocab: int) -> None:
    """Refuse a tokenizer with ids that the model does not have."""
    if tokenizer.vocab_size > n_vocab:
        raise DataError(
            f"tokenizer {tokenizer.source}: has {tokenizer.vocab_size} tokens, but the model's n_vocab is {n_vocab}; "
            f"raise n_vocab to at least {tokenizer.vocab_size}, or use the tokenizer that the model was made for"
        )


def is_other(tokenizer: Tokenizer, position: Mapping[str, Any]) -> bool:
    """Whether a model was trained with another tokenizer, by the data position in its checkpoint; logs a warning."""
    trained_with = position.get("tokenizer_hash")
    other = isinstance(trained_with, str) and trained_with != tokenizer.hash
    if other:
        _LOG.warning(
            "tokenizer %s (%s) is not the one that the model was trained with (%s): its text will make no sense to it; "
            "name that one in the config's `tokenizer`", tokenizer.source, tokenizer.hash, trained_with,
        )  # fmt: skip
    return other


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: str) -> Tokenizer:
    """Train a byte-level BPE, write it as JSON, and return it. The same texts give the same file.

    Id 0 is `<|endoftext|>`, then the 256 bytes, then merges. Raises DataError if the vocabulary cannot hold the bytes.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + 1
    if vocab_size < least:
        raise DataError(f"vocab_size {vocab_size}: expected at least {least}, the 256 bytes and {END_OF_TEXT}")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    storage.makedirs(storage.parent(path))
    storage.write_atomic(path, backend.to_str(pretty=True).encode())
    return Tokenizer(backend, path)


_EXPECTED = "a tokenizer.json file, a folder with one or with vocab.json and merges.txt, or a hub name"


def _from_json(content: bytes, source: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return Tokenizer(Backend.from_str(content.decode()), source)
    except Exception as error:  # noqa: BLE001  the package raises bare Exception for whatever it cannot parse
        raise DataError(f"tokenizer {source}: not a tokenizers JSON file ({error}); expected {_EXPECTED}") from error


def _from_folder(folder: str) -> Tokenizer:
    whole = os.path.join(folder, "tokenizer.json")
    if os.path.exists(whole):
        return _from_json(storage.read_bytes(whole), folder)
    vocab = _first_existing(folder, _VOCAB_NAMES)
    merges = _first_existing(folder, _MERGES_NAMES)
    if vocab is None or merges is None:
        raise DataError(f"tokenizer {folder}: the folder has no tokenizer.json; expected {_EXPECTED}")
    return Tokenizer(_byte_level_bpe(vocab, merges), folder)


def _first_existing(folder: str, names: Sequence[str]) -> str | None:
    paths = [os.path.join(folder, name) for name in names]
    return next((path for path in paths if os.path.exists(path)), None)


def _byte_level_bpe(vocab_path: str, merges_path: str) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    try:
        vocab, merges = models.BPE.read_file(vocab_path, merges_path)
        backend = Backend(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # noqa: BLE001  the package raises bare Exception for whatever it cannot parse
        raise DataError(f"tokenizer {vocab_path}, {merges_path}: cannot be read ({error}); {_EXPECTED}") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


def _from_hub(name: str) -> Tokenizer:
    try:
        with open(_hub_file(name), "rb") as file:
            content = file.read()
    except Exception as error:  # noqa: BLE001  network, cache and hub each have their own kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"tokenizer {name}: no such file or folder here, and the hub did not give its tokenizer.json ({reason}); "
            f"without a network, get that file (or vocab.json and merges.txt) here and give its path"
        ) from error
    return _from_json(content, name)


def _hub_file(name: str) -> str:
    """The local copy of a hub name's tokenizer.json: from Hugging Face's cache, else fetched into it."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    file = "tokenizer.json"
    try:
        return str(hf_hub_download(name, file, local_files_only=True))
    except LocalEntryNotFoundError:
        # Asked once before the download, which tries again for half a minute where there is no network.
        HfApi().model_info(name, timeout=_HUB_SECONDS)
        return str(hf_hub_download(name, file))
