"""Draw a run's loss curves from its metrics file.

python scripts/plot_loss.py METRICS.jsonl --output PICTURE.png [--title TEXT]

Training cross-entropy (every step, and smoothed) and each validation set's loss, in nats per token, against steps.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

VALIDATION = "val/loss_"
TRAINING = ("train/cross_entropy", "train/loss")  # the first that is there


def curves(lines: Sequence[str]) -> dict[str, dict[int, float]]:
    """Values by step of each curve: `train`, and one per validation set by its name.

    A step that was written twice, before and after a resume, keeps its last value. A torn last line is left out.
    """
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        step = entry.get("step")
        if step is None:
            continue
        values = {key[len(VALIDATION) :]: entry[key] for key in entry if key.startswith(VALIDATION)}
        values["train"] = next((entry[key] for key in TRAINING if key in entry), None)
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, {})[step] = float(value)
    return found


def smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential average whose first values are not pulled towards zero."""
    average, result = 0.0, []
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**count))
    return result


def draw(found: dict[str, dict[int, float]], output: Path, title: str) -> None:
    """Write the picture; the folder is made where it is missing."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    train = dict(sorted(found.get("train", {}).items()))
    if train:
        axes.plot(list(train), list(train.values()), color="#9ecae1", linewidth=0.8, label="training, every step")
        axes.plot(list(train), smooth(list(train.values())), color="#2171b5", linewidth=1.8, label="training, smoothed")
    for number, name in enumerate((name for name in found if name != "train"), start=1):
        points = dict(sorted(found[name].items()))
        label = f"validation, {name}"
        axes.plot(list(points), list(points.values()), color=f"C{number}", marker="o", linewidth=1.8, label=label)
    axes.set(xlabel="step", ylabel="cross-entropy, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120, metadata={"Software": None})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="the metrics.jsonl of a run")
    parser.add_argument("--output", type=Path, required=True, help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--title", default="", help="above the curves")
    options = parser.parse_args(arguments)
    try:
        found = curves(options.metrics.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        print(f"error: cannot read {options.metrics}: {error.strerror}", file=sys.stderr)
        return 2
    if not found:
        print(f"error: {options.metrics} holds no loss; expected lines with `step` and `train/...`", file=sys.stderr)
        return 2
    draw(found, options.output, options.title)
    last = {name: points[max(points)] for name, points in found.items()}
    said = ", ".join(f"{name} {value:.3f}" for name, value in last.items())
    print(f"{options.output}: {max(max(points) for points in found.values())} steps, last {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
