"""Validation: the mean cross-entropy over the first `val_batches` batches of each validation set."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from mesh_transformer.training.executor import Batch, Executor
from mesh_transformer.training.signals import StopRequest
from mesh_transformer.training.watchdog import Watchdog

logger = logging.getLogger(__name__)

# Opens a validation set at its first record: at most that many batches of obs, target [B, S] and, where the last one
# is filled up, "real" [B], 0 for the rows that only fill.
OpenSet = Callable[[], Iterable[Batch]]


@dataclasses.dataclass(frozen=True)
class Result:
    """Mean cross-entropy in nats per token, and what it was taken over; `tokens` are those that count."""

    loss: float
    batches: int
    sequences: int
    tokens: float


class Validation:
    """Evaluates the same first batches of every set each time it runs."""

    def __init__(self, sets: Mapping[str, OpenSet]) -> None:
        self._sets = dict(sets)
        self._warned: set[str] = set()

    def run(self, executor: Executor, watchdog: Watchdog, stop: StopRequest) -> dict[str, Result]:
        """The result of each set, in the config's order; sets without a batch are left out, with one warning ever.

        A stop request ends it with the sets done so far.
        """
        results = {}
        for name, open_set in self._sets.items():
            with watchdog.phase(f"validating on {name}"):
                result = self._evaluate(executor, open_set, stop)
            if stop.requested is not None:
                break
            if result is not None:
                results[name] = result
            elif name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "val_set %s gave no batch (val_batches is 0, or the set is empty): val/loss_%s is left out",
                    name,
                    name,
                )
        return results

    def _evaluate(self, executor: Executor, open_set: OpenSet, stop: StopRequest) -> Result | None:
        total, weight, batches, sequences = 0.0, 0.0, 0, 0
        behind: list[tuple[Callable[[], np.ndarray], np.ndarray]] = []

        def read() -> None:
            nonlocal total, weight
            losses, weights_BS = behind.pop(0)
            total += float(np.sum(losses() * weights_BS, dtype=np.float64))
            weight += float(np.sum(weights_BS, dtype=np.float64))

        for batch in open_set():
            if stop.requested is not None:
                return None
            real_B, weights_BS = weights_of(batch)
            inputs = {name: batch[name] for name in ("obs", "target")}
            behind.append((executor.evaluate(inputs), weights_BS))
            batches, sequences = batches + 1, sequences + int(real_B.sum())
            if len(behind) > 1:  # one batch computes while the one before is read
                read()
        while behind:
            read()
        return Result(total / weight, batches, sequences, weight) if weight > 0 else None


def weights_of(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """float32 [B] and [B, S]: 1 for the rows that do not only fill, and for the positions that count."""
    real_B = batch.get("real", np.ones(len(batch["obs"]), np.float32))
    mask_BS = batch.get("mask", np.ones(batch["obs"].shape, np.float32))
    return real_B, mask_BS * real_B[:, None]
