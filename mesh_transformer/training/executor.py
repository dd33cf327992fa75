"""What the loop needs of whatever executes a step: this process's devices, or a pod behind a driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import Config
from mesh_transformer.training.run_state import RunState
from mesh_transformer.transformer_shard import CausalTransformer

Batch = Mapping[str, np.ndarray]


class Executor(Protocol):
    """Steps are dispatched without waiting; the functions they return wait for the numbers."""

    def train(self, batch: Batch) -> Callable[[], dict[str, float]]:
        """Start an update on obs, target [A, B, S] (and mask); what it returns gives the metrics of
        `CausalTransformer.train`."""

    def evaluate(self, batch: Batch) -> Callable[[], np.ndarray]:
        """Start an evaluation on obs, target [B, S]; what it returns gives the cross-entropies [B, S], float32."""

    def save(self, run: RunState, position: Mapping[str, Any], val_loss: Mapping[str, float]) -> None:
        """Take a snapshot of the state now and write it behind the next steps, with what resume needs.

        Raises what the write before it met.
        """

    def wait(self) -> None:
        """Return when every save is on disk. Raises what a write met."""

    def last_saved(self) -> str | None:
        """The newest complete checkpoint's path, for messages; None when there is none."""


class NetworkExecutor:
    """Executes on this process's devices. `agreement` is saved with every step (see `start.choose`)."""

    def __init__(
        self, network: CausalTransformer, store: CheckpointStore, config: Config, agreement: Mapping[str, Any]
    ) -> None:
        self._network, self._store = network, store
        self._config, self._agreement = config, agreement

    def train(self, batch: Batch) -> Callable[[], dict[str, float]]:
        metrics = self._network.train(batch)
        return lambda: {name: float(value) for name, value in jax.device_get(metrics).items()}

    def evaluate(self, batch: Batch) -> Callable[[], np.ndarray]:
        losses = self._network.eval(batch)["all_loss"]
        return lambda: np.asarray(jax.device_get(losses))

    def save(self, run: RunState, position: Mapping[str, Any], val_loss: Mapping[str, float]) -> None:
        self._store.save(
            run.step,
            self._network.state,
            self._config,
            position=position,
            val_loss=val_loss,
            aux={"run": run.to_json()},
            agreement=self._agreement,
        )

    def wait(self) -> None:
        self._store.wait()

    def last_saved(self) -> str | None:
        step = self._store.latest()
        return None if step is None else self._store.path(step)
