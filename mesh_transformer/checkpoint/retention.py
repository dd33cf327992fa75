"""Which steps stay, and how the others go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from mesh_transformer import storage
from mesh_transformer.checkpoint import manifest, orbax_layout
from mesh_transformer.errors import StorageError

# A folder with this file in it is being written or deleted: nothing in it counts, and it may be removed.
UNFINISHED = ".unfinished"


def to_delete(steps: Iterable[int], losses: Mapping[int, float], keep_n: int, keep_every: int) -> set[int]:
    """Of `steps`, oldest first, those that are neither among the `keep_n` newest, nor a multiple of `keep_every`
    (0: none are), nor the one with the lowest of `losses` (the newer one on a tie)."""
    ordered = list(steps)
    kept = set(ordered[-keep_n:]) if keep_n > 0 else set()
    if keep_every:
        kept |= {step for step in ordered if step % keep_every == 0}
    best = best_of(ordered, losses)
    if best is not None:
        kept.add(best)
    return set(ordered) - kept


def best_of(steps: Iterable[int], losses: Mapping[int, float]) -> int | None:
    """The step with the lowest loss, the newer on a tie; None if none was validated."""
    judged = [step for step in steps if losses.get(step, float("nan")) == losses.get(step)]  # not NaN
    return min(judged, key=lambda step: (losses[step], -step), default=None)


def mark_unfinished(step_dir: str) -> None:
    """The mark is empty, so that it comes into being at once: a kill leaves no part of it."""
    storage.makedirs(step_dir)
    with storage.errors(step_dir, "mark"):
        storage.open_file(storage.join(step_dir, UNFINISHED), "wb").close()
        storage.sync_folder(step_dir)


def clear_mark(step_dir: str) -> None:
    storage.remove(storage.join(step_dir, UNFINISHED))


def is_unfinished(step_dir: str) -> bool:
    return storage.exists(storage.join(step_dir, UNFINISHED))


def foreign(step_dir: str) -> list[str]:
    """The names in a step's folder that neither this project nor the 2021 library wrote."""
    found = []
    for name in storage.listdir(step_dir):
        if _is_shard(name):
            files = storage.listdir(storage.join(step_dir, name))
            found += [f"{name}/{file}" for file in files if not _is_array_file(file)]
        elif orbax_layout.is_state_folder(name):
            found += [f"{name}/{file}" for file in _foreign_to_state(storage.join(step_dir, name))]
        elif not _is_manifest(name) and name != UNFINISHED:
            found.append(name)
    return found


def delete(step_dir: str) -> list[str]:
    """Remove what this project or the 2021 library wrote into a step's folder; returns the names it left alone.

    The mark goes last, so that a deletion cut short is finished by the next run.
    """
    with contextlib.suppress(StorageError):  # a full disk takes no mark, and is the best reason to delete
        mark_unfinished(step_dir)
    left = foreign(step_dir)
    for name in storage.listdir(step_dir):
        path = storage.join(step_dir, name)
        if _is_shard(name):
            _delete_files(path, _is_array_file)
        elif orbax_layout.is_state_folder(name):
            _delete_state(path)
        elif _is_manifest(name):
            storage.remove(path)
    clear_mark(step_dir)
    if not left:
        storage.remove_tree(step_dir)
    return left


def _foreign_to_state(folder: str) -> list[str]:
    """The names in a folder of Orbax's that a save does not write."""
    found = []
    for name in storage.listdir(folder):
        if orbax_layout.is_array_folder(name):
            files = storage.listdir(storage.join(folder, name))
            found += [f"{name}/{file}" for file in files if not orbax_layout.is_array_file(file)]
        elif not orbax_layout.is_state_file(name):
            found.append(name)
    return found


def _delete_state(folder: str) -> None:
    for name in storage.listdir(folder):
        if orbax_layout.is_array_folder(name):
            _delete_files(storage.join(folder, name), orbax_layout.is_array_file)
    _delete_files(folder, orbax_layout.is_state_file)


def _delete_files(folder: str, is_own: Callable[[str], bool]) -> None:
    """Remove the folder's own files, and itself if nothing else is there."""
    for name in storage.listdir(folder):
        if is_own(name):
            storage.remove(storage.join(folder, name))
    if not storage.listdir(folder):
        storage.remove_tree(folder)


def _is_shard(name: str) -> bool:
    return name.startswith("shard_") and name[6:].isdigit()


def _is_array_file(name: str) -> bool:
    return name.removesuffix(".npz").isdigit()


def _is_manifest(name: str) -> bool:
    return name == manifest.NAME or storage.is_draft(name, manifest.NAME)
