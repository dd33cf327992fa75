"""Text in, text out: prompts completed by a network and its tokenizer, as the text comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mesh_transformer import generation
from mesh_transformer.answer import Answer, Completion
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from mesh_transformer.decoding import CHUNK
from mesh_transformer.errors import ConfigError
from mesh_transformer.sampler import DEFAULTS, Mode, Sampler, mode_of, sampler_of
from mesh_transformer.transformer_shard import CausalTransformer


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked for a prompt: the one home of such options, for every script.

    max_tokens: drawn at most. sampler: temp, top_p, top_k, min_p, repetition_penalty, presence_penalty,
    frequency_penalty, logit_bias, logprobs, as in `sampler.sampler_of`. seed: the same seed draws the same text. stop:
    strings that end the text, and are not in it; stop_ids: tokens that do, beside the end of text. n: completions of
    each prompt. filter_order and window: as in `sampler.Mode`.
    """

    max_tokens: int
    sampler: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    n: int = 1
    filter_order: str = "reference"
    window: str = "full"

    def check(self) -> None:
        """Raises ConfigError naming the option that does not fit."""
        for name, value in (("max_tokens", self.max_tokens), ("n", self.n)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} ({value!r}) must be an integer of at least 1")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop ({self.stop!r}) must be a list of strings that are not empty")
        if not all(isinstance(token, int) and token >= 0 for token in self.stop_ids):
            raise ConfigError(f"stop_ids ({self.stop_ids!r}) must be token ids")
        mode_of(sampler_of(self.sampler, 1, self.seed), self.filter_order, self.window)


def sampler_for(options: Sequence[Options], mode: Mode | None = None) -> Sampler:
    """A sampler with one row for each of `options`, each by its own seed. Raises ConfigError."""
    known = set(DEFAULTS).union(*(each.sampler for each in options))
    merged = {name: [each.sampler.get(name) for each in options] for name in known}
    return sampler_of(merged, len(options), [each.seed for each in options], mode)


class Completer:
    """A network with its tokenizer. Ids that the tokenizer does not have are never drawn; end-of-text ends a text."""

    def __init__(self, network: CausalTransformer, tokenizer: Tokenizer):
        self.network, self.tokenizer = network, tokenizer

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: Options | Sequence[Options],
        chunk: int = CHUNK,
    ) -> Iterator[list[Completion]]:
        """The next part of each prompt's completion, of up to `chunk` tokens, until all have ended.

        prompts: texts, or token ids. options: for each prompt, or the same for all, where text i draws by seed + i; `n`
        is for the caller, who repeats a prompt. Closing the iterator stops the work, and so do stop strings in all
        rows. Raises ConfigError for options that do not fit.
        """
        if isinstance(options, Options):
            options = [dataclasses.replace(options, seed=options.seed + i) for i in range(len(prompts))]
        for each in options:
            each.check()
        if len({(each.filter_order, each.window) for each in options}) > 1:
            raise ConfigError("filter_order and window must be the same for all prompts of a batch")
        model, eot = self.network.model, self.tokenizer.eot_id
        texts = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        sampler = sampler_for(options)
        work = generation.Stream(
            model, self.network.mesh, self.network.weights,
            [generation.fit_prompt(ids, model, eot) for ids in texts], [each.max_tokens for each in options], sampler,
            [(eot, *each.stop_ids) for each in options], self.tokenizer.vocab_size,
            mode_of(sampler, options[0].filter_order, options[0].window), chunk,
        )  # fmt: skip
        answers = [Answer(self.tokenizer, each.stop) for each in options]
        for piece in work:
            parts = [
                answer.add(
                    piece.tokens[i], piece.finish_reasons[i], None if piece.logprobs is None else piece.logprobs[i]
                )
                for i, answer in enumerate(answers)
            ]
            work.end([
                i for i, answer in enumerate(answers)
                if answer.finish_reason is not None and piece.finish_reasons[i] is None
            ])  # fmt: skip
            yield parts

    def complete(
        self, prompts: Sequence[str | Sequence[int]], options: Options | Sequence[Options]
    ) -> list[Completion]:
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
