"""Scores batches of texts on the hosts of a cluster, each of which gets them whole: they are small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mesh_transformer.cluster.crew import Crew, Pending
from mesh_transformer.cluster.worker import Held

if TYPE_CHECKING:
    from mesh_transformer.data.tokenizer import Tokenizer
    from mesh_transformer.evaluation.batching import Batch
    from mesh_transformer.evaluation.continuing import Prompt
    from mesh_transformer.evaluation.scorer import Score

OPERATION = "evaluating tasks"


class PodScorer:
    """A `Scorer`, with the weights that the hosts have when this is made."""

    def __init__(self, crew: Crew, held: Held, seq: int, tokenizer: Tokenizer) -> None:
        self._crew, self._held, self._seq = crew, held, seq
        crew.call("begin_scoring", tokenizer, operation=OPERATION)

    @property
    def replicas(self) -> int:
        return self._held.dp

    @property
    def seq(self) -> int:
        return self._seq

    def score(self, batch: Batch) -> Callable[[], list[Score]]:
        sent = self._crew.submit("score", batch, operation=OPERATION)

        def read() -> list[Score]:
            asked = self._crew.submit("result", each=self._crew.first_alone(), operation=OPERATION)
            found: list[Any] = self._crew.results(Pending((*sent.refs, *asked.refs), OPERATION))
            scores: list[Score] = found[len(sent.refs)]
            return scores

        return read

    def continued(self, prompts: Sequence[Prompt]) -> list[str]:
        texts: list[str] = self._crew.call("continued", list(prompts), operation=OPERATION)[0]
        return texts
