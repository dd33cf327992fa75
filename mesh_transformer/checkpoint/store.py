"""The checkpoints of one model_dir: saving behind the training, retention, and restoring the newest that is good.

A step begins to exist when meta.json names it, which happens after its files and manifest are on the disk. Until then
its folder carries a mark; a folder with the mark that meta.json does not name is removed by the next run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from mesh_transformer import storage
from mesh_transformer.checkpoint import manifest, meta, retention
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.lock import Lock
from mesh_transformer.checkpoint.meta import Meta
from mesh_transformer.config import differences
from mesh_transformer.errors import CheckpointError, MeshTransformerError, StorageError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mesh_transformer.config import Config
    from mesh_transformer.state import TrainState

logger = logging.getLogger(__name__)

_STEP_FILES = ("shard_0/0.npz", "params/shard_0.npz", manifest.NAME)  # one of these is in every complete step

Which = int | Literal["latest", "best"]
# Writes the copy of a state into a step's folder, with details in its manifest; the copy's bytes.
Write = Callable[[str, dict[str, Any]], int]
T = TypeVar("T")


class Restored(NamedTuple):
    """`aux` as it was saved: `train_loader` (the data position), `val_loss`, and the caller's own entries."""

    state: TrainState
    aux: dict[str, Any]
    step: int


class CheckpointStore:
    """Steps under `model_dir`, local or gs://.

    Kept are the `keep_n` newest, every multiple of `keep_every` (0: none), and the one with the lowest validation loss
    on the set `keep_best` (None: no such one).
    """

    def __init__(
        self, model_dir: storage.PathLike, keep_n: int = 3, keep_every: int | None = 0, keep_best: str | None = None
    ) -> None:
        self.model_dir = storage.normalise(model_dir)
        self._keep_n = keep_n
        self._keep_every = keep_every or 0
        self._keep_best = keep_best
        self._lock: Lock | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    # What is there

    def path(self, step: int) -> str:
        return meta.step_dir(self.model_dir, step)

    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return list(self._meta().steps)

    def latest(self) -> int | None:
        return self._meta().steps[-1] if self._meta().steps else None

    def best(self) -> int | None:
        """The step with the lowest validation loss on `keep_best`; None if none was validated."""
        found = self._meta()
        return retention.best_of(found.steps, self._losses(found))

    def resolve(self, which: Which) -> int:
        """`latest`, `best` or a number as a step that is there. Raises CheckpointError listing those that are."""
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.model_dir} holds no complete checkpoint; check model_dir, or train first")
        step = self.latest() if which == "latest" else self.best() if which == "best" else which
        if step is None:
            raise CheckpointError(
                f"{self.model_dir}: no checkpoint was validated on {self._keep_best!r}, so none is best; "
                f"use latest, or one of {', '.join(map(str, steps))}"
            )
        if step not in steps:
            raise CheckpointError(f"{self.model_dir} has no step {step}; it has {', '.join(map(str, steps))}")
        return step

    # Before a run

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep every other trainer out, and clear away what a killed one left; waits for saving at the end.

        Raises CheckpointError naming the process that holds the folder.
        """
        with Lock(self.model_dir) as lock:
            self._lock = lock
            try:
                self._clean()
                yield
            finally:
                self._lock = None
                if self._thread is not None:
                    self._thread.join()

    def check_space(self, step_bytes: int) -> None:
        """Check that the steps to be kept, and one more being written, will fit.

        `step_bytes` as from `layout.step_bytes`. Steps that are there already count as room. Raises StorageError.
        """
        free = storage.free_bytes(self.model_dir)
        if free is None:
            return
        most = self._keep_n + 1 + (self._keep_best is not None)
        needed = step_bytes * max(1, most - len(self.steps()))
        if free < needed:
            raise StorageError(
                f"{self.model_dir}: {_gb(free)} free, but up to {most} checkpoints of {_gb(step_bytes)} will be "
                f"there at once, which needs {_gb(needed)} more: free some, lower keep_n, or choose another model_dir"
            )

    def check_in_the_way(self, last: int | None, new: bool = False) -> None:
        """Check that nothing foreign lies where the steps behind the newest, up to `last` (None: any), are to go.

        `new`: what is there is deleted first, which leaves alone what no run wrote. Raises CheckpointError naming it.
        """
        after = 0 if new else self.latest() or 0
        for step in meta.step_folders(self.model_dir):
            if not after < step <= (step if last is None else last):
                continue
            folder = self.path(step)
            if not self._is_own(step):
                found = storage.listdir(folder)
            else:
                found = retention.foreign(folder) if new else []
            if found:
                raise CheckpointError(
                    f"{folder}, where step {step} would be saved, holds {', '.join(found[:5])}, which no run of this "
                    "model_dir wrote: move it away, or choose another model_dir"
                )

    def delete_own(self) -> list[str]:
        """Remove all checkpoints that this project wrote here (`--new`); returns what it left alone, as paths."""
        found = [step for step in meta.step_folders(self.model_dir) if self._is_own(step)]
        for step in found:
            retention.mark_unfinished(self.path(step))
        # Without meta.json and with every folder marked, nothing comes back if this is cut short.
        storage.remove(storage.join(self.model_dir, meta.NAME))
        return [storage.join(self.path(step), name) for step in found for name in retention.delete(self.path(step))]

    # Saving

    def save(
        self,
        step: int,
        state: TrainState,
        config: Config,
        position: Mapping[str, Any] | None = None,
        val_loss: Mapping[str, float] | None = None,
        aux: Mapping[str, Any] | None = None,
        agreement: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy the state to the host, return, and write it as `step` from a thread.

        `position`: of the data, JSON; `val_loss`: by validation set; `aux`: more JSON to be given back by `restore`;
        `agreement`: what a resume must share (default: the config's). Waits for the save before; raises what it met.
        Raises CheckpointError for the only step that is there: while it is written again, a kill would leave none.
        """
        from mesh_transformer.checkpoint.formats import write_snapshot
        from mesh_transformer.checkpoint.snapshot import snapshot

        def take() -> Write:
            copied = snapshot(state)
            return lambda folder, details: write_snapshot(folder, copied, config, details)

        self.save_by(take, step, config, _mesh_shape(state), position, val_loss, aux, agreement)

    def save_by(
        self,
        take: Callable[[], Write],
        step: int,
        config: Config,
        mesh: Mapping[str, int],
        position: Mapping[str, Any] | None = None,
        val_loss: Mapping[str, float] | None = None,
        aux: Mapping[str, Any] | None = None,
        agreement: Mapping[str, Any] | None = None,
    ) -> None:
        """As `save`, of a state that others hold on a mesh of this shape: `take` makes them copy it, now."""
        self.wait()
        if self._lock is not None:
            self._lock.check()
        if self.steps() == [step]:
            raise CheckpointError(
                f"{self.path(step)} is there already, and no other step: replacing it could lose both if it were cut "
                "short; save into another model_dir, or at another step first"
            )
        saved = {**(aux or {}), "train_loader": dict(position or {}), "val_loss": dict(val_loss or {})}
        details = {
            "step": step,
            "config": config.to_dict(),
            "agreement": dict(config.agreement() if agreement is None else agreement),
            "mesh": dict(mesh),
            "aux": saved,
        }
        work = (step, take(), saved, details)
        self._thread = threading.Thread(target=self._write, args=work, name="checkpoint writer")
        self._thread.start()

    def wait(self) -> None:
        """Return when the last save is on the disk. Raises StorageError, chained to its cause, if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is None:
            return
        last = self.latest()
        good = "no checkpoint is complete yet" if last is None else f"the last complete checkpoint is {self.path(last)}"
        kind = type(error) if isinstance(error, MeshTransformerError) else CheckpointError
        raise kind(f"saving failed: {error}; {good}") from (error.__cause__ or error)

    def settle(self) -> None:
        """Return when no save is under way; what one met was logged, and is forgotten."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._error = None

    def _write(self, step: int, write: Write, aux: dict[str, Any], details: dict[str, Any]) -> None:
        try:
            started = time.monotonic()
            count = self._publish(step, write, aux, details)
            logger.info("saved %s (%s in %.1f s)", self.path(step), _gb(count), time.monotonic() - started)
        except Exception as error:  # noqa: BLE001 - handed to the thread that trains, by wait()
            # Said now, since the next save, where it is raised, may be hours away.
            logger.error("saving %s failed: %s; what was saved before stays", self.path(step), error)
            self._error = error
            self._discard(step)

    def _publish(self, step: int, write: Write, aux: dict[str, Any], details: dict[str, Any]) -> int:
        found, folder = self._meta(), self.path(step)
        if step in found.steps:
            # Saved before, and found damaged since, or reached again from an older one: the others stay loadable.
            found = found.without({step})
            meta.write(self.model_dir, found)
        elif storage.listdir(folder) and not self._is_own(step):
            raise CheckpointError(f"{folder} is there, but no run of this model_dir wrote it; move it away")
        if storage.exists(folder):
            retention.delete(folder)
        retention.mark_unfinished(folder)
        count = write(folder, details)
        found = found.with_step(step, aux)
        old = retention.to_delete(found.steps, self._losses(found), self._keep_n, self._keep_every)
        for each in old:
            retention.mark_unfinished(self.path(each))  # so that they go, once unnamed, even if this is cut short
        meta.write(self.model_dir, found.without(old))
        retention.clear_mark(folder)
        for each in sorted(old):
            retention.delete(self.path(each))
        return count

    # Restoring

    def restore(
        self,
        config: Config,
        mesh: Mesh,
        which: Which = "latest",
        strict: bool = False,
        optimizer: bool = True,
        agreement: Mapping[str, Any] | None = None,
    ) -> Restored:
        """Load a step onto `mesh`. With `latest`, a damaged one is passed over for the one before, with a warning.

        `agreement`: what this run says of itself (default: the config's); `{}` compares nothing. `strict`: refuse
        damage instead. Raises CheckpointError, also if the step belongs to another run (with the keys that differ).
        """
        from mesh_transformer.checkpoint.formats import read_step

        def read(path: str) -> TrainState:
            return read_step(path, config.model, mesh, optimizer, zero_stage=config.mesh.zero_stage)

        return Restored(*self.restore_by(read, config, which, strict, agreement))

    def restore_by(
        self,
        read: Callable[[str], T],
        config: Config,
        which: Which = "latest",
        strict: bool = False,
        agreement: Mapping[str, Any] | None = None,
    ) -> tuple[T, dict[str, Any], int]:
        """As `restore`, with what `read` makes of the step's folder instead of a state."""
        chosen = self.resolve(which)
        steps = self.steps()
        fallbacks = steps[: steps.index(chosen)][::-1] if which == "latest" and not strict else []
        mine = config.agreement() if agreement is None else agreement
        first: DamagedError | None = None
        for step in (chosen, *fallbacks):
            try:
                aux = self._agreed_aux(step, mine)
                state = read(self.path(step))
            except DamagedError as error:
                first = first or error
                if fallbacks:
                    logger.warning("passing over step %d: %s", step, error)
                continue
            if step != chosen:
                logger.warning("step %d is used instead; what was trained after it is trained again", step)
            return state, aux, step
        if strict and steps[0] != chosen:
            raise DamagedError(f"{first}; without --strict the step before it is used") from first
        raise DamagedError(f"{first}; no older checkpoint is there to fall back to") from first

    def aux(self, step: int) -> dict[str, Any]:
        """What was saved with a step besides the state. Raises DamagedError if its manifest is damaged."""
        return self._agreed_aux(step, {})

    def _agreed_aux(self, step: int, mine: Mapping[str, Any]) -> dict[str, Any]:
        found = manifest.read(self.path(step))
        if found is None:  # written by the 2021 library: only shapes can be compared
            return self._meta().aux.get(step, {})
        different = differences(found.details.get("agreement", {}), mine)
        if different:
            raise CheckpointError(
                f"{self.path(step)} is of another run: {'; '.join(different)}. Use that run's config, another "
                "model_dir, or start from its weights with --tune-model-path"
            )
        aux: dict[str, Any] = found.details.get("aux", {})
        return aux

    # What lies in the folder

    def _meta(self) -> Meta:
        return meta.load(self.model_dir)

    def _losses(self, found: Meta) -> dict[int, float]:
        losses = {step: aux.get("val_loss", {}).get(self._keep_best) for step, aux in found.aux.items()}
        return {step: loss for step, loss in losses.items() if isinstance(loss, (int, float))}

    def _is_own(self, step: int) -> bool:
        folder = self.path(step)
        return (
            step in self._meta().steps
            or retention.is_unfinished(folder)
            or storage.exists(storage.join(folder, manifest.NAME))
        )

    def _clean(self) -> None:
        """Finish what a killed run left: steps half written or half deleted go, complete ones lose their mark."""
        steps = self._meta().steps
        meta.remove_drafts(self.model_dir)
        for step in meta.step_folders(self.model_dir):
            if retention.is_unfinished(self.path(step)) or not storage.listdir(self.path(step)):
                if step in steps:
                    retention.clear_mark(self.path(step))
                else:
                    logger.info("removing %s, which was not complete", self.path(step))
                    retention.delete(self.path(step))

    def _discard(self, step: int) -> None:
        """Free the space of a save that failed; failing at that too is only logged, the first error counts."""
        try:
            if retention.is_unfinished(self.path(step)) and step not in self.steps():
                retention.delete(self.path(step))
        except MeshTransformerError as error:
            logger.warning("%s", error)


def find_step(path: storage.PathLike) -> str:
    """The step folder that `path` names: itself, or the newest step of the model_dir that it is."""
    given = storage.normalise(path)
    if not storage.exists(storage.join(given, meta.NAME)):
        return given
    # Version 2 of the 2021 library has a meta.json of another kind in its steps.
    if any(storage.exists(storage.join(given, *file.split("/"))) for file in _STEP_FILES):
        return given
    store = CheckpointStore(given)
    return store.path(store.resolve("latest"))


def _mesh_shape(state: TrainState) -> dict[str, int]:
    import jax

    sharding = jax.tree.leaves(state.params)[0].sharding
    return dict(sharding.mesh.shape) if isinstance(sharding, jax.sharding.NamedSharding) else {}


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
