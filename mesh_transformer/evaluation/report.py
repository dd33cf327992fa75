"""What an evaluation leaves: a JSON file with everything that its figures depend on, and a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mesh_transformer import storage
from mesh_transformer.checkpoint.manifest import versions

RESULTS, TABLE, ANSWERS = "results.json", "results.md", "answers.jsonl"

_PACKAGES = ("mesh-transformer", "jax", "jaxlib", "numpy", "tokenizers", "lm_eval", "datasets")
# Of the harness's own results, what says something about the tasks; the rest is about torch and its environment.
_OF_TASKS = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "n-samples", "higher_is_better")


def rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each metric of each task: task, version, shots, metric, filter, value, stderr, documents."""
    found = []
    for task, values in results["results"].items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{kind}")
            found.append({
                "task": task, "version": results["versions"].get(task), "shots": results["n-shot"].get(task),
                "metric": metric, "filter": kind, "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                "documents": results.get("n-samples", {}).get(task, {}).get("effective"),
            })  # fmt: skip
    return found


def table(results: Mapping[str, Any]) -> str:
    """The rows as a Markdown table that can be read as it stands."""
    cells = [("task", "version", "shots", "metric", "value", "stderr", "documents")]
    for row in rows(results):
        metric = row["metric"] if row["filter"] == "none" else f"{row['metric']}, {row['filter']}"
        stderr = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        version, shots = ("" if row[name] is None else str(row[name]) for name in ("version", "shots"))
        cells.append((row["task"], version, shots, metric, f"{row['value']:.4f}", stderr, str(row["documents"] or "")))
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]

    def line(parts: Iterable[str]) -> str:
        return "| " + " | ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)) + " |"

    return "\n".join(
        [line(cells[0]), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, cells[1:])]
    )


def document(results: Mapping[str, Any], about: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values: the table's rows, the model, the settings, versions, and what the harness says of its tasks."""
    harness = {name: results[name] for name in _OF_TASKS if name in results}
    return {
        "metrics": rows(results),
        "model": dict(about),
        "settings": dict(settings),
        "versions": versions(_PACKAGES),
        "harness": json.loads(json.dumps(harness, default=str)),
    }


def write(folder: str, results: Mapping[str, Any], about: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Writes both files into `folder`."""
    storage.makedirs(folder)
    content = json.dumps(document(results, about, settings), indent=1, ensure_ascii=False)
    storage.write_atomic(storage.join(folder, RESULTS), content.encode())
    head = f"checkpoint {about['checkpoint'] or 'none'} ({about['checkpoint_hash']})\n\n"
    storage.write_atomic(storage.join(folder, TABLE), (head + table(results) + "\n").encode())
