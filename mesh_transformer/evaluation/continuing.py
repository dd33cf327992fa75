"""Prompts that a task wants continued, and how: lm-evaluation-harness's generation arguments, checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from mesh_transformer.errors import EvaluationError
from mesh_transformer.evaluation.requests import Ids

logger = logging.getLogger(__name__)

MAX_TOKENS = 256  # where a task does not say, as in lm-evaluation-harness
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first given counts
_SAMPLER_NAMES = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}
# What changes nothing about a greedy text, or is its default elsewhere.
_HARMLESS = {"do_sample": (True, False), "num_beams": (1,), "repetition_penalty": (1, 1.0), "use_cache": (True, False)}

_ignored: set[str] = set()  # arguments that were warned about


class Options(NamedTuple):
    """`until`: strings that end a text, and are not part of it.  sampler: (option, value) as in `sampler_of`."""

    max_tokens: int
    until: tuple[str, ...]
    sampler: tuple[tuple[str, float], ...]

    @property
    def sampled(self) -> bool:
        return dict(self.sampler).get("temp", 1.0) != 0


class Prompt(NamedTuple):
    """Token ids to continue. `seed` is 0 where nothing is drawn at random, so that equal prompts are one."""

    ids: Ids
    options: Options
    seed: int


@runtime_checkable
class Continuing(Protocol):
    """A scorer that can generate, too."""

    def continued(self, prompts: Sequence[Prompt]) -> list[str]:
        """What follows each prompt; all have the same options."""


def options_of(arguments: Mapping[str, Any]) -> Options:
    """Of a task's generation arguments. Greedy, unless `do_sample` or a temperature above 0 says otherwise.

    Raises EvaluationError for values that cannot be used; arguments that mean nothing here are ignored, with a warning.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    until = given.pop("until", ())
    until = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(each, str) for each in until):
        raise EvaluationError(f"until ({until!r}) of a task must be a string or strings")
    lengths = [given.pop(name) for name in _LENGTH_NAMES if name in given]
    max_tokens = lengths[0] if lengths else MAX_TOKENS
    if isinstance(max_tokens, bool) or int(max_tokens) != max_tokens or max_tokens < 1:
        raise EvaluationError(f"max_gen_toks ({max_tokens!r}) of a task must be an integer of at least 1")
    sampler = {ours: given.pop(theirs) for theirs, ours in _SAMPLER_NAMES.items() if theirs in given}
    temp = float(sampler.get("temp", 1.0 if given.get("do_sample") else 0.0))
    if temp == 0 or given.get("do_sample") is False:
        sampler = {"temp": 0.0}
    else:
        sampler["temp"] = temp
        if sampler.get("top_k") in (0, -1):  # how others say off
            del sampler["top_k"]
    for name, value in given.items():
        if value not in _HARMLESS.get(name, ()) and name not in _ignored:
            _ignored.add(name)
            logger.warning("generation argument %s (%r) of a task is ignored", name, value)
    return Options(int(max_tokens), tuple(each for each in until if each), tuple(sorted(sampler.items())))
