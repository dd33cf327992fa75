"""From prompts to generated tokens: batches of any prompts, decoded chunk by chunk.

Letters: B rows asked for, G tokens generated for a row at most.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mesh_transformer import decoding, steps
from mesh_transformer.config import Config, ModelConfig
from mesh_transformer.decoding import CHUNK, MAX_POSITIONS, Drawn, Prompts, bucket
from mesh_transformer.errors import ConfigError, DataError
from mesh_transformer.mesh import DP
from mesh_transformer.sampling import NO_TOP_K, Sampler, sampler_of
from mesh_transformer.state import Params

logger = logging.getLogger(__name__)

GPT2_END_OF_TEXT = 50256
FINISH_REASONS = {decoding.RUNNING: None, decoding.STOPPED: "stop", decoding.FULL: "length"}


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one call of the device brought for each row: its new tokens, a stop id left out; why it ended (`stop`, a
    stop id; `length`, its limit or the end of a `fixed` model's table; None, it goes on); and, if asked for, the
    logits [n, V] that each drawn token came from, the stop id's included."""

    tokens: list[list[int]]
    finish_reasons: list[str | None]
    logits: list[np.ndarray] | None


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


def stream(
    model: ModelConfig,
    mesh: Mesh,
    params: Params,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    sampler: Sampler,
    stop_ids: Sequence[int] = (),
    n_tokens: int | None = None,
    with_logits: bool = False,
    chunk: int = CHUNK,
) -> Iterator[Piece]:
    """Generates for each prompt (fitted, see `fit_prompt`) up to its `max_tokens`; yields as tokens come.

    The first piece has one token a row, later ones up to `chunk` (at most CHUNK). Rows do not influence each other.
    `stop_ids` end a row; ids from `n_tokens` on are never drawn. Closing the iterator stops the work.
    """
    placed, slots = place(model, mesh, prompts, max_tokens, sampler, stop_ids)
    known = np.int32(model.n_vocab if n_tokens is None else n_tokens)
    rows, drawn = decoding.prefill_step(model, mesh, slots, with_logits)(params, placed, known)
    piece = _piece(drawn, len(prompts))
    yield piece
    step = decoding.decode_steps(model, mesh, with_logits)
    while None in piece.finish_reasons:
        rows, drawn = step(params, rows, np.int32(min(chunk, CHUNK)), known)
        piece = _piece(drawn, len(prompts))
        yield piece


def place(
    model: ModelConfig,
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    sampler: Sampler,
    stop_ids: Sequence[int],
) -> tuple[Prompts, int]:
    """The padded batch on the devices, and the cache's number of slots.

    All sizes are buckets, so that prompts of about the same size share what is compiled: rows are filled up to dp
    times a power of two, lengths to powers of two, stop ids likewise.
    """
    dp, wanted = mesh.shape[DP], len(prompts)
    batch = dp * bucket(-(-wanted // dp), wanted, 1)
    lengths = [len(p) for p in prompts]
    limits = [min(limit, room(model, n)) for limit, n in zip(max_tokens, lengths, strict=True)]
    # The last token drawn is never put into the cache.
    slots = bucket(max(n + max(limit, 1) - 1 for n, limit in zip(lengths, limits, strict=True)), model.seq)
    tokens = np.zeros((batch, bucket(max(lengths), model.seq)), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
    stop = np.full((batch, bucket(len(stop_ids), max(len(stop_ids), 1), 1)), -1, np.int32)
    stop[:, : len(stop_ids)] = np.asarray(list(stop_ids), np.int32)
    filler = batch - wanted
    greedy = Sampler(*(np.zeros((filler, *x.shape[1:]), x.dtype) for x in sampler))._replace(
        top_k=np.full(filler, NO_TOP_K, np.int32)
    )
    whole = Prompts(
        tokens,
        np.array(lengths + [1] * filler, np.int32),
        np.array(limits + [0] * filler, np.int32),
        stop,
        jax.tree.map(lambda x, y: np.concatenate([x, y]), sampler, greedy),
    )
    return steps.place(mesh, decoding.PROMPTS_SPEC, whole), slots


def _piece(drawn: Drawn, wanted: int) -> Piece:
    """The rows that were asked for, on the host."""
    tokens, counts, status = (np.asarray(x)[:wanted] for x in (drawn.tokens, drawn.counts, drawn.status))
    stopped = (status == decoding.STOPPED) & (counts > 0)  # in this piece, so that its last token is a stop id
    return Piece(
        [row[:n].tolist() for row, n in zip(tokens, counts - stopped, strict=True)],
        [FINISH_REASONS[int(s)] for s in status],
        None if drawn.logits is None else [x[:n] for x, n in zip(np.asarray(drawn.logits), counts, strict=False)],
    )


def generate(
    model: ModelConfig,
    mesh: Mesh,
    params: Params,
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
    sampler = sampler_of(sampler_options, B, seed)
    out = {"tokens": np.zeros((B, G), np.int32), "lengths": np.zeros(B, np.int32)}
    if return_logits:
        out["logits"] = np.zeros((B, G, model.n_vocab), np.float32)
    for piece in stream(
        model, mesh, params, prompts, [G] * B, sampler, n_tokens=n_tokens, with_logits=return_logits
    ):  # fmt: skip
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
