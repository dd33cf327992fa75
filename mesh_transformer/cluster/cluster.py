"""`TPUCluster`: a model on the hosts of a cluster, under the names and with the results of the 2021 library's class.

    with TPUCluster((2, 4), 2, load_config("configs/quickstart.json")) as cluster:
        loss, last_loss = cluster.train(tokens)

Without other hosts they are processes of this machine. train.py does more: it goes on when hosts die.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.cluster import pod
from mesh_transformer.cluster.crew import Pending
from mesh_transformer.cluster.local_hosts import LocalHosts
from mesh_transformer.cluster.pod import Patience, Pod
from mesh_transformer.cluster.pod_executor import PodMachine, write_copies
from mesh_transformer.config import Config, load_config
from mesh_transformer.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from mesh_transformer.cluster.hosts import Hosts

EVERYTHING = 1 << 30  # as many checkpoints as anybody keeps


class TPUCluster:
    """A model on `node_count` hosts, whose devices are the mesh `mesh_shape` (dp, mp).

    model: a config, or what `load_config` makes one of.  version: of the network; None for the config's.  hosts: where
    they come from; None for processes of this machine.

    What a method meets on a host is HostError, and every process has been ended then; `restart` begins anew, with the
    first weights, and `load` goes on from a checkpoint.
    """

    def __init__(
        self, mesh_shape: tuple[int, int], node_count: int, model: Config | Mapping[str, Any] | str,
        version: int | None = None, *, hosts: Hosts | None = None, patience: Patience | None = None,
    ) -> None:  # fmt: skip
        self._shape, self._count, self._model, self._version = mesh_shape, node_count, model, version
        self._hosts, self._patience = hosts, patience or Patience()
        self._stack = contextlib.ExitStack()
        self._pod: Pod | None = None
        self._machine: PodMachine | None = None
        self.config: Config

    def __enter__(self) -> Self:
        """Start the hosts. Raises ConfigError where mesh, hosts and config do not fit, and what `Hosts.start` does."""
        dp, mp = self._shape
        given = self._model if isinstance(self._model, Config) and self._version is None else None
        source = self._model.to_dict() if isinstance(self._model, Config) else self._model
        self.config = given or load_config(source, **({} if self._version is None else {"version": self._version}))
        if mp != self.config.mesh.cores_per_replica or dp * mp % self._count:
            raise ConfigError(
                f"mesh_shape {(dp, mp)} on {self._count} hosts: mp must be the config's cores_per_replica "
                f"({self.config.mesh.cores_per_replica}), and {dp * mp} devices must be the same number on each host"
            )
        hosts = self._hosts or LocalHosts(self._count, dp * mp // self._count)
        with contextlib.ExitStack() as stack:
            self._pod = stack.enter_context(pod.started(hosts, self.config, self._patience))
            if (self._pod.dp, len(self._pod.crew.hosts)) != (dp, self._count):
                raise ConfigError(
                    f"mesh_shape {(dp, mp)} on {self._count} hosts was asked for; there are "
                    f"{len(self._pod.crew.hosts)} hosts and dp {self._pod.dp}"
                )
            self._hold()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._pod = self._machine = None

    def restart(self) -> None:
        """After a HostError: make the hosts well again, with the first weights."""
        self._the_pod.start_again()
        self._hold()

    def _hold(self) -> None:
        self._machine = self._the_pod.hold(self.config)
        self._machine.draw()

    def train(self, data: np.ndarray | Mapping[str, np.ndarray]) -> tuple[float, float]:
        """One update on tokens [A, B, S + 1], or {"obs", "target" [A, B, S]}; its loss and last_loss.

        Raises DataError where B is not a multiple of dp.
        """
        batch = self._pairs(data)
        rows, dp = batch["obs"].shape[1], self._shape[0]
        if batch["obs"].ndim != 3 or rows % dp:
            raise DataError(
                f"a training batch is [A, B, S] with B a multiple of dp ({dp}), found {batch['obs'].shape}: "
                f"{rows} sequences cannot be split evenly over {dp} replicas"
            )
        executor = self._the_machine.executor(CheckpointStore("."), self.config, {})
        numbers = executor.train(batch)()
        return numbers["loss"], numbers["last_loss"]

    def eval(self, data: np.ndarray | Mapping[str, np.ndarray]) -> Any:
        """The mean loss of tokens [B, S + 1]; or what the 2021 library counts of {"obs", "target" [B, S]}, to which
        "ctx_length" [B] and "eval_mask" [B, S] may be added.

        That is, over sequences with anything unmasked, `total` (their number), `correct` (all unmasked tokens were the
        most likely), `last_correct` and `last_loss` (of the last position); and by sequence `mask_loss` (summed over
        what is unmasked) and `each_correct`.
        """
        batch = self._pairs(data)
        inputs = {name: value for name, value in batch.items() if name in ("obs", "target", "ctx_length")}
        found = self._evaluated(inputs)
        if not isinstance(data, Mapping):
            return float(np.mean(found["all_loss"]))
        mask = np.asarray(batch.get("eval_mask", np.ones(batch["obs"].shape)), bool)
        right = np.logical_and(found["correct"] > 0, mask)
        counted = mask.sum(-1)
        correct = (right.sum(-1) == counted) & (counted > 0)
        return {
            "total": int((counted > 0).sum()),
            "correct": int(correct.sum()),
            "last_correct": int(right[:, -1].sum()),
            "last_loss": float(((counted > 0) * found["last_loss"]).sum()),
            "mask_loss": (found["all_loss"] * mask).sum(-1),
            "each_correct": correct,
        }

    def _evaluated(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        crew, operation = self._the_pod.crew, "evaluating"
        sent = crew.submit("evaluate", inputs, True, operation=operation)
        asked = crew.submit("result", operation=operation, each=crew.first_alone())
        found: dict[str, np.ndarray] = crew.results(Pending((*sent.refs, *asked.refs), operation))[len(sent.refs)]
        return found

    def generate(self, context: np.ndarray, ctx_length: np.ndarray, gen_len: int, **options: Any) -> np.ndarray:
        """The tokens [B, gen_len] that follow contexts [B, S]; the rest as in `CausalTransformer.generate`."""
        arguments = (context, ctx_length, gen_len)
        found = self._the_pod.crew.call("generate", arguments, options, operation="generating")
        return np.asarray(found[0]["tokens"])

    def move(self) -> None:
        """Drop the optimizer's state, and keep the weights for inference."""
        self._the_pod.crew.call("drop_optimizer", operation="dropping the optimizer's state")

    def save(
        self, step: int, bucket: str | None, path: str, aux: Mapping[str, Any] | None = None, init: bool = False,
        overwrite: bool = False, keep_n: int = 3, delete_old: bool = True,
    ) -> None:  # fmt: skip
        """Write the state as `step` of the model_dir `path`, in `bucket` where one is given, for `load`.

        aux: JSON that `load` gives back.  init: this begins a run; what is there is refused, or with `overwrite`
        deleted.  keep_n: how many steps are kept; without `delete_old` all. Raises CheckpointError and StorageError.
        """
        store = CheckpointStore(_model_dir(bucket, path), keep_n if delete_old else EVERYTHING)
        if init and store.steps():
            if not overwrite:
                raise CheckpointError(
                    f"{store.model_dir} holds a run at step {store.latest()}: pass overwrite=True to delete it, or "
                    "choose another path"
                )
            store.delete_own()
        crew, orbax = self._the_pod.crew, self.config.run.ckpt_format == "orbax"

        def take() -> Any:
            crew.call("copy", orbax, operation=f"copying the state of step {step}")
            return lambda folder, details: write_copies(crew, folder, self.config, details)

        more = dict(aux or {})
        position = more.pop("train_loader", None)
        dp, mp = self._shape
        store.save_by(take, step, self.config, {"dp": dp, "mp": mp}, position, aux=more)
        store.wait()

    def load(self, bucket: str | None, path: str) -> tuple[int, dict[str, Any]]:
        """Load the newest good step of a model_dir; the step, and what was saved beside it. Raises CheckpointError."""
        store = CheckpointStore(_model_dir(bucket, path))
        aux, step = self._the_machine.restore(store, self.config, strict=False, agreement={})
        return step, aux

    def _pairs(self, data: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As obs and target. Raises DataError for ids that the model has not, before any host waits for another."""
        if isinstance(data, Mapping):
            pairs = {name: np.asarray(value) for name, value in data.items()}
        else:
            tokens = np.asarray(data)
            pairs = {"obs": tokens[..., :-1], "target": tokens[..., 1:]}
        most = self.config.model.n_vocab
        for name in ("obs", "target"):
            if pairs[name].size and not 0 <= pairs[name].min() <= pairs[name].max() < most:
                raise DataError(
                    f"{name} holds ids from {pairs[name].min()} to {pairs[name].max()}, outside 0 to {most - 1}"
                )
        return pairs

    @property
    def _the_pod(self) -> Pod:
        if self._pod is None:
            raise RuntimeError("the cluster is not started: use it in a `with`")
        return self._pod

    @property
    def _the_machine(self) -> PodMachine:
        if self._machine is None:
            raise RuntimeError("the cluster is not started: use it in a `with`")
        return self._machine


def _model_dir(bucket: str | None, path: str) -> str:
    """The same on every host."""
    whole = f"gs://{bucket}/{path}" if bucket else path
    return whole if storage.is_url(whole) else os.path.abspath(whole)
