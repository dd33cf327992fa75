"""The one thread that owns the devices: requests join and leave its running batch between tokens.

A turn is: rows whose clients have gone are freed; who waits gets a free row; at most one chunk of one newcomer's prompt
is read; every running row gets its next tokens; what came is delivered. So a newcomer delays the others by one chunk,
however long its prompt is.

A device step that raises is answered to all whose texts were in the batch, which is then begun anew. After
MOST_FAILURES in a row, or when that cannot be done, the engine has failed for good: everyone waiting is told, `state`
says so, and the process is to end.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence

from mesh_transformer.errors import ConfigError
from mesh_transformer.serving.api_errors import RequestError, failed, invalid, queue_full, unavailable
from mesh_transformer.serving.batch import Batch, Output
from mesh_transformer.serving.job import Failure, Job, Part
from mesh_transformer.serving.limits import Limits
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.waiting import FairQueue

logger = logging.getLogger(__name__)

TOKENS_A_TURN = 4  # between two looks at who came and went, while nobody's prompt is being read
MOST_FAILURES = 3
STALLED = 300.0  # seconds after which a device step is taken to hang


class State(enum.Enum):
    """What an engine does; `health` of the API in these words."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Engine:
    """Takes jobs from any thread, and delivers to each what it asked for (see `Job`)."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.error: BaseException | None = None
        self._state = State.LOADING
        self._wake = threading.Condition()
        self._waiting: FairQueue[Job] = FairQueue()
        self._rows: list[Job | None] = [None] * limits.max_batch
        self._cancelled: list[Job] = []
        self._failures = 0
        self._turn_began: float | None = None
        self._seconds_a_text = 1.0
        self._thread: threading.Thread | None = None

    # What other threads call.

    @property
    def state(self) -> State:
        return self._state

    @property
    def stalled(self) -> bool:
        """Whether the devices have been busy with one step for longer than any step takes."""
        began = self._turn_began
        return began is not None and time.monotonic() - began > STALLED

    @property
    def running(self) -> int:
        return sum(job is not None for job in self._rows)

    @property
    def waiting(self) -> int:
        with self._wake:
            return len(self._waiting)

    @property
    def idle(self) -> bool:
        with self._wake:
            return not self.running and not len(self._waiting)

    def start(self, load: Callable[[], Batch]) -> None:
        """Begins the thread; `load` makes the batch on it, compiled and ready."""
        self._thread = threading.Thread(target=self._run, args=(load,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """All of them or none. Raises RequestError: 429 where the queue is full, 503 where nothing is taken now."""
        with self._wake:
            if self._state is not State.READY:
                raise self._refusal()
            held = self.running + len(self._waiting)
            if held + len(jobs) > self.limits.capacity:
                turns = len(self._waiting) / self.limits.max_batch
                raise queue_full(len(self._waiting), min(60.0, self._seconds_a_text * turns))
            for job in jobs:
                self._waiting.add(job)
            self._count()
            self._wake.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody wants these any more: they leave the queue now, and the batch before its next step."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
                if self._waiting.remove(job):
                    self.metrics.finished.labels("cancelled").inc()
            if any(job in jobs for job in self._rows):
                self._cancelled += jobs
                self._wake.notify()
            self._count()

    def drain(self) -> None:
        """Takes nothing new; what runs and waits goes on."""
        with self._wake:
            if self._state in (State.LOADING, State.READY):
                self._become(State.DRAINING)

    def stop(self, seconds: float = 10.0) -> bool:
        """Ends the thread after its step, with everyone left told 503; whether it has ended within `seconds`."""
        with self._wake:
            if self._state is not State.FAILED:
                self._become(State.STOPPED)
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    # What the thread does.

    def _run(self, load: Callable[[], Batch]) -> None:
        try:
            batch = load()
            with self._wake:
                if self._state is State.LOADING:
                    self._become(State.READY)
            while self._wait():
                self._turn(batch)
            self._fail(unavailable("the server is shutting down"), everyone=True)
        except BaseException as error:  # noqa: BLE001  whatever it is, those who wait must not wait for ever
            self.error = error
            with self._wake:
                self._become(State.FAILED)
            self._fail(failed(), everyone=True)

    def _wait(self) -> bool:
        """Until there is something to do; False when the thread is to end."""
        with self._wake:
            self._turn_began = None
            while not self.running and not len(self._waiting) and self._state is not State.STOPPED:
                self._wake.wait()
            self._turn_began = time.monotonic()
            return self._state is not State.STOPPED

    def _turn(self, batch: Batch) -> None:
        began = time.perf_counter()
        try:
            self._release(batch)
            self._admit(batch)
            if batch.reading:
                self._deliver(batch, batch.read())
            self._deliver(batch, batch.decode(1 if batch.reading else TOKENS_A_TURN))
        except Exception:
            self._failures += 1
            self.metrics.failures.inc()
            logger.exception("a device step failed (%d in a row)", self._failures)
            self._fail(failed(), everyone=False)
            if self._failures >= MOST_FAILURES:
                raise
            batch.reset()
        else:
            self._failures = 0
        self.metrics.step.observe(time.perf_counter() - began)

    def _release(self, batch: Batch) -> None:
        with self._wake:
            cancelled, self._cancelled = self._cancelled, []
            rows = [row for row, job in enumerate(self._rows) if job is not None and job in cancelled]
        if rows:
            batch.release(rows)
            for row in rows:
                self._leave(row, "cancelled")

    def _admit(self, batch: Batch) -> None:
        for row in range(len(self._rows)):
            with self._wake:
                job = self._waiting.take() if self._rows[row] is None else None
                if job is None:
                    continue
                self._rows[row] = job
                self._count()
            self.metrics.queued.observe(time.monotonic() - job.arrived)
            self.metrics.prompt_tokens.inc(len(job.prompt))
            try:
                batch.begin(row, job.prompt, job.options, job.echo)
            except ConfigError as error:  # of its own options, which the others have nothing to do with
                self._leave(row, "failed")
                job.deliver(Failure(job.index, invalid(None, str(error))))

    def _deliver(self, batch: Batch, outputs: Sequence[Output]) -> None:
        """Each row's part to whoever waits for it; rows that have ended are free again."""
        ended = []
        for output in outputs:
            job, part = self._rows[output.row], output.completion
            if job is None:
                continue
            if output.first:
                self.metrics.first_token.observe(time.monotonic() - job.arrived)
            if part is None:
                logger.error("a text's logits are not finite: the weights are damaged, or overflow in compute_dtype")
                job.deliver(Failure(job.index, failed()))
            else:
                self.metrics.generated_tokens.inc(part.tokens)
                job.deliver(Part(job.index, part, output.prompt))
            if part is None or part.finish_reason is not None:
                self.metrics.latency.observe(time.monotonic() - job.arrived)
                ended.append(output.row)
                self._leave(output.row, "failed" if part is None else str(part.finish_reason))
        if ended:
            batch.release(ended)

    def _leave(self, row: int, reason: str) -> None:
        with self._wake:
            job, self._rows[row] = self._rows[row], None
            self._count()
        if job is not None:
            self.metrics.finished.labels(reason).inc()
            self._seconds_a_text += 0.1 * (time.monotonic() - job.arrived - self._seconds_a_text)

    def _fail(self, error: RequestError, everyone: bool) -> None:
        """Tells those in the batch, or everyone, and lets them go."""
        with self._wake:
            jobs = [job for job in self._rows if job is not None]
            self._rows = [None] * len(self._rows)
            self._cancelled.clear()
            if everyone:
                jobs += self._waiting.clear()
            self._count()
        for job in jobs:
            self.metrics.finished.labels("failed").inc()
            job.deliver(Failure(job.index, error))

    def _become(self, state: State) -> None:
        self._state = state
        self.metrics.ready.set(state is State.READY)

    def _count(self) -> None:
        self.metrics.running.set(self.running)
        self.metrics.waiting.set(len(self._waiting))

    def _refusal(self) -> RequestError:
        return {
            State.LOADING: unavailable("the model is still loading", 10),
            State.DRAINING: unavailable("the server is shutting down"),
            State.STOPPED: unavailable("the server is shutting down"),
            State.FAILED: unavailable("the server has failed and is ending"),
        }[self._state]
