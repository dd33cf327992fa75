"""A new checkpoint step made of a stream of tensors: files of any M, manifest, meta.json, and nothing if it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer import parameters, storage
from mesh_transformer.checkpoint import layout, manifest, meta, orbax_steps, retention
from mesh_transformer.checkpoint.blocks import Blocks, pieces
from mesh_transformer.checkpoint.casting import cast
from mesh_transformer.checkpoint.layout import StateLeaf
from mesh_transformer.checkpoint.manifest import FileEntry, LeafEntry
from mesh_transformer.checkpoint.npz import Header, NpzWriter
from mesh_transformer.checkpoint.weights import Tensor
from mesh_transformer.errors import CheckpointError, StorageError
from mesh_transformer.parameters import Combine

if TYPE_CHECKING:
    from mesh_transformer.config import ModelConfig

_WORKERS = 4
_COUNTER = np.dtype(np.int32)


def write_weights(
    out: storage.PathLike,
    model: ModelConfig,
    shards: int,
    tensors: Iterable[Tensor],
    counters: Mapping[str, int],
    details: Mapping[str, Any] | None = None,
    dtypes: Callable[[StateLeaf], np.dtype] | None = None,
) -> str:
    """Write a step of `shards` shards from tensors that come one at a time; returns the step's folder.

    `out`: the folder that will hold step_N and meta.json (or that step_N itself, whose parent then gets meta.json);
    local or gs://. `tensors`: all of `tensor_leaves(model, shards, full)` in that order; each is cast to its own
    `dtype` on the way. `counters`: layout.STEP; with COUNT and SCHEDULE_COUNT the step is full, so the tensors begin
    with the moments. `details`: for the manifest, as `Weights.details` has them (step, the N of step_N, if it is not
    counters[layout.STEP]; config, agreement, mesh, aux). `dtypes`: writes the layout "orbax" instead, each tensor in
    this type; `shards` then matters only to norm layernorm-desync.

    Raises CheckpointError where the model cannot be cut into so many shards, the step is already there, a tensor does
    not fit, or a value is too large for its type (f16 ends at 65504), and StorageError where there is no room; what
    was written is removed then.
    """
    full = layout.COUNT in counters
    details = {"step": counters[layout.STEP], **(details or {})}
    if dtypes is not None:
        size = layout.step_bytes(model, 1, full, 4)
        with new_step(out, int(details["step"]), size, details.get("aux")) as step_dir:
            orbax_steps.write_stream(step_dir, model, shards, tensors, counters, dtypes, details)
        return step_dir
    check_shards(model, shards)
    stream = _Stream(layout.state_leaves(model, shards, full), tensors, counters)
    needed = layout.step_bytes(model, shards, full, stream.itemsize)
    with new_step(out, int(details["step"]), needed, details.get("aux")) as step_dir:
        entries = _write_files(step_dir, stream, shards)
        manifest.write(step_dir, manifest.Manifest(shards, stream.described, entries, details))
    return step_dir


@contextlib.contextmanager
def new_step(
    out: storage.PathLike, step: int, needed: int, aux: Mapping[str, Any] | None = None
) -> Iterator[str]:  # fmt: skip
    """The folder of a step to be written in the block, at `out` (see `write_weights`) and taking `needed` bytes.

    After the block meta.json names it, with `aux`; an error in the block removes it. Raises CheckpointError where it
    is there already, StorageError where there is no room.
    """
    model_dir, step_dir = destination(out, step)
    if storage.listdir(step_dir) and not retention.is_unfinished(step_dir):
        raise CheckpointError(f"{step_dir} is already there; choose another output folder, or move it away")
    free = storage.free_bytes(model_dir)
    if free is not None and free < needed:
        raise StorageError(
            f"{model_dir}: {free / 1e9:.2f} GB free, and the weights take {needed / 1e9:.2f} GB: free some, or choose "
            "another output folder"
        )
    retention.mark_unfinished(step_dir)
    try:
        yield step_dir
        found = meta.load(model_dir).with_step(step, dict(aux or {}))
        meta.write(model_dir, meta.Meta(tuple(sorted(found.steps)), found.aux))
        retention.clear_mark(step_dir)
    except BaseException:
        with contextlib.suppress(StorageError):  # the error that brought us here says more
            retention.delete(step_dir)
        raise


def destination(out: storage.PathLike, step: int) -> tuple[str, str]:
    """(model_dir, step folder) of an output path: a folder for step_N, or step_N itself."""
    path = storage.normalise(out)
    if not re.fullmatch(r"step_\d+", storage.name(path)):
        return path, meta.step_dir(path, step)
    if storage.name(path) != f"step_{step}":
        raise CheckpointError(f"{path}: the weights are of step {step}; name it step_{step}, or another folder")
    return storage.parent(path), path


def check_shards(model: ModelConfig, shards: int) -> None:
    """Raises CheckpointError naming every size of the model that cannot be cut into `shards` equal parts."""
    if shards < 1:
        raise CheckpointError(f"{shards} shards were asked for; expected 1 or more")
    sizes = {
        kind.split: kind.layer_shape[kind.split_axis]
        for kind in parameters.kinds(model, shards)
        if kind.split_axis is not None
    }
    problems = [f"{axis} ({size})" for axis, size in sizes.items() if size % shards]
    if problems:
        raise CheckpointError(f"{shards} shards cannot share {', '.join(problems)}; choose a number that divides them")


class _Stream:
    """The leaves of a step in order, each with its value, checked; `described` grows as they pass."""

    def __init__(self, leaves: tuple[StateLeaf, ...], tensors: Iterable[Tensor], counters: Mapping[str, int]) -> None:
        self.leaves = leaves
        self.described: list[LeafEntry] = []
        self._tensors = iter(tensors)
        self._counters = counters
        self._first: Tensor | None = next(self._tensors, None)

    @property
    def itemsize(self) -> int:
        """Bytes of a value, going by the first tensor."""
        return self._first.dtype.itemsize if self._first else 4

    def next(self, leaf: StateLeaf, shards: int) -> Tensor:
        """The value of the leaf whose turn it is. Raises CheckpointError if another one comes."""
        if leaf.leaf is None:
            tensor = Tensor(leaf, np.array(self._counters[leaf.section], _COUNTER), _COUNTER)
            whole: tuple[int, ...] = ()
        else:
            found = self._first or next(self._tensors, None)
            self._first = None
            whole = leaf.leaf.kind.layer_shape
            if found is None or found.leaf.label != leaf.label or found.value.shape != whole:
                came = "the end" if found is None else f"{found.leaf.label} {list(found.value.shape)}"
                raise CheckpointError(f"{leaf.label} {list(whole)} was expected next, and {came} came")
            tensor = found
        self.described.append(LeafEntry(leaf.label, whole, leaf.shard_shape(shards), str(tensor.dtype)))
        return tensor


def _write_files(step_dir: str, stream: _Stream, shards: int) -> dict[str, FileEntry]:
    """Write the 16 files of all shards, one number at a time, and return their entries.

    Closing waits for the disk, so the files of one number are closed while those of the next are written.
    """
    for shard in range(shards):
        storage.makedirs(storage.join(step_dir, f"shard_{shard}"))
    leaves = iter(stream.leaves)
    written: dict[str, NpzWriter] = {}
    with ThreadPoolExecutor(_WORKERS) as pool, ThreadPoolExecutor(_WORKERS) as closers:
        closing: list[Future[None]] = []
        for file, run in enumerate(layout.runs(len(stream.leaves))):
            files = {f"shard_{m}/{file}.npz": NpzWriter(layout.shard_file(step_dir, m, file)) for m in range(shards)}
            try:
                for _ in range(run):
                    _spread(list(files.values()), stream.next(next(leaves), shards), pool)
            except BaseException as error:
                for writer in files.values():
                    writer.__exit__(type(error), error, None)
                raise
            _wait(closing)
            closing = [closers.submit(_close, writer) for writer in files.values()]
            written |= files
        _wait(closing)
    for shard in range(shards):
        storage.sync_folder(storage.join(step_dir, f"shard_{shard}"))
    return {name: FileEntry(writer.size, writer.crc32c) for name, writer in written.items()}


def _close(writer: NpzWriter) -> None:
    with storage.errors(writer.path, "write"):
        writer.__exit__(None, None, None)


def _wait(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.result()


def _spread(files: Sequence[NpzWriter], tensor: Tensor, pool: Executor) -> None:
    """Append every shard's part of a tensor to its file."""
    leaf, dtype, shards = tensor.leaf, tensor.dtype, len(files)
    value = tensor.value
    if leaf.leaf is not None and leaf.leaf.kind.combine not in (Combine.CONCAT, Combine.PER_SHARD):
        value = cast(value, dtype, leaf.label)  # before it is split: the parts of a sum must add up to the cast sum

    def parts(shard: int) -> Iterator[np.ndarray]:
        if leaf.leaf is None:
            yield value
            return
        kind = dataclasses.replace(leaf.leaf.kind, stacked=False)
        blocks = Blocks(kind, {tuple((0, n) for n in kind.layer_shape): value})
        for piece in pieces(blocks, None, shard, shards, leaf.moment):
            yield cast(piece, dtype, leaf.label)

    def add(shard: int) -> None:
        with storage.errors(files[shard].path, "write"):
            files[shard].add(Header(leaf.shard_shape(shards), dtype), parts(shard))

    for _ in pool.map(add, range(shards)):
        pass
