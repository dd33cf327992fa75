"""What one host does: its part of one global JAX program, in a process of its own, at the driver's word.

The driver (`crew`) makes every host do the same in the same order, since their devices meet in collectives; calls that
touch devices carry a number, so that none is lost or overtaken unseen. Nothing here knows of Ray.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer.cluster.ports import free_ports
from mesh_transformer.errors import CheckpointError

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.manifest import FileEntry
    from mesh_transformer.checkpoint.snapshot import Snapshot
    from mesh_transformer.config import Config
    from mesh_transformer.evaluation.batching import Batch as ScoredBatch
    from mesh_transformer.evaluation.continuing import Prompt
    from mesh_transformer.evaluation.scorer import NetworkScorer, Score
    from mesh_transformer.transformer_shard import CausalTransformer

# How long jax's coordinator waits for a process that says nothing. The driver finds such a process long before; this
# is for processes whose driver is gone.
HEARTBEAT_SECONDS = 100
START_SECONDS = 120  # for all processes to come together


@dataclasses.dataclass(frozen=True)
class Joined:
    """What a process says of itself and of the devices that all have together. begun: see `process_begun`. memory:
    bytes of one device, or None."""

    pid: int
    begun: int | None
    hostname: str
    local_devices: int
    devices: int
    device_kind: str
    platform: str
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Held:
    """The mesh of a network, as every process sees it. replicas: by process, those of which it holds a part."""

    dp: int
    mp: int
    replicas: tuple[tuple[int, ...], ...]
    parameters: int


@dataclasses.dataclass(frozen=True)
class Inferring:
    """What weights for inference are; `step_dir` None for random ones."""

    step_dir: str | None
    compute_dtype: str
    weights_dtype: str
    device: str


def process_begun(pid: int) -> int | None:
    """When a process of this machine began, in ticks since the machine did; None where that, or the process, is not to
    be known."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return None


class Worker:
    """One process of the program."""

    def __init__(self) -> None:
        self._number = 0
        self._network: CausalTransformer | None = None
        self._replicas: tuple[int, ...] = ()
        self._copy: Snapshot | None = None
        self._scorer: NetworkScorer | None = None
        self._results: collections.deque[Callable[[], Any]] = collections.deque()

    # Beside the program, from another thread

    def ping(self) -> int:
        """That this process runs: its id."""
        return os.getpid()

    def free_port(self, address: str) -> int:
        """A port of this machine that nobody listens on."""
        return free_ports(address, 1)[0]

    def sees(self, path: str) -> bool:
        """Whether this host sees a file of the driver's."""
        from mesh_transformer import storage

        return storage.exists(path)

    def write(self, folder: str, model: Any, shards: int, orbax: bool, details: Mapping[str, Any]) -> Any:
        """Write this process's part of the copy that `copy` took: the files of it, and their bytes.

        In the layout "orbax" all processes meet, and the first writes the manifest. Raises CheckpointError where the
        driver has given the folder up.
        """
        from mesh_transformer.checkpoint import orbax_steps, retention
        from mesh_transformer.checkpoint import shards as published

        copy = self._taken()
        if not retention.is_unfinished(folder):
            # A call can come late, when a network that was cut is there again. What it wrote would be in the way.
            raise CheckpointError(f"{folder} is not marked as being written: the driver has given it up")
        if orbax:
            orbax_steps.write_step(folder, copy, model, **details)
            return {}, copy.nbytes
        return published.write_files(folder, copy, model, shards), copy.nbytes

    def describe(
        self, folder: str, entries: Mapping[str, FileEntry], model: Any, shards: int, details: Mapping[str, Any]
    ) -> None:
        """Write the manifest of files that all processes have written."""
        from mesh_transformer.checkpoint import shards as published

        published.describe(folder, entries, self._taken(), model, shards, **details)

    def forget_copy(self) -> None:
        """Free the memory of the copy."""
        self._copy = None

    # The program

    def join(self, coordinator: str, count: int, number: int, platform: str | None, devices: int | None) -> Joined:
        """Become process `number` of `count`, with `devices` simulated devices where `platform` is "cpu"."""
        import jax

        from mesh_transformer.mesh import choose_platform
        from mesh_transformer.planning.check import device_memory

        choose_platform(platform, devices)
        if platform == "cpu":
            # XLA runs a program from the cache without the order of its collectives, and between processes those meet
            # the wrong partners then.
            jax.config.update("jax_enable_compilation_cache", False)
            if count == 1:  # all sums stay in its memory then, without gloo, whose every message goes through TCP
                jax.config.update("jax_cpu_collectives_implementation", None)
        jax.distributed.initialize(
            coordinator, count, number, initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=10,
            coordinator_bind_address=coordinator if number == 0 else None,
        )  # fmt: skip
        here = jax.local_devices()
        return Joined(
            os.getpid(), process_begun(os.getpid()), socket.gethostname(), len(here), jax.device_count(),
            here[0].device_kind, here[0].platform, device_memory(here[0], len(here)),
        )  # fmt: skip

    def hold(self, number: int, config: Config) -> Held:
        """Make the network of a config on all devices; its state comes with the next call."""
        import jax

        from mesh_transformer import parameters, steps
        from mesh_transformer.mesh import DP, MP, make_mesh
        from mesh_transformer.transformer_zero import network_of

        self._in_turn(number)
        # Devices of one host side by side, so that `mp` stays inside it where it fits.
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        mesh = make_mesh(config, devices)
        self._network = network_of(config, mesh)
        self._scorer, self._copy = None, None
        self._results.clear()
        replicas = tuple(steps.replicas_of(mesh, process) for process in range(jax.process_count()))
        self._replicas = replicas[jax.process_index()]
        dp, mp = int(mesh.shape[DP]), int(mesh.shape[MP])
        return Held(dp, mp, replicas, parameters.count(self._network.model, mp))

    def draw(self, number: int) -> None:
        """The first weights, from the seed."""
        import jax

        self._in_turn(number)
        jax.block_until_ready(self._held.state)

    def load(self, number: int, path: str, optimizer: bool, begin_schedule: bool) -> None:
        """The state of a step's folder, each process what it needs; `begin_schedule`: as a fine-tuning run begins."""
        from mesh_transformer.training import executor

        self._in_turn(number)
        self._held.load_ckpt(path, optimizer=optimizer)
        if begin_schedule:
            self._held.state = executor.begin_schedule(self._held)

    def infer(self, number: int, config: Config, step_dirs: Sequence[str]) -> Inferring:
        """The weights of a step, or random ones, alone and in the compute dtype, as inference has them."""
        import jax

        from mesh_transformer import inference

        self._in_turn(number)
        self._network, step_dir = inference.load_step(config, self._held.mesh, step_dirs)
        dtype = str(jax.tree.leaves(self._held.state.params)[0].dtype)
        return Inferring(step_dir, str(self._held.model.compute_dtype), dtype, jax.local_devices()[0].device_kind)

    def train(self, number: int, batch: Mapping[str, np.ndarray], before: bool) -> Any:
        """Start an update on the rows of this process's replicas; `result` gives its numbers, or the next update.

        before: wait, while this update runs, for what the call before it started, and return that.
        """
        import jax

        self._in_turn(number)
        metrics = self._held.train(batch, self._replicas)
        self._results.append(lambda: {name: float(value) for name, value in jax.device_get(metrics).items()})
        return self._results.popleft()() if before else None

    def evaluate(self, number: int, batch: Mapping[str, np.ndarray], whole: bool = False) -> None:
        """Start an evaluation; `result` gives all losses. `whole`: every process has all rows, of any number."""
        import jax

        self._in_turn(number)
        found = self._held.eval(batch, None if whole else self._replicas)
        names = ("all_loss", "correct", "last_loss") if whole else ("all_loss",)
        self._results.append(lambda: {name: np.asarray(jax.device_get(found[name])) for name in names})

    def begin_scoring(self, number: int, tokenizer: Any) -> None:
        """Score with the weights as they are now."""
        from mesh_transformer.evaluation.scorer import NetworkScorer

        self._in_turn(number)
        self._scorer = NetworkScorer(self._held, tokenizer)

    def score(self, number: int, batch: ScoredBatch) -> None:
        """Start scoring a batch; `result` gives the scores."""
        self._in_turn(number)
        found: Callable[[], list[Score]] = self._scoring.score(batch)
        self._results.append(found)

    def continued(self, number: int, prompts: Sequence[Prompt]) -> list[str]:
        """The texts that follow the prompts."""
        self._in_turn(number)
        return self._scoring.continued(prompts)

    def generate(self, number: int, arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """As `CausalTransformer.generate`."""
        self._in_turn(number)
        return self._held.generate(*arguments, **options)

    def drop_optimizer(self, number: int) -> None:
        """Keep the weights alone."""
        self._in_turn(number)
        self._held.state = self._held.state._replace(opt_state=None)

    def result(self, number: int, wanted: bool) -> Any:
        """What the oldest call that was only started gives, once it is done; nothing but that, unless `wanted`."""
        self._in_turn(number)
        found = self._results.popleft()()
        return found if wanted else None

    def copy(self, number: int, orbax: bool) -> dict[str, int]:
        """Copy this process's part of the state to the host's memory; the mesh's shape."""
        from mesh_transformer.checkpoint.snapshot import snapshot

        self._in_turn(number)
        self._copy = snapshot(self._held.state, by_shard=not orbax)
        return {str(name): int(size) for name, size in self._held.mesh.shape.items()}

    def _in_turn(self, number: int) -> None:
        if number != self._number:
            raise RuntimeError(f"call {number} came where call {self._number} was due")
        self._number += 1

    @property
    def _held(self) -> CausalTransformer:
        if self._network is None:
            raise RuntimeError("hold was not called")
        return self._network

    @property
    def _scoring(self) -> NetworkScorer:
        if self._scorer is None:
            raise RuntimeError("begin_scoring was not called")
        return self._scorer

    def _taken(self) -> Snapshot:
        if self._copy is None:
            raise RuntimeError("there is no copy of the state")
        return self._copy
