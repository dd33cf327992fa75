"""Where metrics go: a JSONL file always, TensorBoard and W&B when asked. None needs an account or a network."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Protocol

from mesh_transformer import storage
from mesh_transformer.config import Config
from mesh_transformer.errors import ConfigError, StorageError

logger = logging.getLogger(__name__)

JSONL_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"
WANDB_NAME = "wandb"


class Tracker(Protocol):
    """One destination. Made and checked before weights are read; `start` comes when the restored step is known."""

    def start(self, step: int) -> None:
        """Continue behind `step`: what was written for later steps is dropped or superseded.

        Called again where the run falls back to an earlier step.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; called at most once per step."""

    def flush(self) -> None:
        """Make what was logged durable."""

    def close(self, exit_code: int) -> None:
        """Finish; `exit_code` is how the run ended."""


class JsonlTracker:
    """One JSON object per line, `{"step": ..., "time": ..., metric: value, ...}`; values that are not finite are null.

    On a remote model_dir, where files cannot be appended to, a local copy is uploaded whole at every flush.
    """

    def __init__(self, model_dir: str, clock: Callable[[], float] = time.time) -> None:
        self.path = storage.join(model_dir, JSONL_NAME)
        self._clock = clock
        self._spool: str | None = None
        self._file: IO[str] | None = None

    def start(self, step: int) -> None:
        if self._file is not None:
            self.close(0)
        local = self.path
        if storage.is_url(self.path):
            self._spool = tempfile.mkdtemp(prefix="metrics-")
            local = os.path.join(self._spool, JSONL_NAME)
            if step > 0 and storage.exists(self.path):
                with open(local, "wb") as file:
                    file.write(storage.read_bytes(self.path))
        else:
            storage.makedirs(storage.parent(self.path))
        with storage.errors(local, "write"):
            keep_lines(local, step)
            self._file = open(local, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._file is None:
            raise StorageError(f"{self.path}: log before start; this is a bug in the caller")
        line: dict[str, Any] = {"step": step, "time": round(self._clock(), 3)}
        line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with storage.errors(self.path, "write"):
            self._file.write(json.dumps(line) + "\n")
            # To the operating system at once: a killed process loses no line.
            self._file.flush()

    def flush(self) -> None:
        if self._file is None:
            return
        with storage.errors(self.path, "write"):
            storage.sync(self._file)
        if self._spool is not None:
            with open(self._file.name, "rb") as file:
                storage.write_atomic(self.path, file.read())

    def close(self, exit_code: int) -> None:
        file, spool = self._file, self._spool
        try:
            self.flush()
        finally:
            self._file = self._spool = None
            if spool is not None:
                shutil.rmtree(spool, ignore_errors=True)
            if file is not None:
                with storage.errors(self.path, "write"):  # closing tries once more to write what a full disk refused
                    file.close()


def keep_lines(path: str, step: int) -> None:
    """Drops the lines of a local metrics file that lie past `step`, or that a kill cut short."""
    if not os.path.exists(path):
        return
    draft = f"{path}.{os.getpid()}.tmp"
    dropped = 0
    with open(path, encoding="utf-8", errors="replace") as old, open(draft, "w", encoding="utf-8") as new:
        for text in old:
            found = _step_of(text)
            if found is None or found > step:
                dropped += 1
            else:
                new.write(text)
    if dropped:
        os.replace(draft, path)
        logger.info("%s: dropped %d lines past step %d, which will be trained again", path, dropped, step)
    else:
        os.remove(draft)


def _step_of(text: str) -> int | None:
    try:
        return int(json.loads(text)["step"]) if text.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


class TensorBoardTracker:
    """TensorBoard events under `{model_dir}/tensorboard`; steps are the loop's.

    Events are written without tensorboardX's SummaryWriter: a full disk ends its thread unseen, and then every later
    call waits for that thread for ever.
    """

    def __init__(self, model_dir: str) -> None:
        _package("tensorboard", "tensorboardX")
        self._folder = storage.join(model_dir, TENSORBOARD_NAME)
        self._writer: Any = None

    def start(self, step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        with storage.errors(self._folder, "write"):
            if self._writer is not None:
                self._writer.close()
            storage.makedirs(self._folder)
            self._writer = EventsWriter(storage.join(self._folder, "events"), f".{step:09d}")
        if step:
            # Readers forget what a killed process logged for the steps that are trained again.
            self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with storage.errors(self._folder, "write"):
            self._writer.write_event(Event(wall_time=time.time(), **content))

    def flush(self) -> None:
        if self._writer is not None:
            with storage.errors(self._folder, "write"):
                self._writer.flush()

    def close(self, exit_code: int) -> None:
        if self._writer is not None:
            with storage.errors(self._folder, "write"):
                self._writer.close()


class WandbTracker:
    """A W&B run, offline unless `wandb_mode` is online; it starts, and so fails, before weights are read."""

    def __init__(self, config: Config, run_id: str) -> None:
        wandb = _package("wandb", "wandb")
        run = config.run
        local = not storage.is_url(run.directory)
        folder = run.directory if local else "."
        storage.makedirs(folder)
        online = run.wandb_mode == "online"
        try:
            with _no_terminal():
                self._run = wandb.init(
                    project=run.wandb_project,
                    entity=run.wandb_entity,
                    name=run.name,
                    notes=run.comment,
                    config=config.to_dict(),
                    mode=run.wandb_mode,
                    dir=folder,
                    id=run_id,
                    resume="allow" if online else None,
                    settings=wandb.Settings(silent=True, console="off"),
                )
        except (wandb.Error, OSError) as error:
            raise ConfigError(
                f"W&B could not start with wandb_mode {run.wandb_mode!r}: {error}; set wandb_mode to offline (and "
                "`wandb sync` the folder later), or take wandb out of trackers"
            ) from error

    def start(self, step: int) -> None:
        """Nothing: W&B itself drops steps below the last that it has seen."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def flush(self) -> None:
        """Nothing: W&B writes behind by itself."""

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


@contextlib.contextmanager
def _no_terminal() -> Iterator[None]:
    """Hides the terminal, so that a service that lacks a login fails instead of asking for one."""
    terminal = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = terminal


def check_packages(config: Config) -> None:
    """Raises ConfigError where a tracker's package is not installed; starts nothing."""
    for tracker, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if tracker in config.run.trackers:
            _package(tracker, package)


def _package(tracker: str, package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"trackers has {tracker}, which needs the package {package}: pip install 'mesh-transformer[{tracker}]', "
            "or take it out of trackers"
        ) from error


def open_trackers(config: Config, run_id: str) -> list[Tracker]:
    """The trackers of `config`, checked: packages are there, and W&B has started. Raises ConfigError, StorageError."""
    model_dir = config.run.directory
    trackers: list[Tracker] = [JsonlTracker(model_dir)]
    if "tensorboard" in config.run.trackers:
        trackers.append(TensorBoardTracker(model_dir))
    if "wandb" in config.run.trackers:
        trackers.append(WandbTracker(config, run_id))
    return trackers


def remove_tracks(model_dir: str) -> None:
    """Removes what trackers wrote into `model_dir`; for a new run in its place."""
    storage.remove(storage.join(model_dir, JSONL_NAME))
    for folder in (TENSORBOARD_NAME, WANDB_NAME):
        storage.remove_tree(storage.join(model_dir, folder))
