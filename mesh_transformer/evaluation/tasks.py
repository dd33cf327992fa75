"""Tasks of lm-evaluation-harness: found, loaded, run; by the harness's names or as YAML files of one's own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mesh_transformer.errors import EvaluationError

if TYPE_CHECKING:
    from lm_eval.api.model import LM

logger = logging.getLogger(__name__)

SUFFIXES = (".yaml", ".yml")
BOOTSTRAPS = 1000  # resamples for the standard error of metrics that have no formula, such as perplexity


@dataclasses.dataclass(frozen=True)
class Spec:
    """A task's name or file. shots: examples in front of each question; None is the task's own number.

    optional: left out with a warning where its data cannot be had.
    """

    name: str
    shots: int | None = None
    optional: bool = False


# What the 2021 library evaluates, by the harness's names of today.
DEFAULT = tuple(
    Spec(name, shots, optional=True)
    for name, shots in (
        ("lambada_openai", 0), ("piqa", 0), ("hellaswag", 0), ("winogrande", 0), ("mathqa", 0), ("pubmedqa", 0),
        ("lambada_openai_cloze_yaml", 15),
    )
)  # fmt: skip


def check_harness() -> None:
    """Raises EvaluationError where lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise EvaluationError(
            f"tasks need lm-evaluation-harness, which cannot be imported ({error}): pip install "
            "'mesh-transformer[evaluation]'"
        ) from error


def load(specs: Sequence[Spec]) -> list[Any]:
    """The harness's tasks and groups of tasks, with their data.

    Raises EvaluationError for a task that is unknown or has no data.
    """
    check_harness()
    found: dict[str, Any] = {}
    for spec in specs:
        found.update(_load(spec))
    if not found:
        raise EvaluationError(
            "none of the tasks can be had; name files of your own with --tasks (data/eval/ has examples), or fill "
            "Hugging Face's cache of data sets where there is a network"
        )
    return list(found.values())


def run(
    model: LM,
    tasks: Sequence[Any],
    *,
    limit: float | None = None,
    bootstraps: int = 0,
    samples: bool = False,
) -> dict[str, Any]:
    """The harness's results. limit: documents of each task, or the share of them where it is below 1."""
    from lm_eval import simple_evaluate

    with _alone(quiet=not sys.stderr.isatty()):
        found: dict[str, Any] = simple_evaluate(
            model=model,
            tasks=list(tasks),
            limit=limit,
            bootstrap_iters=bootstraps,
            log_samples=samples,
            task_manager=_manager(False),
        )
    return found


def metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """`{task}-v{version}/{metric}` of the harness's results, the names of the 2021 library; filters after a comma."""
    found = {}
    for task, values in results["results"].items():
        version = results["versions"].get(task)
        version = f"{version:g}" if isinstance(version, int | float) else version
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, int | float) and kind and not isinstance(value, bool):
                name = metric if kind == "none" else f"{metric},{kind}"
                found[f"{task}-v{version}/{name}"] = float(value)
    return found


def _load(spec: Spec) -> dict[str, Any]:
    is_file = spec.name.endswith(SUFFIXES)
    if is_file and not os.path.isfile(spec.name):
        raise EvaluationError(f"{spec.name}: there is no such task file")
    manager = _manager(not is_file)
    if not is_file and spec.name not in manager.task_index:
        raise EvaluationError(
            f"{spec.name!r} is not a task of lm-evaluation-harness (`lm_eval ls tasks` lists them); a task file of "
            "your own ends in .yaml"
        )
    try:
        with _alone(quiet=not sys.stderr.isatty()):
            loaded = manager.load([spec.name])
    except Exception as error:  # noqa: BLE001  data sets, hub, network and YAML each have their own kinds
        reason = " ".join(str(error).split())[:200]
        problem = f"task {spec.name} cannot be loaded ({type(error).__name__}: {reason})"
        if spec.optional:
            logger.warning("%s: left out", problem)
            return {}
        raise EvaluationError(
            f"{problem}; its data has to be in Hugging Face's cache of data sets, or a network to get it"
        ) from error
    for task in loaded["tasks"].values():
        # A task that says 0 means it, to the harness too.
        if spec.shots is not None and task.get_config("num_fewshot") != 0:
            task.set_config("num_fewshot", spec.shots)
    members = {child for children in loaded.get("group_map", {}).values() for child in children}
    return {name: item for name, item in {**loaded.get("groups", {}), **loaded["tasks"]}.items() if name not in members}


@functools.cache
def _manager(defaults: bool) -> Any:
    """The harness's index of tasks. Its own are thousands of files, so they are only looked at when named."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=defaults)


@contextlib.contextmanager
def _alone(quiet: bool) -> Iterator[None]:
    """Keeps the harness in one process, for its pool would fork one with running threads; and off a log, its bars."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO() if quiet else sys.stderr))
            if quiet:
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
