"""From prompts to generated tokens: batches of any prompts, decoded chunk by chunk.

Letters: B rows asked for, G tokens generated for a row at most.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mesh_transformer import batching, decoding, steps
from mesh_transformer import sampler as samplers
from mesh_transformer.config import Config, ModelConfig
from mesh_transformer.decoder_shard import MAX_POSITIONS, window_of
from mesh_transformer.decoder_weights import Weights, weights
from mesh_transformer.decoding import CHUNK, Drawn, Prompts, bucket, cache_bucket
from mesh_transformer.errors import ConfigError, DataError
from mesh_transformer.mesh import DP
from mesh_transformer.sampler import Mode, Sampler, mode_of, sampler_of
from mesh_transformer.sampling import LogProbs
from mesh_transformer.state import Params

logger = logging.getLogger(__name__)

GPT2_END_OF_TEXT = 50256
PREFILL = 512  # tokens of a prompt that are read at once
# A released row has been ended by whoever released it (see `Stream.end`).
FINISH_REASONS = {
    decoding.RUNNING: None, decoding.STOPPED: "stop", decoding.FULL: "length", decoding.IDLE: "stop",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one call of the device brought for each row: its new tokens, a stop id left out; why it ended (`stop`, a
    stop id; `length`, its limit or the end of a `fixed` model's table; None, it goes on); and, if asked for, the
    logits [n, V] that each drawn token came from, the stop id's included, and the tokens' log-probabilities, as in
    `sampling.LogProbs` with the row's tokens in place of the rows."""

    tokens: list[list[int]]
    finish_reasons: list[str | None]
    logits: list[np.ndarray] | None
    logprobs: list[LogProbs] | None


def fit_prompt(ids: Sequence[int] | np.ndarray, model: ModelConfig, eot_id: int | None) -> list[int]:
    """The prompt as the model reads it: an empty one is one end-of-text token, of a long one the last `seq` tokens.

    Logs a warning when tokens are dropped. Raises DataError for an id that the model does not have, and for an empty
    prompt where `eot_id` is None.
    """
    ids = [int(i) for i in ids]
    if not ids:
        if eot_id is None:
            raise DataError("the prompt is empty, and no end-of-text id was given to stand for it: pass eot_id")
        ids = [int(eot_id)]
    outside = [i for i in ids if not 0 <= i < model.n_vocab]
    if outside:
        raise DataError(
            f"the prompt has the id {outside[0]}, expected 0 to {model.n_vocab - 1} (n_vocab {model.n_vocab})"
        )
    if len(ids) > model.seq:
        logger.warning(
            "the prompt has %d tokens, the context %d: only the last %d are used", len(ids), model.seq, model.seq
        )
    return ids[-model.seq :]


def end_of_text(config: Config) -> int:
    """The id that ends a document for the config's tokenizer. Raises DataError where the model has no such id."""
    from mesh_transformer.data import tokenizer

    if config.data.tokenizer == "gpt2" and config.model.n_vocab > GPT2_END_OF_TEXT:
        return GPT2_END_OF_TEXT  # known, so that no file or network is needed
    found = tokenizer.load_tokenizer(config.data.tokenizer)
    tokenizer.check_vocabulary(found, config.model.n_vocab)
    return found.eot_id


def room(model: ModelConfig, length: int) -> int:
    """How many tokens can follow a prompt of `length` tokens.

    A `fixed` table ends: its last position still predicts one more token. Otherwise the context slides.
    """
    return model.seq + 1 - length if model.pe == "fixed" else MAX_POSITIONS - length


class Stream:
    """Generates for each prompt (fitted, see `fit_prompt`) up to its `max_tokens`; an iterator of `Piece`s.

    The first piece has one token a row, later ones up to `chunk` (at most CHUNK). Rows do not influence each other.
    `stop_ids` end a row; ids from `n_tokens` on are never drawn. Not iterating further stops the work. Raises
    DataError where a row's logits are not finite.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        params: Params | Weights,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        sampler: Sampler,
        stop_ids: Sequence[Sequence[int]],
        n_tokens: int | None = None,
        mode: Mode | None = None,
        chunk: int = CHUNK,
    ):
        self.steps = 0  # of the token loop, so far
        self._model, self._mesh, self._wanted = model, mesh, len(prompts)
        self._weights = weights(model, mesh, params)
        self._mode = mode_of(sampler) if mode is None else mode
        self._known = np.int32(model.n_vocab if n_tokens is None else n_tokens)
        self._count = np.int32(min(chunk, CHUNK))
        self._batch = Batch(model, mesh, prompts, max_tokens, sampler, stop_ids)
        self._rows: decoding.Rows | None = None
        self._reasons: list[str | None] = [None] * len(prompts)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        if None not in self._reasons:
            raise StopIteration
        if self._rows is None:
            self._rows, drawn = self._batch.start(self._weights, self._known, self._mode)
        else:
            step = decoding.decode_steps(self._model, self._mesh, self._mode)
            self._rows, drawn = step(self._weights, self._rows, self._count, self._known)
        piece = _piece(drawn, self._wanted)
        self.steps += int(drawn.steps)
        self._reasons = [old or new for old, new in zip(self._reasons, piece.finish_reasons, strict=True)]
        return piece

    def end(self, rows: Sequence[int]) -> None:
        """Ends these rows with `stop`: a caller who reads the text has seen where it stops. They draw no more."""
        if not rows or self._rows is None:
            return
        mask = np.zeros(len(self._rows.status), bool)
        mask[list(rows)] = True
        self._rows = batching.release(self._rows, mask)
        for row in rows:
            self._reasons[row] = "stop"


class Batch:
    """Prompts of one call as a batch of rows. All sizes are buckets, so that prompts of about the same size share what
    is compiled: rows are filled up to dp times a power of two, lengths to powers of two, stop ids likewise."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        sampler: Sampler,
        stop_ids: Sequence[Sequence[int]],
    ):
        dp, wanted = mesh.shape[DP], len(prompts)
        self.model, self.mesh, self.prompts = model, mesh, prompts
        self.sampler, self.stop_ids = sampler, stop_ids
        self.size = dp * bucket(-(-wanted // dp), wanted, 1)
        self.lengths = [len(p) for p in prompts]
        self.limits = [min(limit, room(model, n)) for limit, n in zip(max_tokens, self.lengths, strict=True)]
        # The last token drawn is never put into the cache.
        needed = [n + max(limit, 1) - 1 for n, limit in zip(self.lengths, self.limits, strict=True)]
        self.slots = cache_bucket(max(needed), model.seq)
        most = max(map(len, stop_ids), default=0)
        self.stop_width = bucket(most, max(most, 1), 1)

    def start(self, weights: Weights, known: np.int32, mode: Mode) -> tuple[decoding.Rows, Drawn]:
        """Reads the prompts and draws a token for each row: at once, or chunk by chunk where they are long."""
        longest = max(self.lengths)
        if longest > min(PREFILL, window_of(self.model, mode.window)):
            return self._start_long(weights, known, mode)
        prefill = decoding.prefill_step(self.model, self.mesh, self.slots, mode)
        return prefill(weights, self.place(mode), known)

    def place(self, mode: Mode) -> Prompts:
        """The padded prompts on the devices."""
        filler = self.size - len(self.prompts)
        tokens = np.zeros((self.size, bucket(max(self.lengths), self.model.seq)), np.int32)
        stop = np.full((self.size, self.stop_width), -1, np.int32)
        for i, (prompt, ids) in enumerate(zip(self.prompts, self.stop_ids, strict=True)):
            tokens[i, : len(prompt)], stop[i, : len(ids)] = prompt, list(ids)
        rest = samplers.filler(self.sampler, filler)
        whole = Prompts(
            tokens,
            np.array(self.lengths + [1] * filler, np.int32),
            np.array(self.limits + [0] * filler, np.int32),
            stop,
            jax.tree.map(lambda x, y: np.concatenate([x, y]), self.sampler, rest),
        )
        return steps.place(self.mesh, decoding.prompts_spec(mode), whole)

    def _start_long(self, weights: Weights, known: np.int32, mode: Mode) -> tuple[decoding.Rows, Drawn]:
        """The prompts PREFILL tokens at a time: memory and compiled shapes do not grow with their length."""
        rows = batching.idle_rows(self.model, self.mesh, self.size, self.slots, self.stop_width, mode)
        extend = batching.extend_step(self.model, self.mesh, mode)
        found: list[tuple[np.ndarray, Drawn]] = []
        for start in range(0, max(self.lengths), PREFILL):
            # One part for each row, in their order, so that what is drawn is in that order too.
            parts = [self._part(i, start) for i in range(self.size)]
            chunk = batching.place_chunk(self.mesh, self.size, self.slots, parts, self.stop_width, mode)
            rows, drawn = extend(weights, rows, chunk, known)
            found.append((np.array([len(part.tokens) > 0 for part in parts]), jax.tree.map(np.asarray, drawn)))
        whole = found[0][1]
        for fed, drawn in found[1:]:
            whole = jax.tree.map(functools.partial(_where, fed), drawn, whole)
        return rows, whole

    def _part(self, i: int, start: int) -> batching.Part:
        if i >= len(self.prompts):
            return batching.Part(i, [], 0, False, 0, [], samplers.filler(self.sampler, 1))
        tokens = self.prompts[i][start : start + PREFILL]
        mine = jax.tree.map(lambda x: x[i : i + 1], self.sampler)
        return batching.Part(
            i, tokens, start, start + len(tokens) == self.lengths[i], self.limits[i], self.stop_ids[i], mine
        )


def _where(fed: np.ndarray, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    return np.where(fed.reshape(-1, *[1] * (new.ndim - 1)), new, old) if new.ndim else new


def _piece(drawn: Drawn, wanted: int) -> Piece:
    """The rows that were asked for, on the host."""
    tokens, counts, status = (np.asarray(x)[:wanted] for x in (drawn.tokens, drawn.counts, drawn.status))
    if (status == decoding.BROKEN).any():
        raise DataError("the model's logits are not finite: the weights are damaged, or overflow in this compute_dtype")
    stopped = (status == decoding.STOPPED) & (counts > 0)  # in this piece, so that its last token is a stop id
    own = counts - stopped
    logprobs = None
    if drawn.logprobs is not None:
        found = [np.asarray(x) for x in drawn.logprobs]
        logprobs = [LogProbs(*(x[i, :n] for x in found)) for i, n in enumerate(own)]
    return Piece(
        [row[:n].tolist() for row, n in zip(tokens, own, strict=True)],
        [FINISH_REASONS[int(s)] for s in status],
        None if drawn.logits is None else [x[:n] for x, n in zip(np.asarray(drawn.logits), counts, strict=False)],
        logprobs,
    )


def generate(
    model: ModelConfig,
    mesh: Mesh,
    params: Params | Weights,
    context: Any,
    ctx_length: Any,
    gen_length: int,
    sampler_options: Mapping[str, Any] | None,
    return_logits: bool,
    seed: int | Sequence[int],
    eot_id: int | None,
    n_tokens: int | None,
) -> dict[str, np.ndarray]:
    """What `CausalTransformer.generate` says, on parameters."""
    prompts = [fit_prompt(ids, model, eot_id) for ids in _right_aligned(context, ctx_length)]
    if isinstance(gen_length, bool) or int(gen_length) != gen_length or not 1 <= gen_length < MAX_POSITIONS - model.seq:
        limit = MAX_POSITIONS - model.seq - 1
        raise ConfigError(f"gen_length ({gen_length!r}) must be an integer from 1 to {limit}")
    G, B = int(gen_length), len(prompts)
    options = dict(sampler_options or {})
    order, window = options.pop("filter_order", "reference"), options.pop("window", "full")
    sampler = sampler_of(options, B, seed)
    mode = mode_of(sampler, order, window, logits=return_logits)
    out = {"tokens": np.zeros((B, G), np.int32), "lengths": np.zeros(B, np.int32)}
    if return_logits:
        out["logits"] = np.zeros((B, G, model.n_vocab), np.float32)
    for piece in Stream(model, mesh, params, prompts, [G] * B, sampler, [()] * B, n_tokens, mode):
        for i, new in enumerate(piece.tokens):
            start, stop = out["lengths"][i], out["lengths"][i] + len(new)
            out["tokens"][i, start:stop] = new
            if piece.logits is not None:
                out["logits"][i, start:stop] = piece.logits[i]
            out["lengths"][i] = stop
    if out["lengths"].min() < G:
        logger.warning("a model with pe fixed ends with its table of seq (%d) positions: rows stop there", model.seq)
    return out


def _right_aligned(context: Any, ctx_length: Any) -> list[np.ndarray]:
    """The rows' prompts from [B, S] and their lengths [B]. Raises DataError where these do not fit."""
    context, lengths = np.asarray(context), np.asarray(ctx_length).reshape(-1)
    if context.ndim != 2 or not len(context) or not np.issubdtype(context.dtype, np.integer):
        raise DataError(f"context must be token ids [B, S], right-aligned, found {context.dtype} {context.shape}")
    if lengths.shape != context.shape[:1] or not np.issubdtype(lengths.dtype, np.integer):
        raise DataError(
            f"ctx_length must be {len(context)} integers, one for each row of context, found {ctx_length!r}"
        )
    S = context.shape[1]
    if lengths.min() < 0 or lengths.max() > S:
        raise DataError(f"ctx_length must be from 0 to {S}, the width of context, found {lengths.tolist()}")
    return [row[S - int(n) :] for row, n in zip(context, lengths, strict=True)]
