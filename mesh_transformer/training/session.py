"""A training run, from a command's options to its exit code, whatever its devices are.

Order: everything that needs no device is checked first, then devices start, then trackers, then weights are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from mesh_transformer import storage
from mesh_transformer.checkpoint import formats, inspect, layout
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.store import CheckpointStore, find_step
from mesh_transformer.config import Config, check_interpreter, check_training, load_config, resolve_epochs
from mesh_transformer.data.loader import RecordLoader
from mesh_transformer.data.record_set import RecordSet
from mesh_transformer.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NONFINITE,
    EXIT_USER,
    ConfigError,
    MeshTransformerError,
    NonFiniteError,
)
from mesh_transformer.evaluation import in_training
from mesh_transformer.evaluation.in_training import TaskEvaluation
from mesh_transformer.planning import check
from mesh_transformer.training import data_sets, start, trackers
from mesh_transformer.training.executor import Devices, Hardware, Machine
from mesh_transformer.training.loop import Ending, TrainingLoop
from mesh_transformer.training.progress import StepProgress, step_progress
from mesh_transformer.training.run_state import RunState
from mesh_transformer.training.signals import StopRequest
from mesh_transformer.training.start import Origin, Start
from mesh_transformer.training.watchdog import Watchdog

logger = logging.getLogger(__name__)

Ask = Callable[[str], bool]
# Starts the devices for a config that is sound, while it is entered.
StartDevices = Callable[[Config], contextlib.AbstractContextManager[Devices]]

# Options that the command to go on leaves out: they would delete what was just saved, or read the same data again.
ONCE = ("--new", "--reset-data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The options that every command that trains has, under their names."""

    config: str
    tune_model_path: str | None = None
    fresh_opt: bool = False
    new: bool = False
    yes: bool = False
    dry_run: bool = False
    version: int | None = None
    strict: bool = False
    reset_data: bool = False
    no_plan: bool = False


def ask_on_terminal(question: str) -> bool:
    """Asks a person. Raises ConfigError where there is none to ask."""
    if not sys.stdin or not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask on: pass --yes to agree")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        return False


def train(
    request: Request, start_devices: StartDevices, *, command: Sequence[str], ask: Ask = ask_on_terminal,
    elastic: bool = False, expected: Hardware | None = None,
) -> int:  # fmt: skip
    """Runs what `request` asks for and returns the exit code.

    ask: gets the question of --new.  command: what a message tells the user to run again.  elastic: a run that goes on
    with another dp keeps its sequences a step (see `start.choose`).  expected: the devices, where they are known before
    they start, so that what cannot fit them is refused before that.
    Raises MeshTransformerError for what the user can correct, NonFiniteError after `max_skipped` batches.
    """
    with Watchdog() as watchdog, contextlib.ExitStack() as stack:
        config = load_config(request.config, version=request.version)
        check_training(config)
        check_interpreter()
        trackers.check_packages(config)
        formats.check_installed(config)
        with watchdog.phase("loading eval_harness_tasks"):
            tasks = in_training.of(config)
        with watchdog.phase("looking at the data files"):
            records = data_sets.check_data(config)
        stack.callback(records.close)
        if expected and not request.no_plan:
            check_hardware(config, expected)
        store = CheckpointStore(config.run.directory, config.run.keep_n, config.run.keep_every, config.run.keep_best)
        with watchdog.phase("looking at model_dir and checkpoints"):
            _check_places(request, config, store)
        agreed = _agree(request, store, ask)  # before devices start, which on a pod takes minutes, and money
        devices = stack.enter_context(start_devices(config))
        config = _with_steps(config, records, devices.dp)
        found = devices.hardware
        if not request.no_plan and not (expected and found.same_devices(expected)):
            check_hardware(config, found)
        decide = functools.partial(
            start.choose, store, config, dp=devices.dp, fingerprint=records.fingerprint,
            tokenizer=records.tokenizer_hash, tune_path=request.tune_model_path, new=request.new,
            reset_data=request.reset_data, elastic=elastic,
        )  # fmt: skip
        seen, begin = store.steps(), decide()
        if _is_done(begin, store, watchdog, request.strict):
            return EXIT_DONE
        if request.dry_run:
            return _Session(request, begin, decide, store, devices, watchdog, command, tasks).try_out()
        stack.enter_context(store.hold())
        if store.steps() != seen:  # another trainer has got further, or has begun, before the folder was this one's
            begin = decide()
            if _is_done(begin, store, watchdog, request.strict):
                return EXIT_DONE
        if store.latest() != agreed:
            _agree(request, store, ask)
        return _Session(request, begin, decide, store, devices, watchdog, command, tasks).run()


def check_hardware(config: Config, hardware: Hardware) -> None:
    """Raises ConfigError where a training step cannot fit, see `planning.check`."""
    check.check_memory(config, hardware.device_kind, hardware.devices, hardware.memory)


def _agree(request: Request, store: CheckpointStore, ask: Ask) -> int | None:
    """Asks, where --new would delete a run. The step of the run that is there. Raises ConfigError for a no."""
    latest = store.latest()
    if request.new and latest is not None and not request.yes and not request.dry_run:
        if not ask(f"Delete the run at step {latest} in {store.model_dir} and start over?"):
            raise ConfigError(f"--new was not agreed to; the run in {store.model_dir} stays")
    return latest


def _is_done(begin: Start, store: CheckpointStore, watchdog: Watchdog, strict: bool) -> bool:
    """Whether nothing is left to train, the last step being there and whole.

    Where it is damaged, the run goes on from the step before; with `strict` that is refused: raises DamagedError.
    """
    if not begin.finished:
        return False
    path = store.path(begin.step)
    try:
        with watchdog.phase(f"checking {path}"):
            formats.check(path, begin.config.model, begin.config.mesh.cores_per_replica)
            inspect.verify(path)
    except DamagedError as error:
        if strict:
            raise
        logger.warning("the run is at its end, but %s", error)
        return False
    logger.info(
        "%s is at step %d of %d: there is nothing left to train", store.model_dir, begin.step,
        begin.config.run.total_steps,
    )  # fmt: skip
    return True


def _check_places(request: Request, config: Config, store: CheckpointStore) -> None:
    """Checks, before devices start, that model_dir can be written and that what fine-tuning starts from fits.

    A run that is finished is not even probed: nothing will be written.
    """
    at, total = store.latest(), config.run.total_steps
    if request.new or at is None or total is None or at < total:
        storage.probe_writable(store.model_dir)
        store.check_in_the_way(total, request.new)
        store.check_space(layout.step_bytes(config.model, config.mesh.cores_per_replica))
    if request.tune_model_path is not None and (at is None or request.new):
        formats.check(find_step(request.tune_model_path), config.model, config.mesh.cores_per_replica)


def _with_steps(config: Config, records: RecordSet, dp: int) -> Config:
    """`config` with total_steps, where it gives epochs."""
    if config.data.epochs is None:
        return config
    resolved = resolve_epochs(config, records.count, dp)
    logger.info(
        "%g epochs of %d sequences: total_steps %d", config.data.epochs, records.count, resolved.run.total_steps
    )
    return resolved


class _Session:
    """A run with everything checked and devices started. `decide` says where it begins, now."""

    def __init__(
        self, request: Request, begin: Start, decide: Callable[..., Start], store: CheckpointStore, devices: Devices,
        watchdog: Watchdog, command: Sequence[str], tasks: TaskEvaluation | None,
    ) -> None:  # fmt: skip
        self._request, self._begin, self._decide, self._store = request, begin, decide, store
        self._devices, self._watchdog, self._command, self._tasks = devices, watchdog, command, tasks
        self._config = begin.config
        self._stop = StopRequest()
        self._attempts = 0

    def run(self) -> int:
        """Trains, saves, and returns the exit code."""
        code = EXIT_USER
        with contextlib.ExitStack() as stack:
            # Not before: until here Ctrl-C has nothing to save, and ends the program as in any other.
            stack.enter_context(self._stop)
            if self._request.new:
                self._delete_old()
            run_id = self._run_id()
            with self._watchdog.phase("starting the trackers"):
                opened = trackers.open_trackers(self._config, run_id)

            for tracker in opened:
                stack.push(lambda kind, error, trace, closed=tracker: _close(closed, code, error))
            try:
                ending, run = self._devices.supervise(lambda: self._attempt(run_id, opened), self._store.latest)
            except BaseException as error:
                code = EXIT_NONFINITE if isinstance(error, NonFiniteError) else EXIT_USER
                raise
            code = self._report(ending, run)
        return code

    def _attempt(self, run_id: str, opened: Sequence[trackers.Tracker]) -> tuple[Ending, RunState]:
        """Trains from where the run stands to its end; once, but for devices that were lost and are there again."""
        if self._attempts:
            self._begin = self._decide(new=False)
            self._config = self._begin.config
        self._attempts += 1
        with contextlib.ExitStack() as stack:
            stack.callback(self._store.settle)
            machine, run, position = self._first_state(run_id)
            for tracker in opened:
                tracker.start(run.step)
            loop = self._loop(machine, run, position, opened, stack)
            return loop.run(), loop.run_state

    def try_out(self) -> int:
        """The dry run: one update, and one evaluation where the run would validate; nothing is written."""
        machine, _, position = self._first_state(self._run_id())
        with contextlib.ExitStack() as stack:
            data = stack.enter_context(self._open_training(position))
            executor = machine.executor(self._store, self._config, self._begin.agreement)
            validation = data_sets.open_validation(self._config, self._devices.dp, stack.callback)
            began = time.monotonic()
            with self._watchdog.phase("compiling and taking one step"):
                numbers = executor.train(next(data))()
            logger.info(
                "one step: loss %.4f, gradient norm %.4f, %.1f s with compilation", numbers["loss"],
                numbers["grad_norm"], time.monotonic() - began,
            )  # fmt: skip
            if validation is not None and self._config.run.val_every:
                for name, result in validation.run(executor, self._watchdog, self._stop).items():
                    logger.info("validation on %s: loss %.4f over %d sequences", name, result.loss, result.sequences)
        logger.info("dry run: everything is in order; nothing was written")
        return EXIT_DONE

    def _loop(
        self, machine: Machine, run: RunState, position: dict[str, object] | None,
        opened: Sequence[trackers.Tracker], stack: contextlib.ExitStack,
    ) -> TrainingLoop:  # fmt: skip
        config, total = self._config, int(self._config.run.total_steps or 0)
        return TrainingLoop(
            config,
            machine.executor(self._store, config, self._begin.agreement),
            machine.feed(stack.enter_context(self._open_training(position))),
            run,
            saved=self._begin.origin is Origin.RESUME,
            hardware=self._devices.hardware,
            stop=self._stop,
            watchdog=self._watchdog,
            validation=data_sets.open_validation(config, self._devices.dp, stack.callback),
            evaluate=machine.evaluation(self._tasks) if self._tasks is not None else None,
            trackers=opened,
            progress=StepProgress(run.step, total, stack.enter_context(step_progress(run.step, total))),
        )

    def _open_training(self, position: Mapping[str, object] | None) -> RecordLoader:
        return data_sets.open_training(self._config, self._devices.dp, position, self._request.reset_data)

    def _delete_old(self) -> None:
        left = self._store.delete_own()
        trackers.remove_tracks(self._store.model_dir)
        for path in left:
            logger.info("--new left %s alone: no run of this project wrote it", path)

    def _run_id(self) -> str:
        """The run's name towards trackers, kept over resumes."""
        if self._begin.origin is Origin.RESUME:
            found = self._store.aux(self._begin.step).get("run", {}).get("run_id")
            if found:
                return str(found)
        return uuid.uuid4().hex[:8]

    def _first_state(self, run_id: str) -> tuple[Machine, RunState, dict[str, object] | None]:
        """What holds the state to begin at, the run's record and its data position (None: the beginning).

        Sources, in order: see `Origin`.
        """
        begin, config, request = self._begin, self._config, self._request
        machine, dp = self._devices.hold(config), self._devices.dp
        if self._attempts <= 1:
            logger.info(
                "%s parameters; an update takes %d sequences, %s tokens", f"{machine.parameters:,}",
                config.sequences_per_step(dp), f"{config.tokens_per_step(dp):,}",
            )  # fmt: skip
        if begin.origin is Origin.RESUME:
            return machine, *self._resumed(machine, run_id)
        if begin.origin is Origin.TUNE and request.tune_model_path:
            source = find_step(request.tune_model_path)
            with self._watchdog.phase(f"loading {source}"):
                machine.tune(source, request.fresh_opt)
            logger.info("fine-tuning from %s: the schedule begins at 0", source)
            return machine, RunState(run_id, tuned_from=start.absolute(request.tune_model_path)), None
        logger.info("training from scratch with seed %d, into %s", config.run.seed, self._store.model_dir)
        with self._watchdog.phase("drawing the first weights"):
            machine.draw()
        return machine, RunState(run_id), None

    def _resumed(self, machine: Machine, run_id: str) -> tuple[RunState, dict[str, object] | None]:
        config, dp = self._config, self._devices.dp
        # Only at first: what has been saved since has its position in the new data.
        reset = self._request.reset_data and self._attempts <= 1
        agreement = {key: value for key, value in self._begin.agreement.items() if not (reset and key == "data")}
        with self._watchdog.phase(f"loading step {self._begin.step}"):
            aux, step = machine.restore(self._store, config, self._request.strict, agreement)
        run = start.restored_run(aux, step, config.sequences_per_step(dp), config.tokens_per_step(dp), run_id)
        position = aux.get("train_loader") or None
        logger.info(
            "resuming %s at step %d of %d%s", self._store.model_dir, step, config.run.total_steps,
            ", at the beginning of train_set" if reset or position is None else "",
        )  # fmt: skip
        return run, position

    def _report(self, ending: Ending, run: RunState) -> int:
        total, step = self._config.run.total_steps, self._store.latest()
        saved = f"saved as {self._store.path(step)}" if step is not None else "nothing had to be saved"
        if ending is Ending.DONE:
            logger.info("done: %d of %d steps, %s", run.step, total, saved)
            return EXIT_DONE
        again = shlex.join(word for word in ("python", *self._command) if word not in ONCE)
        logger.info(
            "interrupted by %s at step %d of %d, %s; to go on: %s", self._stop.requested, run.step, total, saved, again
        )
        return EXIT_INTERRUPTED


def _close(tracker: trackers.Tracker, code: int, error: BaseException | None) -> None:
    """Closes a tracker; what that meets is only logged where the run ends with another error, which counts."""
    try:
        tracker.close(code)
    except MeshTransformerError as failure:
        if error is None:
            raise
        logger.warning("%s", failure)
