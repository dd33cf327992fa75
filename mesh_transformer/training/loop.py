"""The training loop, for one process and for a pod.

`step` is the number of completed updates: a skipped batch moves the data position and `skipped`, never `step`.

The numbers of an update are read one step late: update n runs on the devices while the host reads the numbers of
n - 1, so neither waits for the other. Before periodic work, and before the last update is declared the last, the loop
catches up, so hooks always see a state that is exactly `step` updates old.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from mesh_transformer.config import Config
from mesh_transformer.errors import ConfigError, DataError, NonFiniteError
from mesh_transformer.training import throughput
from mesh_transformer.training.executor import Evaluate, Executor, Hardware, TrainData
from mesh_transformer.training.noise import NoiseScale
from mesh_transformer.training.periods import is_due
from mesh_transformer.training.progress import StepProgress
from mesh_transformer.training.run_state import RunState
from mesh_transformer.training.signals import StopRequest
from mesh_transformer.training.trackers import Tracker
from mesh_transformer.training.validation import Validation
from mesh_transformer.training.watchdog import Watchdog

logger = logging.getLogger(__name__)

WRITING = "writing metrics"  # a phase, for the watchdog


class Ending(enum.Enum):
    """Why the loop returned."""

    DONE = "done"
    INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """An update that was dispatched and whose numbers have not been read."""

    numbers: Callable[[], dict[str, float]]
    sequences: int
    tokens: int


class TrainingLoop:
    """Runs updates from `run.step` to `config.run.total_steps`, with its periodic work.

    `run` is where the state that `executor` holds stands; `saved` says that this very step is on disk already.
    `clock` gives seconds.
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        data: TrainData,
        run: RunState,
        *,
        saved: bool,
        hardware: Hardware,
        stop: StopRequest,
        watchdog: Watchdog,
        validation: Validation | None = None,
        evaluate: Evaluate | None = None,
        trackers: Sequence[Tracker] = (),
        progress: StepProgress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._executor = executor
        self._data = data
        self._run = run
        self._saved_step = run.step if saved else None
        self._hardware = hardware
        self._stop = stop
        self._watchdog = watchdog
        self._validation = validation
        self._evaluate = evaluate
        self._trackers = trackers
        self._progress = progress
        self._clock = clock
        self._noise = NoiseScale(config.run.noise_scale_alpha, run.G_average, run.S_average)
        if config.run.total_steps is None:
            raise ConfigError("total_steps is not known yet: resolve_epochs makes it of epochs")
        self._total = config.run.total_steps
        self._in_flight: _InFlight | None = None
        self._skipped_in_a_row = 0
        self._first_skipped = 0  # the first sequence of the batches that are skipped in a row, counted from 1
        self._dispatched = self._started = False
        self._mark = 0.0

    @property
    def run_state(self) -> RunState:
        """Where the run stands; between calls, or from a hook."""
        return self._run

    def run(self) -> Ending:
        """Trains until the last step or until `stop` is requested; everything is saved when it returns.

        Raises NonFiniteError after `max_skipped` batches in a row that could not be used, DataError when the data
        end, and what saving met.
        """
        while self._run.step < self._total and self._stop.requested is None:
            behind = self._in_flight
            self._in_flight = self._dispatch()
            if behind is not None:
                self._settle(behind)
            if self._is_boundary(self._run.step + 1) or self._stop.requested is not None:
                self._catch_up()
        self._catch_up()
        if self._run.step != self._saved_step and self._run.step > 0:
            self._save({})
        with self._watchdog.phase("waiting for the checkpoint to be on disk"):
            self._executor.wait()
        self._flush()
        return Ending.DONE if self._run.step >= self._total else Ending.INTERRUPTED

    def _is_boundary(self, step: int) -> bool:
        eval_every = self._config.run.eval_every if self._evaluate is not None else None
        periods = (self._val_every, eval_every, self._config.run.ckpt_every)
        return step >= self._total or any(is_due(every, step, self._total) for every in periods)

    @property
    def _val_every(self) -> int | None:
        return self._config.run.val_every if self._validation is not None else None

    def _dispatch(self) -> _InFlight:
        if self._in_flight is None:
            self._mark = self._clock()
        with self._watchdog.phase("waiting for a training batch"):
            try:
                batch = next(self._data)
            except StopIteration:
                self._catch_up()
                raise DataError(
                    f"train_set ended after {self._run.sequences} sequences at step {self._run.step} of {self._total}: "
                    "lower total_steps, or give more data or epochs"
                ) from None
        name = f"training, step {self._run.step + 1}"
        if not self._dispatched:
            self._dispatched, name = True, "compiling the training step"
            logger.info("compiling the training step (once; minutes for a large model)")
        with self._watchdog.phase(name):
            numbers = self._executor.train(batch)
        microbatches, sequences, length = batch["obs"].shape
        return _InFlight(numbers, microbatches * sequences, microbatches * sequences * length)

    def _catch_up(self) -> None:
        if self._in_flight is not None:
            behind, self._in_flight = self._in_flight, None
            self._settle(behind)

    def _settle(self, behind: _InFlight) -> None:
        """Reads an update's numbers, counts it, and does what is due after it."""
        with self._watchdog.phase(f"training, step {self._run.step + 1}" if self._started else "the first step"):
            numbers = behind.numbers()
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        if not self._started:
            logger.info("first step done in %.1f s, compilation included", seconds)
            self._started = True
        skipped = numbers["skipped"] > 0
        self._run = dataclasses.replace(
            self._run,
            step=self._run.step + (not skipped),
            skipped=self._run.skipped + skipped,
            sequences=self._run.sequences + behind.sequences,
            tokens=self._run.tokens + behind.tokens,
        )
        if skipped:
            self._after_skip(numbers, behind.sequences)
        else:
            self._skipped_in_a_row = 0
            self._after_update(self._metrics(numbers, behind, seconds), seconds)

    def _after_skip(self, numbers: Mapping[str, float], sequences: int) -> None:
        if self._skipped_in_a_row == 0:
            self._first_skipped = self._run.sequences - sequences + 1
        self._skipped_in_a_row += 1
        allowed = self._config.run.max_skipped
        logger.warning(
            "step %d: gradient norm %s is not finite; the batch is skipped and the weights stay (%d in a row, "
            "max_skipped %d)",
            self._run.step + 1, numbers["grad_norm"], self._skipped_in_a_row, allowed,
        )  # fmt: skip
        if self._skipped_in_a_row >= allowed:
            self._executor.wait()
            self._flush()
            last = self._executor.last_saved()
            good = f"the last good checkpoint is {last}" if last else "no checkpoint had been saved yet"
            raise NonFiniteError(
                f"{self._skipped_in_a_row} batches in a row (max_skipped) had a gradient that is not finite, at step "
                f"{self._run.step}; {good}: look at the data (sequences {self._first_skipped} to "
                f"{self._run.sequences} of the run), or continue with a lower lr or more warm-up through "
                "--tune-model-path"
            )

    def _after_update(self, metrics: dict[str, float], seconds: float) -> None:
        run, step = self._config.run, self._run.step
        val_loss: dict[str, float] = {}
        if self._validation is not None and is_due(run.val_every, step, self._total):
            results = self._validation.run(self._executor, self._watchdog, self._stop)
            val_loss = {name: result.loss for name, result in results.items()}
            for name, result in results.items():
                metrics[f"val/loss_{name}"] = result.loss
                metrics[f"val/sequences_{name}"] = result.sequences
        scores: Mapping[str, float] = {}
        if self._evaluate is not None and is_due(run.eval_every, step, self._total):
            with self._watchdog.phase("evaluating tasks"):
                scores = self._evaluate(lambda: self._stop.requested is not None) or {}
            metrics |= scores
        # The line of a step is written before its checkpoint, so that a kill never leaves a restorable step without.
        if val_loss or scores or is_due(run.log_every, step, self._total):
            with self._watchdog.phase(WRITING):
                for tracker in self._trackers:
                    tracker.log(step, metrics)
        if self._progress is not None:
            self._progress.update(step, metrics, seconds)
        if is_due(run.ckpt_every, step, self._total):
            self._save(val_loss)

    def _metrics(self, numbers: Mapping[str, float], behind: _InFlight, seconds: float) -> dict[str, float]:
        """The metrics of one update, under the original's names."""
        run, mesh = self._run, self._config.mesh
        grad_norm = numbers["grad_norm"] / mesh.gradient_accumulation_steps
        metrics = {f"train/{name}": numbers[name] for name in ("loss", "last_loss", "cross_entropy", "z_loss")}
        metrics |= {"train/grad_norm": grad_norm, "train/learning_rate": numbers["learning_rate"]}
        metrics |= throughput.rates(
            self._config.model, behind.tokens, seconds, self._hardware.device_kind, self._hardware.devices
        )
        metrics |= {
            "sequences_processed": run.sequences,
            "tokens_processed": run.tokens,
            "skipped": run.skipped,
        }
        metrics |= self._noise.update(
            mesh.per_replica_batch, behind.sequences, numbers["noise_small_sq"], grad_norm * grad_norm
        )
        self._run = dataclasses.replace(run, G_average=self._noise.G_average, S_average=self._noise.S_average)
        return metrics

    def _save(self, val_loss: Mapping[str, float]) -> None:
        """Saves the state as it stands; nothing is in flight."""
        with self._watchdog.phase(f"saving step {self._run.step}"):
            self._executor.save(self._run, self._data.position, val_loss)
        self._saved_step = self._run.step
        self._flush()

    def _flush(self) -> None:
        with self._watchdog.phase(WRITING):
            for tracker in self._trackers:
                tracker.flush()
