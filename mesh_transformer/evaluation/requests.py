"""From texts to the token windows that a model scores, cut as lm-evaluation-harness cuts them.

S is the model's `seq`. A window is a context and its continuation; together they have at most S + 1 tokens, since the
last one is only predicted, never read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

from mesh_transformer.data.normalise import normaliser
from mesh_transformer.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """What is done to texts before they are scored; nothing by default.

    ftfy: the 2021 library's clean-up (ftfy, with NFKC).  end_of_text_first: every context begins with the end-of-text
    token, as a document did in training and as in the 2021 library; without it only empty contexts do.
    """

    ftfy: bool = False
    end_of_text_first: bool = False


class Window(NamedTuple):
    """Token ids: at least one of `context`, which is read only, and those of `continuation`, which are scored."""

    context: Ids
    continuation: Ids

    @property
    def length(self) -> int:
        """The tokens that the model reads."""
        return len(self.context) + len(self.continuation) - 1


def fit(context: Ids, continuation: Ids, seq: int) -> list[Window]:
    """The windows that score a continuation: one, of the last S + 1 tokens of both together.

    A continuation longer than S is scored in several, each of its tokens once.
    """
    if len(continuation) > seq:
        return rolling(continuation, context[-1], seq)
    return [Window(context[-(seq + 1 - len(continuation)) :], continuation)] if continuation else []


def rolling(tokens: Ids, first: int, seq: int) -> list[Window]:
    """Windows that score every one of `tokens` once, the first of them after `first`.

    The last window is moved back to a whole context, of which only the tokens not scored yet are scored again.
    """
    windows, done = [], 0
    while done < len(tokens):
        end = min(done + seq, len(tokens))
        begin = max(end - seq, 0)
        context = tokens[begin - 1 : done] if begin else (first, *tokens[:done])
        windows.append(Window(context, tokens[done:end]))
        done = end
    return windows


class Encoder:
    """Texts to windows, with a model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, seq: int, options: TextOptions) -> None:
        self.tokenizer, self.seq, self.options = tokenizer, seq, options
        self._clean = normaliser(options.ftfy, wikitext=False)

    def pairs(self, requests: Sequence[tuple[str, str]]) -> list[list[Window]]:
        """The windows of each (context, continuation); none where the continuation is empty.

        Spaces at a context's end belong to its continuation, which is what follows the context's tokens in the tokens
        of both together. An empty context is the end-of-text token.
        """
        texts = []
        for context, continuation in requests:
            context, continuation = self._clean(context), self._clean(continuation)
            kept = context.rstrip()
            texts.append((kept, context[len(kept) :] + continuation))
        contexts = self._encode([context for context, _ in texts])
        wholes = self._encode([context + continuation for context, continuation in texts])
        windows, longer = [], 0
        for (_, continuation), read, whole in zip(texts, contexts, wholes, strict=True):
            following = whole[len(read) :]
            if continuation and not following:  # the tokenizer merged the two texts into no more tokens than one had
                (following,) = self._encode([continuation])
            begin, following = self._begun(read, following)
            longer += len(begin) + len(following) > self.seq + 1
            windows.append(fit(begin, following, self.seq))
        if longer:
            logger.warning("%d requests are longer than the context (%d): cut on the left", longer, self.seq)
        return windows

    def documents(self, texts: Sequence[str]) -> list[list[Window]]:
        """The windows that score each whole text, the first token after the end-of-text token."""
        eot = self.tokenizer.eot_id
        return [rolling(ids, eot, self.seq) for ids in self._encode([self._clean(text) for text in texts])]

    def prompts(self, texts: Sequence[str], max_tokens: Sequence[int]) -> list[Ids]:
        """Prompts to continue by `max_tokens`, cut on the left so that both fit into the context where they can."""
        found = []
        for ids, count in zip(self._encode([self._clean(text) for text in texts]), max_tokens, strict=True):
            begin, _ = self._begun(ids, ())
            room = self.seq - count
            found.append(begin[-(room if room > 0 else self.seq) :])
        return found

    def _begun(self, context: Ids, continuation: Ids) -> tuple[Ids, Ids]:
        """The context with the end-of-text token in front where it is asked for or there is nothing else."""
        eot = self.tokenizer.eot_id
        if not context and continuation[:1] == (eot,):  # it brings its own
            return (eot,), continuation[1:]
        if not context or (self.options.end_of_text_first and context[0] != eot):
            context = (eot, *context)
        return context, continuation

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        return [tuple(ids.tolist()) for ids in self.tokenizer.encode_batch(texts)]
