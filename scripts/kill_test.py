"""Kill a training run again and again with `kill -9`, then let it finish, and compare it with an undisturbed one.

    python scripts/kill_test.py --kills 30

Passes (exit code 0) if the final checkpoint's files are the same byte for byte, the metrics of every step are the same
numbers, after every kill each checkpoint that meta.json names was whole, and none was ever lost. Kills fall at random:
while the run starts, while it trains, and while a checkpoint is being written or an old one deleted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mesh_transformer.checkpoint import manifest, retention  # noqa: E402
from mesh_transformer.checkpoint.store import CheckpointStore  # noqa: E402
from mesh_transformer.data.records import RecordWriter  # noqa: E402

SEQ, VOCAB, RECORDS_PER_FILE = 16, 64, 37  # files end in the middle of a step
DATED = ("_CHECKPOINT_METADATA", "commit_success.txt")  # in which Orbax notes the time, and the path
TIMES = ("time", "train/step_seconds", "train/steps_per_sec", "train/tokens_per_sec", "train/model_flops_per_sec")
DEADLINE = 900.0  # seconds for a process to reach the moment at which it is killed


class FailedError(Exception):
    """What the test exists to find."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=500, help="length of the run")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--mp", type=int, default=4)
    parser.add_argument("--version", type=int, choices=(1, 2), default=1, help="of the network (1)")
    parser.add_argument("--ckpt-format", choices=("shards", "orbax"), help="layout of checkpoints (the version's)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", help="where to work (default: a temporary folder, removed if all is well)")
    return parser.parse_args(arguments)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run in a folder of its own."""

    folder: Path
    devices: int

    @property
    def model_dir(self) -> Path:
        return self.folder / "model"

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.model_dir)

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "device_train.py"), "--config", str(self.folder / "config.json")]
        command += ["--platform", "cpu", "--devices", str(self.devices), "--strict"]
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled")}
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def finish(self) -> None:
        code = self.start().wait()
        if code != 0:
            raise FailedError(f"the run ended with exit code {code}; its log is {self.folder / 'log.txt'}")

    def lines(self) -> int:
        """Metrics written so far, as a sign of life."""
        path = self.model_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saving(self) -> bool:
        """Whether a checkpoint is being written or deleted."""
        return any(self.model_dir.glob(f"step_*/{retention.UNFINISHED}"))

    def trace(self) -> list[dict[str, Any]]:
        """The metrics of every step, without what depends on the clock."""
        lines = [json.loads(line) for line in (self.model_dir / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]

    def checksums(self) -> dict[str, str]:
        """Checksums of the newest step's files, read again from the disk."""
        step = self.store.path(self.store.resolve("latest"))
        return {name: entry.crc32c for name, entry in check_step(step).files.items() if not name.endswith(DATED)}


def check_step(step_dir: str) -> manifest.Manifest:
    """A step's manifest, with every file compared against it; raises CheckpointError if one is not whole."""
    found = manifest.read(step_dir)
    if found is None:
        raise FailedError(f"{step_dir} has no manifest")
    manifest.verify(step_dir, found)
    return found


def make_data(folder: Path) -> None:
    """Record files of sequences that count upwards in threes, so that there is something to learn."""
    for number in range(3):
        with (folder / f"{number}.tfrecords").open("wb") as file:
            writer = RecordWriter(file)
            for start in np.random.default_rng(number).integers(0, VOCAB, RECORDS_PER_FILE):
                writer.write({"text": (start + 3 * np.arange(SEQ + 1)) % VOCAB})
    (folder / "train.index").write_text("0.tfrecords\n1.tfrecords\n2.tfrecords\n")


def make_run(folder: Path, name: str, options: argparse.Namespace) -> Run:
    run = Run(folder / name, options.dp * options.mp)
    run.folder.mkdir()
    config = {
        "layers": 2, "d_model": 32, "n_heads": 8, "n_vocab": VOCAB, "seq": SEQ, "compute_dtype": "float32",
        "cores_per_replica": options.mp, "per_replica_batch": 1, "gradient_accumulation_steps": 2,
        "lr": 1e-2, "total_steps": options.steps, "ckpt_every": 3, "keep_n": 2, "keep_every": 50, "shuffle": True,
        "train_set": str(folder / "train.index"), "model_dir": str(run.model_dir), "name": "kill-test",
        "version": options.version,
    }  # fmt: skip
    if options.ckpt_format is not None:
        config["ckpt_format"] = options.ckpt_format
    (run.folder / "config.json").write_text(json.dumps(config))
    return run


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: `delay` seconds after the start, or after `lines` more lines of metrics (and, for `saving`, after
    the next checkpoint begins to be written)."""

    kind: str
    lines: int
    delay: float


def kill_once(run: Run, moment: Moment) -> str:
    """Start the run, kill it at a moment, and check what is left. Returns what it was doing then."""
    before = run.store.latest() or 0
    wanted = run.lines() + moment.lines
    began = time.monotonic()
    process = run.start()

    def wait_until(happens: Callable[[], bool]) -> None:
        while process.poll() is None and not happens():
            if time.monotonic() - began > DEADLINE:
                process.kill()
                raise FailedError(f"no progress in {DEADLINE:.0f} s; the log is {run.folder / 'log.txt'}")
            time.sleep(0.001)

    if moment.kind != "starting":
        wait_until(lambda: run.lines() > wanted)
    if moment.kind == "saving":
        wait_until(run.saving)
    end = time.monotonic() + moment.delay
    wait_until(lambda: time.monotonic() >= end)
    caught = "saving" if moment.kind != "starting" and run.saving() else moment.kind
    process.kill()
    code = process.wait()
    if code == 0:
        return "finished"
    if code != -9:
        raise FailedError(f"the run ended with exit code {code}; its log is {run.folder / 'log.txt'}")
    for step in run.store.steps():
        check_step(run.store.path(step))
    if (run.store.latest() or 0) < before:
        raise FailedError(f"step {before} was there before a kill, and only {run.store.latest()} after")
    return caught


def compare(undisturbed: Run, killed: Run) -> None:
    if undisturbed.trace() != killed.trace():
        pairs = zip(undisturbed.trace(), killed.trace(), strict=False)
        first = next((f"{a} and {b}" for a, b in pairs if a != b), "the number of lines")
        raise FailedError(f"the metrics differ: {first}")
    if undisturbed.checksums() != killed.checksums():
        raise FailedError("the final checkpoints differ")
    steps = [run.store.steps() for run in (undisturbed, killed)]
    if steps[0] != steps[1]:
        raise FailedError(f"other steps were kept: {steps[0]} and {steps[1]}")
    names = [sorted(path.name for path in run.model_dir.iterdir()) for run in (undisturbed, killed)]
    if names[0] != names[1]:
        raise FailedError(f"something was left behind: {names[0]} and {names[1]}")


def kill_and_compare(folder: Path, options: argparse.Namespace) -> str:
    """Runs everything in `folder`; returns a line of results. Raises FailedError or CheckpointError."""
    rng = random.Random(options.seed)
    make_data(folder)
    undisturbed, killed = (make_run(folder, name, options) for name in ("undisturbed", "killed"))
    began = time.monotonic()
    undisturbed.finish()
    seconds = time.monotonic() - began
    print(f"undisturbed: {options.steps} steps in {seconds:.1f} s", flush=True)
    times = [json.loads(line)["time"] for line in (undisturbed.model_dir / "metrics.jsonl").read_text().splitlines()]
    training = times[-1] - times[0]
    caught: Counter[str] = Counter()
    while caught.total() < options.kills:
        kind = rng.choices(["starting", "training", "saving"], [1, 2, 2])[0]
        # Half of this kill's share of what is left, on average, so that the run is not over before the last kill.
        share = (options.steps - (killed.store.latest() or 0)) / (options.kills - caught.total())
        lines = int(rng.uniform(0, share))
        longest = {"starting": seconds - training, "training": 2 * training / options.steps, "saving": 0.2}[kind]
        result = kill_once(killed, Moment(kind, lines, rng.uniform(0, longest)))
        if result == "finished":
            raise FailedError(f"the run was over after {caught.total()} kills; raise --steps")
        caught[result] += 1
        latest = killed.store.latest() or 0
        print(f"kill {caught.total()} of {options.kills}: {result}, at step {latest}", flush=True)
    killed.finish()
    compare(undisturbed, killed)
    count = len(undisturbed.checksums())
    kinds = ", ".join(f"{number} while {name}" for name, number in sorted(caught.items()))
    return f"{caught.total()} kills ({kinds}): {options.steps} lines of metrics and {count} files are the same"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="kill-test-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        print("passed:", kill_and_compare(folder, options))
    except (FailedError, ValueError) as error:
        print(f"failed: {error} (everything is still in {folder})", file=sys.stderr)
        return 1
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
