"""How far a run is: steps, loss, speed and time left."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mesh_transformer.progress import Progress, duration

logger = logging.getLogger(__name__)

RECENT = 0.1  # weight of the newest step in the average that the ETA rests on


class StepProgress:
    """Shows the steps of a run on `shown`, a `Progress` that counts them; a validation gets a line of its own."""

    def __init__(self, step: int, total_steps: int, shown: Progress) -> None:
        self._first, self._total, self._shown = step, total_steps, shown
        self._seconds: float | None = None

    def update(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Shows step `step`, which took `seconds`."""
        if step > self._first + 1:  # the first step of a process compiles; the ETA must not believe it
            recent = self._seconds if self._seconds is not None else seconds
            self._seconds = (1.0 - RECENT) * recent + RECENT * seconds
        validated = any(name.startswith("val/") for name in metrics)
        self._shown.reach(step, self._describe(step, metrics), line=validated)

    def _describe(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"loss {metrics['train/loss']:.4f}"]
        parts += [f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("val/loss_")]
        parts.append(f"lr {metrics['train/learning_rate']:.2e}")
        parts.append(f"{metrics['train/tokens_per_sec']:,.0f} tokens/s")
        if self._seconds is not None and step < self._total:
            parts.append(f"ETA {duration((self._total - step) * self._seconds)}")
        return "  ".join(parts)


def step_progress(step: int, total_steps: int) -> Progress:
    """A `Progress` of steps, whose lines go to the log."""
    return Progress("step", total_steps, first=step, say=logger.info)
