"""`eval_harness.py`: from its options to the results."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from mesh_transformer import storage
from mesh_transformer.config import load_config
from mesh_transformer.evaluation import report, tasks
from mesh_transformer.evaluation.opening import Load, Source, open_evaluator

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """tasks: names and files; none means the 2021 library's set. shots: examples in front of each question, where the
    task does not fix them. limit: documents of each task, or a share of them. output: a folder for results."""

    source: Source
    tasks: tuple[str, ...] = ()
    shots: int | None = None
    limit: float | None = None
    output: str | None = None


def evaluate(request: Request, load: Load | None = None) -> dict[str, Any]:
    """Runs the tasks, on a model of `load`; returns what `report.document` says.

    Raises MeshTransformerError for what can be corrected.
    """
    load_config(
        request.source.config, version=request.source.version
    )  # its mistakes show before anything heavy is imported
    specs = [tasks.Spec(name, request.shots) for name in request.tasks] or list(tasks.DEFAULT)
    source, folder = request.source, request.output
    if folder is not None:
        storage.probe_writable(folder)
        if not storage.is_url(folder):  # there, answers could not be appended to a file
            source = dataclasses.replace(source, answers=storage.join(folder, report.ANSWERS))
    tasks.check_harness()
    loaded = tasks.load(specs)
    opened = open_evaluator(source, load)
    from mesh_transformer.evaluation.harness import MeshTransformerLM

    model = MeshTransformerLM(opened.evaluator, opened.about)
    try:
        results = tasks.run(model, loaded, limit=request.limit, bootstraps=tasks.BOOTSTRAPS)
    finally:
        opened.answers.close()
    settings = {
        "tasks": [spec.name for spec in specs], "num_fewshot": request.shots, "limit": request.limit,
        "bootstraps": tasks.BOOTSTRAPS,
    }  # fmt: skip
    if folder is not None:
        report.write(folder, results, opened.about, settings)
        logger.info("results in %s", folder)
    return report.document(results, opened.about, settings) | {"table": report.table(results)}
