"""A training run on this process's devices, from the command's options to its exit code.

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

import jax
import numpy as np

from mesh_transformer import parameters, storage
from mesh_transformer.checkpoint import formats, inspect, layout
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.store import CheckpointStore, find_step
from mesh_transformer.config import Config, check_interpreter, check_training, load_config, mesh_notice, resolve_epochs
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
from mesh_transformer.mesh import DP, MP, choose_platform, describe, find_devices, make_mesh
from mesh_transformer.state import TrainState
from mesh_transformer.training import data_sets, start, trackers
from mesh_transformer.training.executor import NetworkExecutor
from mesh_transformer.training.loop import Ending, Hardware, TrainingLoop
from mesh_transformer.training.progress import StepProgress, step_progress
from mesh_transformer.training.run_state import RunState
from mesh_transformer.training.signals import StopRequest
from mesh_transformer.training.start import Origin, Start
from mesh_transformer.training.watchdog import Watchdog
from mesh_transformer.transformer_shard import CausalTransformer, compiled_init
from mesh_transformer.transformer_zero import network_of

logger = logging.getLogger(__name__)

Ask = Callable[[str], bool]

# Options that the command to go on leaves out: they would delete what was just saved, or read the same data again.
ONCE = ("--new", "--reset-data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The options of device_train.py, under their names."""

    config: str
    tune_model_path: str | None = None
    fresh_opt: bool = False
    new: bool = False
    yes: bool = False
    platform: str | None = None
    devices: int | None = None
    dry_run: bool = False
    version: int | None = None
    strict: bool = False
    reset_data: bool = False


def ask_on_terminal(question: str) -> bool:
    """Asks a person. Raises ConfigError where there is none to ask."""
    if not sys.stdin or not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask on: pass --yes to agree")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        return False


def train(request: Request, *, ask: Ask = ask_on_terminal, command: Sequence[str] = ("device_train.py",)) -> int:
    """Runs what `request` asks for and returns the exit code.

    ask: gets the question of --new.  command: what a message tells the user to run again.
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
        store = CheckpointStore(config.run.directory, config.run.keep_n, config.run.keep_every, config.run.keep_best)
        with watchdog.phase("looking at model_dir and checkpoints"):
            _check_places(request, config, store)
        config, mesh = _start_devices(request, config, records)
        decide = functools.partial(
            start.choose, store, config, dp=mesh.shape[DP], fingerprint=records.fingerprint,
            tokenizer=records.tokenizer_hash, tune_path=request.tune_model_path, new=request.new,
            reset_data=request.reset_data,
        )  # fmt: skip
        seen, begin = store.steps(), decide()
        if _is_done(begin, store, watchdog, request.strict):
            return EXIT_DONE
        if request.dry_run:
            return _Session(request, begin, store, mesh, watchdog, command, tasks).try_out()
        stack.enter_context(store.hold())
        if store.steps() != seen:  # another trainer has got further, or has begun, before the folder was this one's
            begin = decide()
            if _is_done(begin, store, watchdog, request.strict):
                return EXIT_DONE
        if request.new and store.latest() is not None and not request.yes:
            question = f"Delete the run at step {store.latest()} in {store.model_dir} and start over?"
            if not ask(question):
                raise ConfigError(f"--new was not agreed to; the run in {store.model_dir} stays")
        return _Session(request, begin, store, mesh, watchdog, command, tasks).run()


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


def _start_devices(request: Request, config: Config, records: RecordSet) -> tuple[Config, jax.sharding.Mesh]:
    """Starts devices and settles what depends on their number: the mesh, and total_steps where epochs are given."""
    choose_platform(request.platform, request.devices)
    devices = find_devices(request.platform, request.devices)
    mesh = make_mesh(config, devices)
    logger.info("%s", describe(mesh))
    notice = mesh_notice(config, len(devices))
    if notice:
        logger.info("%s", notice)
    if config.data.epochs is not None:
        epochs, count = config.data.epochs, records.count
        config = resolve_epochs(config, count, mesh.shape[DP])
        logger.info("%g epochs of %d sequences: total_steps %d", epochs, count, config.run.total_steps)
    return config, mesh


class _Session:
    """One process's part of a run, with everything checked and devices started."""

    def __init__(
        self, request: Request, begin: Start, store: CheckpointStore, mesh: jax.sharding.Mesh, watchdog: Watchdog,
        command: Sequence[str], tasks: TaskEvaluation | None,
    ) -> None:  # fmt: skip
        self._request, self._begin, self._store, self._mesh = request, begin, store, mesh
        self._watchdog, self._command, self._tasks = watchdog, command, tasks
        self._config = begin.config
        self._stop = StopRequest()

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
            network, run, position = self._first_state(run_id)
            for tracker in opened:
                tracker.start(run.step)
            loop = self._loop(network, run, position, opened, stack)
            try:
                ending = loop.run()
            except BaseException as error:
                code = EXIT_NONFINITE if isinstance(error, NonFiniteError) else EXIT_USER
                raise
            code = self._report(ending, loop.run_state)
        return code

    def try_out(self) -> int:
        """The dry run: one update, and one evaluation where the run would validate; nothing is written."""
        network, _, position = self._first_state(self._run_id())
        with contextlib.ExitStack() as stack:
            data = stack.enter_context(self._open_training(position))
            executor = NetworkExecutor(network, self._store, self._config, self._begin.agreement)
            validation = data_sets.open_validation(self._config, self._mesh.shape[DP], stack.callback)
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
        self, network: CausalTransformer, run: RunState, position: dict[str, object] | None,
        opened: Sequence[trackers.Tracker], stack: contextlib.ExitStack,
    ) -> TrainingLoop:  # fmt: skip
        config, dp, total = self._config, self._mesh.shape[DP], int(self._config.run.total_steps or 0)
        device = self._mesh.devices.flat[0]
        return TrainingLoop(
            config,
            NetworkExecutor(network, self._store, config, self._begin.agreement),
            stack.enter_context(self._open_training(position)),
            run,
            saved=self._begin.origin is Origin.RESUME,
            hardware=Hardware(device.device_kind, self._mesh.size),
            stop=self._stop,
            watchdog=self._watchdog,
            validation=data_sets.open_validation(config, dp, stack.callback),
            evaluate=self._tasks.on(network) if self._tasks is not None else None,
            trackers=opened,
            progress=StepProgress(run.step, total, stack.enter_context(step_progress(run.step, total))),
        )

    def _open_training(self, position: Mapping[str, object] | None) -> RecordLoader:
        return data_sets.open_training(self._config, self._mesh.shape[DP], position, self._request.reset_data)

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

    def _first_state(self, run_id: str) -> tuple[CausalTransformer, RunState, dict[str, object] | None]:
        """The network with the state to begin at, the run's record and its data position (None: the beginning).

        Sources, in order: see `Origin`.
        """
        begin, config, request = self._begin, self._config, self._request
        network = network_of(config, self._mesh)
        count = parameters.count(network.model, self._mesh.shape[MP])
        dp = self._mesh.shape[DP]
        logger.info(
            "%s parameters; an update takes %d sequences, %s tokens", f"{count:,}", config.sequences_per_step(dp),
            f"{config.tokens_per_step(dp):,}",
        )  # fmt: skip
        if begin.origin is Origin.RESUME:
            return self._resumed(network, run_id)
        if begin.origin is Origin.TUNE and request.tune_model_path:
            source = find_step(request.tune_model_path)
            with self._watchdog.phase(f"loading {source}"):
                network.load_ckpt(source, optimizer=not request.fresh_opt)
            network.state = begin_schedule(network)
            logger.info("fine-tuning from %s: the schedule begins at 0", source)
            return network, RunState(run_id, tuned_from=start.absolute(request.tune_model_path)), None
        logger.info("training from scratch with seed %d, into %s", config.run.seed, self._store.model_dir)
        with self._watchdog.phase("drawing the first weights"):
            jax.block_until_ready(network.state)
        return network, RunState(run_id), None

    def _resumed(
        self, network: CausalTransformer, run_id: str
    ) -> tuple[CausalTransformer, RunState, dict[str, object] | None]:
        config, dp, reset = self._config, self._mesh.shape[DP], self._request.reset_data
        agreement = {key: value for key, value in self._begin.agreement.items() if not (reset and key == "data")}
        with self._watchdog.phase(f"loading step {self._begin.step}"):
            restored = self._store.restore(config, self._mesh, strict=self._request.strict, agreement=agreement)
        network.state = restored.state
        run = start.restored_run(
            restored.aux, restored.step, config.sequences_per_step(dp), config.tokens_per_step(dp), run_id
        )
        position = restored.aux.get("train_loader") or None
        logger.info(
            "resuming %s at step %d of %d%s", self._store.model_dir, restored.step, config.run.total_steps,
            ", at the beginning of train_set" if reset or position is None else "",
        )  # fmt: skip
        return network, run, position

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


def begin_schedule(network: CausalTransformer) -> TrainState:
    """The network's state with the schedule at its beginning, and fresh moments where it has none.

    The state's own `step`, and Adam's count beside its moments, go on.
    """
    state = network.state
    opt_state = state.opt_state
    if opt_state is None:
        opt_state = compiled_init(network.model, network.mesh, network.zero)(state.params)
    zero = jax.device_put(np.int32(0), opt_state.schedule_count.sharding)
    return state._replace(opt_state=opt_state._replace(schedule_count=zero))
