"""What the loop needs of whatever executes a step: this process's devices, or a pod behind a driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from mesh_transformer import parameters, steps
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import Config
from mesh_transformer.evaluation.in_training import TaskEvaluation
from mesh_transformer.mesh import MP
from mesh_transformer.state import TrainState
from mesh_transformer.training.run_state import RunState
from mesh_transformer.transformer_shard import CausalTransformer, compiled_init

Batch = Mapping[str, np.ndarray]
# Evaluates tasks on the weights as they stand: given what tells whether to stop, the metrics, or None if it did.
Evaluate = Callable[[Callable[[], bool]], Mapping[str, float] | None]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """For MFU and the plan: `device_kind` as JAX names it, how many devices take part, and the bytes of memory of one,
    where it says so."""

    device_kind: str
    devices: int
    memory: int | None = None

    def same_devices(self, other: Hardware) -> bool:
        """Whether `other` are as many of the same kind, whatever they say of their memory."""
        return (self.device_kind, self.devices) == (other.device_kind, other.devices)


class TrainData(Protocol):
    """Batches without end, and the position behind the last one handed out."""

    @property
    def position(self) -> Mapping[str, Any]: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...


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


class Machine(Protocol):
    """Holds the state of a run, for one config."""

    @property
    def parameters(self) -> int:
        """How many the model has."""

    def draw(self) -> None:
        """The first weights, from the config's seed."""

    def tune(self, source: str, fresh_opt: bool) -> None:
        """The weights of the step at `source`, with the schedule at its beginning; `fresh_opt`: without its moments."""

    def restore(
        self, store: CheckpointStore, config: Config, strict: bool, agreement: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """The newest good step of the store; returns what was saved beside the state, and the step."""

    def executor(self, store: CheckpointStore, config: Config, agreement: Mapping[str, Any]) -> Executor:
        """What executes steps on the state; `agreement` is saved with every checkpoint (see `start.choose`)."""

    def feed(self, data: TrainData) -> TrainData:
        """The same batches, on their way to where they are needed before they are asked for."""

    def evaluation(self, tasks: TaskEvaluation) -> Evaluate:
        """The tasks, on whatever weights there are when it is called."""


class Devices(Protocol):
    """Devices that have started, as a mesh."""

    @property
    def dp(self) -> int: ...

    @property
    def hardware(self) -> Hardware: ...

    def hold(self, config: Config) -> Machine:
        """What holds the state of a run on them; nothing is compiled or read before it is needed."""

    def supervise(self, attempt: Callable[[], T], progress: Callable[[], object]) -> T:
        """What `attempt` returns, called again where devices were lost under it and are there again.

        progress: changes where the run got further, so that it may be tried as often again.
        """


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


class NetworkMachine:
    """The state lies on this process's devices."""

    def __init__(self, network: CausalTransformer) -> None:
        self._network = network

    @property
    def parameters(self) -> int:
        return parameters.count(self._network.model, int(self._network.mesh.shape[MP]))

    def draw(self) -> None:
        jax.block_until_ready(self._network.state)

    def tune(self, source: str, fresh_opt: bool) -> None:
        self._network.load_ckpt(source, optimizer=not fresh_opt)
        self._network.state = begin_schedule(self._network)

    def restore(
        self, store: CheckpointStore, config: Config, strict: bool, agreement: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int]:
        restored = store.restore(config, self._network.mesh, strict=strict, agreement=agreement)
        self._network.state = restored.state
        return restored.aux, restored.step

    def executor(self, store: CheckpointStore, config: Config, agreement: Mapping[str, Any]) -> Executor:
        return NetworkExecutor(self._network, store, config, agreement)

    def feed(self, data: TrainData) -> TrainData:
        return data

    def evaluation(self, tasks: TaskEvaluation) -> Evaluate:
        return tasks.on(self._network)


def begin_schedule(network: CausalTransformer) -> TrainState:
    """The network's state with the schedule at its beginning, and fresh moments where it has none.

    The state's own `step`, and Adam's count beside its moments, go on.
    """
    state = network.state
    opt_state = state.opt_state
    if opt_state is None:
        opt_state = compiled_init(network.model, network.mesh, network.zero)(state.params)
    zero = steps.place(network.mesh, jax.sharding.PartitionSpec(), np.int32(0))
    return state._replace(opt_state=opt_state._replace(schedule_count=zero))
