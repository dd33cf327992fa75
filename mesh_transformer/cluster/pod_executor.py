"""Steps on a cluster: what the loop asks of an executor, done by all hosts together."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer.cluster.crew import Crew, Pending
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.cluster.worker import Held
from mesh_transformer.training.executor import Batch, Evaluate, TrainData
from mesh_transformer.training.run_state import RunState

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.store import CheckpointStore, Write
    from mesh_transformer.config import Config
    from mesh_transformer.evaluation.in_training import TaskEvaluation

logger = logging.getLogger(__name__)

# Without --step-deadline: a step may take this many times the slowest so far, and at least so many seconds.
SLOWEST_TIMES = 20.0
LEAST_SECONDS = 120.0
FIRST_SECONDS = 3600.0  # the first step of a process compiles


class Deadline:
    """How long a step may take, in seconds: as told, or by how long they took. The first may always take longer."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._slowest: float | None = None

    @property
    def seconds(self) -> float:
        if self._slowest is None:
            return FIRST_SECONDS
        return self._seconds if self._seconds is not None else max(LEAST_SECONDS, SLOWEST_TIMES * self._slowest)

    def took(self, seconds: float) -> None:
        """A step was done in so many seconds."""
        self._slowest = max(seconds, self._slowest or 0.0)


class Parts(Mapping[str, np.ndarray]):
    """A batch [A, B, S] of which every host's rows are on their way to it already; `refs`: of Ray, by host."""

    def __init__(self, batch: Batch, refs: Future[list[Any]], position: Mapping[str, Any]) -> None:
        self._batch, self._refs, self.position = batch, refs, position

    @property
    def refs(self) -> list[Any]:
        return self._refs.result()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


class Feed:
    """Training batches of `data`, cut into the hosts' rows and put into the object store one step ahead, by a thread
    beside the driver's waiting."""

    def __init__(self, data: TrainData, held: Held) -> None:
        self._data, self._held = data, held
        self._ahead: Parts | None = None
        self._position = dict(data.position)
        self._thread = ThreadPoolExecutor(1, "rows")

    @property
    def position(self) -> Mapping[str, Any]:
        """Behind the last batch handed out."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Parts:
        batch, self._ahead = self._ahead or self._fetch(), None
        self._position = dict(batch.position)
        return batch

    def send_ahead(self) -> None:
        """Put the next batch, if there is one."""
        if self._ahead is None:
            try:
                self._ahead = self._fetch()
            except StopIteration:
                return

    def _fetch(self) -> Parts:
        batch = next(self._data)
        return Parts(batch, self._thread.submit(put_parts, batch, self._held), self._data.position)


def put_parts(batch: Batch, held: Held) -> list[Any]:
    """Every host's rows in the object store."""
    import ray

    return [ray.put({name: rows_of(value, held, own, 1) for name, value in batch.items()}) for own in held.replicas]


def rows_of(values: np.ndarray, held: Held, replicas: Sequence[int], axis: int) -> np.ndarray:
    """The rows, along `axis`, of these replicas: one's behind the other's."""
    rows = values.shape[axis] // held.dp
    parts = [values.take(range(r * rows, (r + 1) * rows), axis) for r in replicas]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


@dataclasses.dataclass
class _Started:
    """The calls that started something on every host, and those that bring what it gives, once there are such."""

    operation: str
    sent: Pending
    brought: Pending | None = None


class PodExecutor:
    """Executes on the hosts of `crew`; `config` and `agreement` are saved with every step."""

    def __init__(
        self, crew: Crew, held: Held, deadline: Deadline, store: CheckpointStore, config: Config,
        agreement: Mapping[str, Any], feed: Callable[[], Feed | None],
    ) -> None:  # fmt: skip
        self._crew, self._held, self._deadline, self._feed = crew, held, deadline, feed
        self._store, self._config, self._agreement = store, config, agreement
        self._started = 0
        self._latest: _Started | None = None  # the last update, while no call brings its numbers

    def train(self, batch: Batch) -> Callable[[], dict[str, float]]:
        """Start an update; see `Executor`. What its function meets on a host is HostError.

        One call a host and step: it takes the rows, and brings the numbers of the update before.
        """
        parts = batch.refs if isinstance(batch, Parts) else put_parts(batch, self._held)
        self._started += 1
        operation = f"training (update {self._started} since this start)"
        before = self._latest
        update = _Started(operation, self._crew.submit("train", before is not None, each=parts, operation=operation))
        if before is not None:
            before.brought = update.sent
        self._latest = update
        feed = self._feed()
        if feed is not None:
            feed.send_ahead()

        def numbers() -> dict[str, float]:
            began = time.monotonic()
            if update.brought is None:  # no update came behind it
                self._latest = None
            found = self._result(update, self._deadline.seconds)
            self._deadline.took(time.monotonic() - began)
            return dict(self._same(found, update.operation))

        return numbers

    def evaluate(self, batch: Batch) -> Callable[[], np.ndarray]:
        """Start an evaluation; see `Executor`."""
        operation = "validating"
        parts = [
            {k: rows_of(np.asarray(v), self._held, own, 0) for k, v in batch.items()} for own in self._held.replicas
        ]
        sent = _Started(operation, self._crew.submit("evaluate", each=parts, operation=operation))
        return lambda: np.asarray(self._result(sent, FIRST_SECONDS, first=True)[0]["all_loss"])

    def _result(self, started: _Started, seconds: float, first: bool = False) -> list[Any]:
        """The results of what was started, by host, or those of the first alone."""
        if started.brought is None:
            wanted = self._crew.first_alone() if first else [True] * len(self._crew.hosts)
            started.brought = self._crew.submit("result", each=wanted, operation=started.operation)
        both = Pending((*started.sent.refs, *started.brought.refs), started.operation)
        return list(self._crew.results(both, seconds))[len(started.sent.refs) :]

    def _same(self, found: Sequence[Mapping[str, float]], operation: str) -> Mapping[str, float]:
        """What all hosts say. Raises HostError where they do not agree, which only a broken machine explains."""
        for host, numbers in zip(self._crew.hosts, found, strict=True):
            if not all(np.array_equal(numbers[name], value, equal_nan=True) for name, value in found[0].items()):
                self._crew.end()
                raise HostError(
                    f"while {operation}: {host.name} ({host.address}) computed {dict(numbers)}, "
                    f"{self._crew.hosts[0].name} {dict(found[0])}, which must be equal"
                )
        return found[0]

    def save(self, run: RunState, position: Mapping[str, Any], val_loss: Mapping[str, float]) -> None:
        """Copy the state on every host, and write it behind the next steps; see `Executor`."""
        orbax = self._config.run.ckpt_format == "orbax"
        crew, step = self._crew, run.step

        def take() -> Write:
            crew.call("copy", orbax, operation=f"copying the state of step {step}", seconds=FIRST_SECONDS)
            return lambda folder, details: write_copies(crew, folder, self._config, details)

        self._store.save_by(
            take, step, self._config, {"dp": self._held.dp, "mp": self._held.mp}, position, val_loss,
            {"run": run.to_json()}, self._agreement,
        )  # fmt: skip

    def wait(self) -> None:
        self._store.wait()

    def last_saved(self) -> str | None:
        step = self._store.latest()
        return None if step is None else self._store.path(step)


def write_copies(crew: Crew, folder: str, config: Config, details: Mapping[str, Any]) -> int:
    """Make every host write its part of the copies that they took, and the first the manifest; the bytes of all."""
    orbax, shards = config.run.ckpt_format == "orbax", config.mesh.cores_per_replica
    operation = f"writing {folder}"
    written = crew.call("write", folder, config.model, shards, orbax, dict(details), operation=operation)
    if not orbax:
        entries = {name: entry for files, _ in written for name, entry in files.items()}
        crew.first("describe", folder, entries, config.model, shards, dict(details), operation=operation)
    crew.call("forget_copy", operation=operation)
    return sum(count for _, count in written)


class PodMachine:
    """The state of a run lies on the hosts of `crew`."""

    def __init__(self, crew: Crew, config: Config, deadline: Deadline) -> None:
        self._crew, self._deadline = crew, deadline
        self.held: Held = crew.call("hold", config, operation="making the network")[0]
        self._feed: Feed | None = None

    @property
    def parameters(self) -> int:
        return self.held.parameters

    def draw(self) -> None:
        self._crew.call("draw", operation="drawing the first weights")

    def tune(self, source: str, fresh_opt: bool) -> None:
        self._crew.call("load", source, not fresh_opt, True, operation=f"loading {source}")

    def restore(
        self, store: CheckpointStore, config: Config, strict: bool, agreement: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int]:
        def read(path: str) -> None:
            self._crew.call("load", path, True, False, operation=f"loading {path}")

        _, aux, step = store.restore_by(read, config, strict=strict, agreement=agreement)
        return aux, step

    def executor(self, store: CheckpointStore, config: Config, agreement: Mapping[str, Any]) -> PodExecutor:
        return PodExecutor(self._crew, self.held, self._deadline, store, config, agreement, lambda: self._feed)

    def feed(self, data: TrainData) -> TrainData:
        self._feed = Feed(data, self.held)
        return self._feed

    def evaluation(self, tasks: TaskEvaluation) -> Evaluate:
        from mesh_transformer.cluster.pod_scorer import PodScorer

        return lambda stop: tasks.run(PodScorer(self._crew, self.held, tasks.seq, tasks.tokenizer), stop)
