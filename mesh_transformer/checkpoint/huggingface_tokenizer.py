"""Tokenizer files of an exported model, in which every row of the vocabulary has a token."""

from __future__ import annotations

import json
import re
from typing import Any

from mesh_transformer import storage
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.errors import DataError

# The names that GPT-J's own tokenizer files give to the rows behind GPT-2's tokens.
FILLER = "<|extratoken_{number}|>"
_FILLER = re.compile(r"<\|extratoken_\d+\|>")


def files(tokenizer: Tokenizer, n_vocab: int, seq: int) -> dict[str, bytes]:
    """File name -> content, of a tokenizer with exactly `n_vocab` tokens: fillers stand behind its own.

    Raises DataError where it has more tokens than that, or ids without a token, so that no filler could fit.
    """
    end = tokenizer.eot_token
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq,
        "clean_up_tokenization_spaces": False,
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
    }
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    return {
        "tokenizer.json": _filled(tokenizer, n_vocab).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
        "special_tokens_map.json": json.dumps(special, indent=2).encode(),
    }


def without_fillers(content: bytes, path: str) -> bytes:
    """A tokenizer.json without fillers, so that its size tells sampling which rows have no token.

    Raises DamagedError where it is no tokenizers JSON.
    """
    try:
        body = json.loads(content)
        kept = [token for token in body["added_tokens"] if not _FILLER.fullmatch(token["content"])]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is not a tokenizers JSON file ({error!r}); copy it again") from error
    body["added_tokens"] = kept
    return json.dumps(body, ensure_ascii=False, indent=2).encode()


def _filled(tokenizer: Tokenizer, n_vocab: int) -> str:
    """The tokenizers JSON with filler tokens added; the tokenizer itself stays as it is."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.backend.to_str())
    taken = backend.get_vocab(with_added_tokens=True)
    missing = n_vocab - len(taken)
    if missing < 0 or tokenizer.vocab_size != len(taken):
        raise DataError(
            f"tokenizer {tokenizer.source}: has {len(taken)} tokens with ids up to {tokenizer.vocab_size - 1}, and "
            f"{n_vocab} rows of the vocabulary need one each; use the tokenizer that the model was made for"
        )
    names = (FILLER.format(number=number) for number in range(1, missing + len(taken) + 1))
    free = [name for name in names if name not in taken][:missing]
    # Not normalised: a filler is matched as it stands, and never by text that only looks like it after normalisation.
    backend.add_tokens([AddedToken(name, normalized=False) for name in free])
    text: str = backend.to_str()
    return text


def write(folder: str, content: dict[str, bytes]) -> None:
    for name, body in content.items():
        storage.write_atomic(storage.join(folder, name), body)
