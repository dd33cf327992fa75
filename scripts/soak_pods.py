"""Break the hosts of a training run again and again, let it finish, and compare it with an undisturbed one.

    python scripts/soak_pods.py --steps 300

Every 20 to 40 steps one thing happens to a pod of two hosts on this machine: a host's process is killed or frozen, a
host's Ray node is killed or frozen, the driver is killed and started again, or a host's network is cut until the driver
has met that. For the last, hosts are machines in network namespaces that ssh reaches, which only the superuser makes;
without it they are processes of this machine. Passes (exit code 0) if the run ends, its final checkpoint's files are
the same byte for byte as an undisturbed run's, and so are the metrics of every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mesh_transformer.cluster.tpu_machines import HOME_VARIABLE  # noqa: E402
from scripts import kill_test  # noqa: E402
from scripts.kill_test import FailedError, Run  # noqa: E402
from scripts.soaking import sshd_hosts  # noqa: E402
from scripts.soaking.places import Place, Process, place  # noqa: E402

DRIVER, CUT = "driver killed", "network cut"
KINDS = ("process killed", "process frozen", "node killed", "node frozen", DRIVER, CUT)
DEADLINE = 600.0  # seconds without a new step before the run counts as hanging


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="length of the run (300)")
    parser.add_argument("--least", type=int, default=20, help="steps between two faults, at least (20)")
    parser.add_argument("--most", type=int, default=40, help="and at most (40)")
    parser.add_argument("--kinds", help="what may happen, with commas between (all that this machine can make)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--devices-per-host", type=int, default=2)
    parser.add_argument("--step-deadline", type=float, default=10.0, help="seconds; what finds a frozen process (10)")
    parser.add_argument(
        "--alone", action="store_true", help="the undisturbed run is device_train.py's, on the same mesh in one process"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    parser.add_argument("--folder", help="where to work (default: a temporary folder, removed if all is well)")
    options = parser.parse_args(arguments)
    options.kinds = [kind.strip() for kind in (options.kinds or ",".join(KINDS)).split(",")]
    unknown = sorted(set(options.kinds) - set(KINDS))
    if unknown:
        parser.error(f"--kinds: {', '.join(unknown)} is unknown; there are {', '.join(KINDS)}")
    why_not = sshd_hosts.why_no_namespaces() if CUT in options.kinds else None
    if why_not is not None:
        print(f"{CUT} is left out: {why_not}", flush=True)
        options.kinds.remove(CUT)
    if not options.kinds:
        parser.error("--kinds: nothing is left that can happen here")
    return options


@dataclasses.dataclass
class Driver:
    """One train.py after the other, in a run's folder."""

    run: Run
    options: argparse.Namespace
    place: Place
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = self.options
        command = [sys.executable, str(ROOT / "train.py"), "--config", str(self.run.folder / "config.json")]
        command += [*self.place.words, "--devices-per-host", str(options.devices_per_host), "--strict"]
        command += ["--step-deadline", str(options.step_deadline)]
        environment = os.environ | {HOME_VARIABLE: str(self.run.folder / "home")}
        with (self.run.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    @property
    def pid(self) -> int:
        assert self.process is not None  # noqa: S101
        return self.process.pid

    def wait_until(self, happens: Callable[[], bool]) -> bool:
        """Whether it happened before the driver ended. Raises FailedError where no step comes for too long."""
        lines, seen = self.run.lines(), time.monotonic()
        while not happens():
            if self.process is None or self.process.poll() is not None:
                return False
            if self.run.lines() != lines:
                lines, seen = self.run.lines(), time.monotonic()
            if time.monotonic() - seen > DEADLINE:
                self.process.kill()
                raise FailedError(f"no step in {DEADLINE:.0f} s; the log is {self.run.folder / 'log.txt'}")
            time.sleep(0.02)
        return True

    def _said(self, words: str) -> int:
        return (self.run.folder / "log.txt").read_text(errors="replace").count(words)

    def starts(self) -> int:
        """How often the run has begun or gone on."""
        return self._said("compiling the training step")

    def met(self) -> int:
        """How many faults the drivers have met."""
        return self._said("All processes were ended")

    def workers(self) -> list[Process]:
        """The hosts' processes that train."""
        return [each for each in self.place.processes(self.pid) if each.title.startswith("ray::Worker")]

    def nodes(self) -> list[Process]:
        """The hosts' Ray nodes: those with such a process."""
        parents = {worker.parent for worker in self.workers()}
        return [each for each in self.place.processes(self.pid) if each.pid in parents]


def break_one(driver: Driver, kind: str, rng: random.Random) -> None:
    """Let one thing happen, now, and wait until the driver, or the next one, has met it. Raises FailedError."""
    if kind == DRIVER:
        os.kill(driver.pid, signal.SIGKILL)
        assert driver.process is not None  # noqa: S101
        driver.process.wait()
        driver.start()
        return
    met = driver.met()
    if kind == CUT:
        host = rng.randrange(driver.options.hosts)
        driver.place.cut(host)
        try:
            driver.wait_until(lambda: driver.met() > met)
        finally:
            driver.place.mend(host)
        return
    those = driver.workers() if kind.startswith("process") else driver.nodes()
    if not those:
        raise FailedError("the driver has no hosts' processes below it")
    victim = rng.choice(sorted(those, key=lambda each: each.pid))
    os.kill(victim.pid, signal.SIGKILL if kind.endswith("killed") else signal.SIGSTOP)
    driver.wait_until(lambda: driver.met() > met)


def soak(folder: Path, options: argparse.Namespace, hosts: Place) -> str:
    """Runs everything in `folder`; returns a line of results. Raises FailedError."""
    rng = random.Random(options.seed)
    kill_test.make_data(folder)
    undisturbed, broken = (make_run(folder, name, options) for name in ("undisturbed", "broken"))
    if options.alone:
        undisturbed.finish()
    else:
        driver = Driver(undisturbed, options, hosts)
        driver.start()
        driver.wait_until(lambda: False)
        _expect_done(driver)
    driver = Driver(broken, options, hosts)
    driver.start()
    done: Counter[str] = Counter()
    longest, at = 0.0, 0
    order = list(options.kinds)
    rng.shuffle(order)
    while True:
        at += rng.randint(options.least, options.most)
        if at >= options.steps or not driver.wait_until(lambda: broken.lines() >= at):  # noqa: B023
            break
        kind = order[done.total() % len(order)]  # each as often as the others
        reached, began, starts = broken.lines(), time.monotonic(), driver.starts()
        break_one(driver, kind, rng)
        met = time.monotonic() - began
        if not driver.wait_until(lambda: driver.starts() > starts):  # noqa: B023
            break
        resumed = broken.lines()
        driver.wait_until(lambda: broken.lines() > resumed)  # noqa: B023
        seconds = time.monotonic() - began
        longest = max(longest, seconds)
        done[kind] += 1
        print(f"step {reached}: {kind}, met in {met:.1f} s; a new step {seconds - met:.1f} s after that", flush=True)
    driver.wait_until(lambda: False)
    _expect_done(driver)
    kill_test.compare(undisturbed, broken)
    kinds = ", ".join(f"{number} times {kind}" for kind, number in sorted(done.items()))
    return (
        f"{options.steps} steps through {done.total()} faults ({kinds}), the longest until a new step "
        f"{longest:.1f} s: {len(undisturbed.checksums())} files and all metrics are the same"
    )


def _expect_done(driver: Driver) -> None:
    assert driver.process is not None  # noqa: S101
    code = driver.process.wait()
    if code != 0:
        raise FailedError(f"the run ended with exit code {code}; its log is {driver.run.folder / 'log.txt'}")


def make_run(folder: Path, name: str, options: argparse.Namespace) -> Run:
    options.dp, options.mp = options.hosts, options.devices_per_host
    options.version, options.ckpt_format = 1, None
    return kill_test.make_run(folder, name, options)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="soak-pods-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with place(options.hosts, apart=CUT in options.kinds) as hosts:
            print("passed:", soak(folder, options, hosts))
    except (FailedError, ValueError) as error:
        print(f"failed: {error} (everything is still in {folder})", file=sys.stderr)
        return 1
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
