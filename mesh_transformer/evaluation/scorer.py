"""What scores a batch: here this process's network; a pod's would hand the same batches to its hosts.

Letters as in `batching`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from mesh_transformer import completion, scoring, steps
from mesh_transformer.completion import Completer
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.evaluation.batching import Batch
from mesh_transformer.evaluation.continuing import Prompt
from mesh_transformer.mesh import DP
from mesh_transformer.transformer_shard import CausalTransformer, eval_step


class Score(NamedTuple):
    """Of a continuation: the sum of its tokens' log-probabilities, in nats, and whether each was the arg-max."""

    logprob: float
    greedy: bool


class Scorer(Protocol):
    """Batches are dispatched without waiting; the functions that come back wait for the numbers."""

    @property
    def replicas(self) -> int:
        """The rows of a batch are a multiple of this."""

    @property
    def seq(self) -> int:
        """The most tokens that the model reads at once."""

    def score(self, batch: Batch) -> Callable[[], list[Score]]:
        """Start a batch; what it returns gives the scores of its windows, group by group."""


class NetworkScorer:
    """Scores, and generates, with the weights that `network` has when this is made."""

    def __init__(self, network: CausalTransformer, tokenizer: Tokenizer) -> None:
        self._network, self._completer = network, Completer(network, tokenizer)
        self._params = network.whole_params()
        # QUIRK v2-eval-z-loss: with merged heads an evaluation has the z-loss in it; a log-probability has not.
        quirk = network.model.v2_merged_heads is not None
        self._model = dataclasses.replace(network.model, z_loss="off") if quirk else network.model

    @property
    def replicas(self) -> int:
        return int(self._network.mesh.shape[DP])

    @property
    def seq(self) -> int:
        return self._network.model.seq

    def score(self, batch: Batch) -> Callable[[], list[Score]]:
        return self._together(batch) if batch.shared else self._alone(batch)

    def continued(self, prompts: Sequence[Prompt]) -> list[str]:
        options = [
            completion.Options(each.options.max_tokens, dict(each.options.sampler), each.seed, each.options.until)
            for each in prompts
        ]
        return [found.text for found in self._completer.complete([each.ids for each in prompts], options)]

    def _alone(self, batch: Batch) -> Callable[[], list[Score]]:
        """Context and continuation in one pass."""
        tokens = np.zeros((batch.rows, batch.length + 1), np.int32)
        spans = []
        for row, group in zip(tokens, batch.groups, strict=False):
            ids = group.context + group.continuations[0]
            row[: len(ids)] = ids
            spans.append(slice(len(group.context) - 1, len(ids) - 1))
        everything = np.full(batch.rows, batch.length, np.int32)
        mesh, inputs = self._network.mesh, (tokens[:, :-1], tokens[:, 1:], everything)
        out = eval_step(self._model, mesh)(self._params, *steps.place(mesh, (P(DP),) * 3, inputs))

        def read() -> list[Score]:
            losses, correct = (np.asarray(x) for x in jax.device_get((out["all_loss"], out["correct"])))
            return [_score(losses[i, span], correct[i, span]) for i, span in enumerate(spans)]

        return read

    def _together(self, batch: Batch) -> Callable[[], list[Score]]:
        """Each context once, into a cache, and its continuations against that."""
        model, mesh, K, N = self._model, self._network.mesh, batch.continuations, batch.width
        contexts = np.zeros((batch.rows, batch.length), np.int32)
        tokens, target = np.zeros((2, batch.rows * K, N), np.int32)
        start, count = np.zeros(batch.rows * K, np.int32), np.ones(batch.rows * K, np.int32)
        places = []
        for i, group in enumerate(batch.groups):
            contexts[i, : len(group.context)] = group.context
            for j, ids in enumerate(group.continuations, i * K):
                tokens[j, : len(ids)] = group.context[-1:] + ids[:-1]
                target[j, : len(ids)] = ids
                start[j], count[j] = len(group.context) - 1, len(ids)
                places.append(j)
        row = np.repeat(np.arange(batch.rows, dtype=np.int32) % (batch.rows // self.replicas), K)
        cached = scoring.context_step(model, mesh)(self._params, steps.place(mesh, P(DP), contexts))
        texts = scoring.place(mesh, scoring.Continuations(row, start, tokens, count, target))
        out = scoring.score_step(model, mesh)(self._params, cached, texts)

        def read() -> list[Score]:
            logprobs, greedy = (np.asarray(x) for x in jax.device_get(out))
            return [_score(-logprobs[j, : count[j]], greedy[j, : count[j]]) for j in places]

        return read


def _score(losses: np.ndarray, correct: np.ndarray) -> Score:
    return Score(-float(np.sum(losses, dtype=np.float64)), bool(np.all(correct)))
