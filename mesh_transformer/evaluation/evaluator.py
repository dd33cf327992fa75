"""Scores of texts, in the order in which they were asked for; needs no harness.

What has been scored is looked up first, equal windows are scored once, and what is left goes to the scorer in batches.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import jax

from mesh_transformer.errors import EvaluationError
from mesh_transformer.evaluation import batching
from mesh_transformer.evaluation.answers import Answers
from mesh_transformer.evaluation.batching import Batch, Budget, Group
from mesh_transformer.evaluation.continuing import Continuing, Prompt, options_of
from mesh_transformer.evaluation.requests import Encoder, Window
from mesh_transformer.evaluation.scorer import Score, Scorer
from mesh_transformer.progress import Progress

logger = logging.getLogger(__name__)

TOKENS_A_REPLICA = 8192  # of a batch, where its size is left open


class Stopped(Exception):  # noqa: N818  not an error: somebody asked for it
    """The evaluation was asked to stop; what it has scored so far is in its answers."""


class Evaluator:
    """Texts, through `encoder` and `scorer`, to scores.

    answers: where scores are kept.  rows: contexts of a batch; None goes by tokens, and takes fewer when memory does
    not suffice.  progress: where a bar is shown.  stop: asked between batches whether to raise Stopped.
    """

    def __init__(
        self,
        scorer: Scorer,
        encoder: Encoder,
        *,
        answers: Answers | None = None,
        rows: int | None = None,
        progress: TextIO | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._scorer, self.encoder = scorer, encoder
        self._answers = answers if answers is not None else Answers(None, {})
        self._budget = Budget(TOKENS_A_REPLICA * scorer.replicas, scorer.replicas, rows)
        self._progress, self._stop = progress, stop

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[Score]:
        """The score of each continuation behind its context. An empty one is certain: 0, and greedy."""
        return self._sums(self.encoder.pairs(requests), "likelihoods")

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each whole text, every token scored once."""
        return [score.logprob for score in self._sums(self.encoder.documents(texts), "rolling likelihoods")]

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The continuation of each prompt, by lm-evaluation-harness's generation arguments, up to a stop string."""
        options = [options_of(arguments) for _, arguments in requests]
        ids = self.encoder.prompts([text for text, _ in requests], [each.max_tokens for each in options])
        prompts = [
            Prompt(each, option, number if option.sampled else 0)
            for number, (each, option) in enumerate(zip(ids, options, strict=True))
        ]
        found = self._answered(prompts, "generated texts", self._generated)
        return [str(found[prompt]) for prompt in prompts]

    def _sums(self, requests: Sequence[Sequence[Window]], title: str) -> list[Score]:
        windows = [window for request in requests for window in request]
        found = self._answered(windows, title, self._scored)
        scores = []
        for request in requests:
            each = [Score(*found[window]) for window in request]
            scores.append(Score(sum(score.logprob for score in each), all(score.greedy for score in each)))
        return scores

    def _answered(
        self, questions: Iterable[Any], title: str, work: Callable[[list[Any]], Iterator[list[tuple[Any, Any]]]]
    ) -> dict[Any, Any]:
        """The answer to each question, known or from `work`, which yields (question, answer) as they come."""
        found = {question: self._answers.get(question) for question in dict.fromkeys(questions)}
        missing = [question for question, answer in found.items() if answer is None]
        if len(missing) < len(found):
            logger.info("%s: %d of %d are known already", title, len(found) - len(missing), len(found))
        with contextlib.ExitStack() as stack:
            progress = None
            if self._progress is not None and missing:
                shown = Progress(title, len(missing), unit="requests", stream=self._progress)
                progress = stack.enter_context(shown)
            for answered in work(missing):
                self._answers.add(answered)
                found.update(answered)
                if progress is not None:
                    progress.advance(len(answered))
        return found

    def _scored(self, windows: list[Window]) -> Iterator[list[tuple[Window, Score]]]:
        """Scores of all windows. A batch computes while the one before is read."""
        todo, budget = batching.group(windows), self._budget
        while todo:
            done: set[int] = set()
            try:
                for batch, scores in _one_ahead(batching.batches(todo, budget, self._scorer.seq), self._start):
                    done.update(id(group) for group in batch.groups)
                    yield list(zip(_windows(batch.groups), scores, strict=True))
            except jax.errors.JaxRuntimeError as error:
                smaller = budget.halved()
                if "RESOURCE_EXHAUSTED" not in str(error) or smaller is None:
                    raise
                budget = self._budget = smaller
                logger.warning("the memory of the devices does not suffice for a batch: going on with half as much")
            todo = [group for group in todo if id(group) not in done]

    def _start(self, batch: Batch) -> Callable[[], list[Score]]:
        if self._stop():
            raise Stopped
        return self._scorer.score(batch)

    def _generated(self, prompts: list[Prompt]) -> Iterator[list[tuple[Prompt, str]]]:
        if not isinstance(self._scorer, Continuing):
            raise EvaluationError("this model scores only: leave out tasks that generate text")
        for batch in batching.prompts(prompts, self._budget, self._scorer.seq):
            if self._stop():
                raise Stopped
            yield list(zip(batch, self._scorer.continued(batch), strict=True))


def _windows(groups: Iterable[Group]) -> list[Window]:
    return [Window(group.context, each) for group in groups for each in group.continuations]


def _one_ahead(
    batches: Iterable[Batch], start: Callable[[Batch], Callable[[], list[Score]]]
) -> Iterator[tuple[Batch, list[Score]]]:
    """Each batch with its scores, read when the next one has been started."""
    behind: tuple[Batch, Callable[[], list[Score]]] | None = None
    for batch in batches:
        started = start(batch)
        if behind is not None:
            yield behind[0], behind[1]()
        behind = batch, started
    if behind is not None:
        yield behind[0], behind[1]()
