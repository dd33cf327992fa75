"""The running batch on the devices: rows that join it, prompt chunk by prompt chunk, get tokens, and leave it.

A prompt is read in a place of its own, one a replica, and moved into the batch when it is whole. The batch's shape
never changes: `size` rows, a cache of `slots` positions. So everything is compiled before the first request, and what a
row draws is, bit for bit, what it would draw if nobody else were there.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator

import numpy as np
from jax.sharding import PartitionSpec as P

from mesh_transformer import batching, decoding, generation, scoring, steps
from mesh_transformer.answer import Answer, Completion
from mesh_transformer.completion import Completer, Options, sampler_for
from mesh_transformer.decoder_shard import window_of
from mesh_transformer.mesh import DP
from mesh_transformer.sampler import Mode, Sampler
from mesh_transformer.sampling import LogProbs
from mesh_transformer.serving.limits import Limits
from mesh_transformer.serving.schemas import MOST_BIAS, MOST_LOGPROBS

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Output:
    """A row got: the next part of its text (None where its logits were not finite), whether it is the first, and with
    the first, if asked for, log-probabilities of the prompt's tokens but the first, [P - 1] and [P - 1, k]."""

    row: int
    completion: Completion | None
    first: bool
    prompt: LogProbs | None = None


@dataclasses.dataclass
class _Text:
    """What stands in a row: the prompt, how much of it was read, and the answer so far."""

    prompt: list[int]
    limit: int
    sampler: Sampler
    answer: Answer
    wants_logprobs: bool
    echoes: bool
    read: int = 0
    listed: list[LogProbs] = dataclasses.field(default_factory=list)  # of the prompt, chunk by chunk

    @property
    def whole(self) -> bool:
        return self.read == len(self.prompt)


class Batch:
    """Rows 0 to `limits.max_batch` - 1. Not thread-safe: the engine's thread alone calls it.

    Any step may raise; `reset` then makes an empty batch of it again.
    """

    def __init__(self, completer: Completer, limits: Limits, filter_order: str = "reference", window: str = "full"):
        network = completer.network
        self._weights, self._model, self._mesh = network.weights, network.model, network.mesh
        self._tokenizer, self._dp = completer.tokenizer, network.mesh.shape[DP]
        self._known = np.int32(self._tokenizer.vocab_size)
        self._mode = Mode(filter_order, window, penalties=True, bias=MOST_BIAS, logprobs=MOST_LOGPROBS)
        self.size = self._dp * -(-limits.max_batch // self._dp)
        # The last token drawn is never put into the cache.
        longest = min(limits.max_prompt, self._model.seq) + limits.max_tokens - 1
        self.slots = decoding.bucket(longest, self._model.seq)
        self.chunk = decoding.bucket(limits.chunk, min(self.slots, window_of(self._model, window)))
        self._extend = batching.extend_step(self._model, self._mesh, self._mode)
        self._join = batching.join_step(self._model, self._mesh, self._mode)
        self._listed = scoring.listed_step(self._model, self._mesh, MOST_LOGPROBS, window)
        self._decode = decoding.decode_steps(self._model, self._mesh, self._mode)
        self.reset()

    def reset(self) -> None:
        """An empty batch, whatever has become of the last one."""
        self._texts: dict[int, _Text] = {}
        self._rows, self._arriving = (
            batching.idle_rows(self._model, self._mesh, size, self.slots, 1, self._mode)
            for size in (self.size, self._dp)
        )

    def compile(self) -> None:
        """Takes every step once, in every shape that can come up."""
        widths = {decoding.bucket(width, self.chunk) for width in range(1, self.chunk + 1)}
        for width in sorted(widths):
            self.begin(0, [self._tokenizer.eot_id] * width, Options(max_tokens=2), echo=True)
            self.read()
            self.decode(1)
            self.release([0])
        self.reset()
        logger.info("compiled: %d rows of %d positions, prompts %d tokens at a time", self.size, self.slots, self.chunk)

    def begin(self, row: int, prompt: list[int], options: Options, echo: bool = False) -> None:
        """Puts a fitted prompt into a free row; `read` will read it. Raises ConfigError for options that do not fit.

        echo: log-probabilities of the prompt's tokens are wanted.
        """
        limit = min(options.max_tokens, generation.room(self._model, len(prompt)))
        self._texts[row] = _Text(
            prompt, limit, sampler_for([options], self._mode), Answer(self._tokenizer, options.stop),
            options.sampler.get("logprobs") is not None, echo,
        )  # fmt: skip

    @property
    def reading(self) -> bool:
        """Whether a prompt is still to be read."""
        return any(not text.whole for text in self._texts.values())

    def read(self) -> list[Output]:
        """The next chunk of the oldest prompt that is not whole, in each replica; the last chunk brings a token."""
        rows: dict[int, int] = {}  # by replica
        for row, text in self._texts.items():
            if not text.whole:
                rows.setdefault(row % self._dp, row)
        self._list_prompts(rows)
        parts = [self._part(replica, self._texts[row]) for replica, row in rows.items()]
        chunk = batching.place_chunk(self._mesh, self._dp, self.slots, parts, 1, self._mode)
        self._arriving, drawn = self._extend(self._weights, self._arriving, chunk, self._known)
        whole = {row: replica for replica, row in rows.items() if self._texts[row].whole}
        if whole:
            places, joins = np.zeros(self._dp, np.int32), np.zeros(self._dp, bool)
            for row, replica in whole.items():
                places[replica], joins[replica] = row // self._dp, True
            where = steps.place(self._mesh, (P(DP), P(DP)), (places, joins))
            self._rows = self._join(self._rows, self._arriving, *where)
        return list(self._outputs(drawn, whole, first=True))

    def _list_prompts(self, rows: dict[int, int]) -> None:
        """Notes log-probabilities of what follows each token of the chunks that are read next, where they are wanted.

        The chunk is read once more for that, in one fixed shape, against the same cache."""
        wanted = {replica: self._texts[row] for replica, row in rows.items() if self._texts[row].echoes}
        if not wanted:
            return
        start, count = np.zeros(self._dp, np.int32), np.zeros(self._dp, np.int32)
        tokens, target = (np.zeros((self._dp, self.chunk), np.int32) for _ in range(2))
        for replica, text in wanted.items():
            ids = text.prompt[text.read : text.read + self.chunk]
            following = text.prompt[text.read + 1 : text.read + 1 + len(ids)]
            start[replica], count[replica], tokens[replica, : len(ids)] = text.read, len(ids), ids
            target[replica, : len(following)] = following
        texts = scoring.Continuations(np.zeros(self._dp, np.int32), start, tokens, count, target)
        contexts = scoring.Contexts(self._arriving.keys, self._arriving.values)
        found = self._listed(self._weights, contexts, scoring.place(self._mesh, texts), self._known)
        found = LogProbs(*map(np.asarray, found))
        for replica, text in wanted.items():
            following_count = min(int(count[replica]), len(text.prompt) - 1 - text.read)
            text.listed.append(LogProbs(*(x[replica, :following_count] for x in found)))

    def _part(self, replica: int, text: _Text) -> batching.Part:
        ids = text.prompt[text.read : text.read + self.chunk]
        start, text.read = text.read, text.read + len(ids)
        return batching.Part(replica, ids, start, text.whole, text.limit, [self._tokenizer.eot_id], text.sampler)

    def decode(self, count: int) -> list[Output]:
        """Up to `count` tokens for every row whose prompt is whole."""
        entries = {row: self._place(row) for row, text in self._texts.items() if text.whole}
        if not entries:
            return []
        self._rows, drawn = self._decode(self._weights, self._rows, np.int32(count), self._known)
        return list(self._outputs(drawn, entries, first=False))

    def release(self, rows: Collection[int]) -> None:
        """Frees rows, whatever they were doing."""
        mask = np.zeros(self.size, bool)
        for row in rows:
            mask[self._place(row)] = True
            self._texts.pop(row, None)
        self._rows = batching.release(self._rows, mask)

    def _place(self, row: int) -> int:
        """Where a row lies: neighbours in different replicas, so that few rows keep all replicas busy."""
        return (row % self._dp) * (self.size // self._dp) + row // self._dp

    def _outputs(self, drawn: decoding.Drawn, entries: dict[int, int], first: bool) -> Iterator[Output]:
        tokens, counts, status = (np.asarray(x) for x in (drawn.tokens, drawn.counts, drawn.status))
        wants = any(self._texts[row].wants_logprobs for row in entries)
        listed = LogProbs(*map(np.asarray, drawn.logprobs)) if wants and drawn.logprobs is not None else None
        for row, entry in entries.items():
            text, count, ended = self._texts[row], int(counts[entry]), int(status[entry])
            if ended == decoding.BROKEN:
                yield Output(row, None, first)
                continue
            count -= ended == decoding.STOPPED and count > 0  # the stop id is no part of the text
            own = LogProbs(*(x[entry, :count] for x in listed)) if listed is not None and text.wants_logprobs else None
            ids = tokens[entry, :count].tolist()
            prompt = LogProbs(*map(np.concatenate, zip(*text.listed, strict=True))) if first and text.echoes else None
            yield Output(row, text.answer.add(ids, generation.FINISH_REASONS[ended], own), first, prompt)
