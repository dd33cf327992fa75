"""Tokenizing a stream of pieces, in this process or in several, always in the same order with the same result."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from mesh_transformer.data.documents import Piece
from mesh_transformer.data.normalise import normaliser
from mesh_transformer.data.tokenizer import Tokenizer, load_tokenizer

NumberedPiece = tuple[int, Piece]  # with the number of the file it is from

_JOB_CHARS = 1 << 18  # characters in a job: large enough that starting one costs nothing
_JOBS_AHEAD = 3  # per worker; what bounds the memory

_encoder: Encoder | None = None  # of this process, if it is a worker


@dataclass(frozen=True)
class EncodingOptions:
    """What is done to a text. `literal`: names of special tokens in it are text like any other."""

    tokenizer: str
    literal: bool = False
    ftfy: bool = False
    wikitext: bool = False


class Encoder:
    """Clean-up and tokenizer together."""

    def __init__(self, options: EncodingOptions, tokenizer: Tokenizer | None = None) -> None:
        # One core per worker: the tokenizer's own threads would compete with the other workers.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._literal = options.literal
        self._normalise = normaliser(options.ftfy, options.wikitext)
        self._tokenizer = tokenizer or load_tokenizer(options.tokenizer)

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """uint32 ids of each text."""
        return self._tokenizer.encode_batch([self._normalise(text) for text in texts], self._literal)


def encode_pieces(
    stream: Iterable[NumberedPiece], options: EncodingOptions, tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[int, Piece, np.ndarray]]:
    """(file number, piece, its uint32 ids) of each piece, in order; memory is bounded by a few jobs per worker."""
    if workers <= 1:
        encoder = Encoder(options, tokenizer)
        for job in _jobs(stream):
            yield from _joined(job, encoder(_texts(job)))
        return
    waiting: deque[tuple[list[NumberedPiece], Future[list[np.ndarray]]]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (options,)) as pool:
        try:
            for job in _jobs(stream):
                waiting.append((job, pool.submit(_encode_in_worker, _texts(job))))
                if len(waiting) > workers * _JOBS_AHEAD:
                    done, future = waiting.popleft()
                    yield from _joined(done, future.result())
            for done, future in waiting:
                yield from _joined(done, future.result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _texts(job: list[NumberedPiece]) -> list[str]:
    return [piece.text for _, piece in job]


def _joined(job: list[NumberedPiece], encoded: list[np.ndarray]) -> Iterator[tuple[int, Piece, np.ndarray]]:
    return ((number, piece, ids) for (number, piece), ids in zip(job, encoded, strict=True))


def _jobs(stream: Iterable[NumberedPiece]) -> Iterator[list[NumberedPiece]]:
    job: list[NumberedPiece] = []
    chars = 0
    for numbered in stream:
        job.append(numbered)
        chars += len(numbered[1].text) + 64  # so that many empty pieces end a job too
        if chars >= _JOB_CHARS:
            yield job
            job, chars = [], 0
    if job:
        yield job


def _start_worker(options: EncodingOptions) -> None:
    global _encoder
    _encoder = Encoder(options)


def _encode_in_worker(texts: list[str]) -> list[np.ndarray]:
    if _encoder is None:
        raise RuntimeError("the worker was not started by encode_pieces")
    return _encoder(texts)
