"""The model class of lm-evaluation-harness, registered as `mesh_transformer`.

Importing this module imports the harness, which is an extra (`evaluation`): see `tasks.harness`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from mesh_transformer.evaluation.evaluator import Evaluator
from mesh_transformer.evaluation.opening import Opened, Source, open_evaluator


@register_model("mesh_transformer")
class MeshTransformerLM(LM):
    """An evaluator, as the harness talks to models. One process has all requests, whatever the mesh."""

    def __init__(self, evaluator: Evaluator, about: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._evaluator, self._about = evaluator, dict(about or {})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """From `--model_args config=F,ckpt=P,...`: see `Source` for their names."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        # The harness's own options for torch's devices mean nothing here; its batch size does.
        more = {k: v for k, v in (additional_config or {}).items() if k == "batch_size" and v is not None}
        opened: Opened = open_evaluator(Source.of({**more, **arg_dict}))
        return cls(opened.evaluator, opened.about)

    @property
    def tokenizer_name(self) -> str:
        return self._evaluator.encoder.tokenizer.hash

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        asked = [request.args for request in requests]
        return self._kept("loglikelihood", asked, [tuple(s) for s in self._evaluator.loglikelihood(asked)])

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        asked = [request.args for request in requests]
        found = self._evaluator.loglikelihood_rolling([text for (text,) in asked])
        return self._kept("loglikelihood_rolling", asked, found)

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        asked = [request.args for request in requests]
        return self._kept("generate_until", asked, self._evaluator.generate_until(asked))

    def get_model_info(self) -> dict[str, Any]:
        """What the harness's own results say about the model."""
        return self._about

    def _kept(self, kind: str, asked: Sequence[Any], found: list[Any]) -> list[Any]:
        """`found`, also handed to the harness's own cache, where one is in use."""
        for question, answer in zip(asked, found, strict=True):
            self.cache_hook.add_partial(kind, question, answer)
        return found
