"""Harness tasks in the middle of a run, on the weights that it has at that moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from mesh_transformer.completion import tokenizer_of
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.evaluation import tasks
from mesh_transformer.evaluation.evaluator import Evaluator, Stopped
from mesh_transformer.evaluation.requests import Encoder, TextOptions
from mesh_transformer.evaluation.scorer import NetworkScorer, Scorer
from mesh_transformer.transformer_shard import CausalTransformer

logger = logging.getLogger(__name__)


class TaskEvaluation:
    """The config's `eval_harness_tasks`, loaded once; a run scores all of them anew."""

    def __init__(self, config: Config) -> None:
        """Loads tasks, their data and the tokenizer. Raises EvaluationError and DataError for what is not there."""
        self._encoder = Encoder(tokenizer_of(config), config.model.seq, TextOptions())
        self._tasks: Sequence[Any] = tasks.load([tasks.Spec(name) for name in config.run.eval_harness_tasks])

    @property
    def tokenizer(self) -> Tokenizer:
        return self._encoder.tokenizer

    @property
    def seq(self) -> int:
        """The most tokens of a text that are read."""
        return self._encoder.seq

    def run(self, scorer: Scorer, stop: Callable[[], bool]) -> dict[str, float] | None:
        """`{task}-v{version}/{metric}` of all tasks; None where `stop` said so in between."""
        from mesh_transformer.evaluation.harness import MeshTransformerLM

        evaluator = Evaluator(scorer, self._encoder, stop=stop)
        try:
            results = tasks.run(MeshTransformerLM(evaluator), self._tasks)
        except Stopped:
            return None
        return tasks.metrics(results)

    def on(self, network: CausalTransformer) -> Callable[[Callable[[], bool]], dict[str, float] | None]:
        """`run`, on whatever weights `network` has when it is called."""
        return lambda stop: self.run(NetworkScorer(network, self._encoder.tokenizer), stop)


def of(config: Config) -> TaskEvaluation | None:
    """The evaluation that `config` asks for in training, or None."""
    run = config.run
    return TaskEvaluation(config) if run.eval_harness_tasks and run.eval_every else None
