"""Text in, text out: prompts completed by a network and its tokenizer, as the text comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mesh_transformer import generation
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from mesh_transformer.decoding import CHUNK
from mesh_transformer.errors import ConfigError
from mesh_transformer.sampling import sampler_of
from mesh_transformer.transformer_shard import CausalTransformer

# Stands in decoded text for bytes that are no character: of one that is not complete yet, or a mistake of the model's.
_INCOMPLETE = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Options:
    """How texts are completed. `sampler`: temp, top_p, top_k as in `sampling.sampler_of`; text i draws by seed + i."""

    max_tokens: int
    sampler: Mapping[str, Any]
    seed: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """A completion, or the next part of one: text, number of tokens, and why it ended: `stop` (at the end of text),
    `length`, or None where more follows."""

    text: str
    tokens: int
    finish_reason: str | None

    def __add__(self, more: Completion) -> Completion:
        return Completion(self.text + more.text, self.tokens + more.tokens, more.finish_reason)


class TextStream:
    """Turns tokens into text as they come, holding back what does not make a whole character yet."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Decoding begins some tokens before what is new, since a tokenizer may treat the first token of a text in
        # another way; `_given` characters from there have been given out.
        self._start = self._whole = self._given = 0

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """The text that these tokens complete; with `last` also what is held back."""
        self._ids += ids
        decoded = self._tokenizer.decode(self._ids[self._start :])
        ready = decoded if last else decoded.rstrip(_INCOMPLETE)
        new, self._given = ready[self._given :], max(self._given, len(ready))
        if ready == decoded:
            self._start, self._whole = self._whole, len(self._ids)
            self._given = len(self._tokenizer.decode(self._ids[self._start :]))
        return new


class Completer:
    """A network with its tokenizer. Ids that the tokenizer does not have are never drawn; end-of-text ends a text."""

    def __init__(self, network: CausalTransformer, tokenizer: Tokenizer):
        self.network, self.tokenizer = network, tokenizer

    def stream(self, prompts: Sequence[str], options: Options, chunk: int = CHUNK) -> Iterator[list[Completion]]:
        """The next part of each prompt's completion, of up to `chunk` tokens, until all have ended.

        Closing the iterator stops the work. Raises ConfigError for options that do not fit.
        """
        if isinstance(options.max_tokens, bool) or options.max_tokens < 1:
            raise ConfigError(f"max_tokens ({options.max_tokens!r}) must be an integer of at least 1")
        sampler = sampler_of(options.sampler, len(prompts), options.seed)
        model, eot = self.network.model, self.tokenizer.eot_id
        ids = [generation.fit_prompt(self.tokenizer.encode(text), model, eot) for text in prompts]
        streams = [TextStream(self.tokenizer) for _ in prompts]
        for piece in generation.stream(
            model, self.network.mesh, self.network.state.params, ids, [options.max_tokens] * len(prompts), sampler,
            [eot], self.tokenizer.vocab_size, chunk=chunk,
        ):  # fmt: skip
            yield [
                Completion(stream.add(tokens, last=reason is not None), len(tokens), reason)
                for stream, tokens, reason in zip(streams, piece.tokens, piece.finish_reasons, strict=True)
            ]

    def complete(self, prompts: Sequence[str], options: Options) -> list[Completion]:
        """The whole completions."""
        whole = [Completion("", 0, None)] * len(prompts)
        for parts in self.stream(prompts, options):
            whole = [completion + part for completion, part in zip(whole, parts, strict=True)]
        return whole


def tokenizer_of(config: Config) -> Tokenizer:
    """The config's tokenizer. Raises DataError where it cannot be loaded or has ids that the model does not have."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, config.model.n_vocab)
    return tokenizer
