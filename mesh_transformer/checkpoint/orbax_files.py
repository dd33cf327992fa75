"""Orbax and tensorstore, for the "orbax" layout alone: arrays written through the one, and read through the other.

Both are imported where they are used, since they are an extra. Values are written as they lie in host memory, in pieces
that a small, fixed number of bytes of are under way at a time: Orbax's own handler for arrays would take all at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mesh_transformer import gcs, storage
from mesh_transformer.checkpoint import orbax_layout
from mesh_transformer.checkpoint.blocks import Region
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.npz import BFLOAT16
from mesh_transformer.checkpoint.orbax_layout import NewArray
from mesh_transformer.errors import CheckpointError, MeshTransformerError, StorageError

UNDER_WAY = 32 << 20  # bytes that are being written at a time; tensorstore holds each of them several times

_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")  # in tensorstore's messages


def check_installed() -> None:
    """Raises CheckpointError naming the extra where Orbax is missing. Imports nothing."""
    for package in ("orbax", "orbax.checkpoint", "tensorstore"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise CheckpointError(
                "ckpt_format \"orbax\" needs the package orbax-checkpoint: pip install 'mesh-transformer[orbax]', or "
                'set "ckpt_format": "shards"'
            )


@functools.cache
def _tensorstore() -> Any:
    """The package, told to use the network as this project's own storage does."""
    check_installed()
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator if "://" in emulator else f"http://{emulator}")
        os.environ.setdefault("GCE_METADATA_ROOT", "127.0.0.1:1")  # or it would look for Google's own machines
    import tensorstore

    return tensorstore


@functools.cache
def _orbax() -> Any:
    """The package orbax.checkpoint, likewise."""
    _tensorstore()
    os.environ.setdefault("EPATH_USE_TF", "false")  # paths need no TensorFlow, even where it is installed
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it would ask for another kind of bucket
    import orbax.checkpoint

    logging.getLogger("absl").addFilter(_is_news)
    return orbax.checkpoint


def _is_news(record: logging.LogRecord) -> bool:
    """Orbax tells every step of its work, and warns of parts of itself that this layout does without."""
    return "/orbax/" not in record.pathname or record.levelno >= logging.ERROR


def _of_bucket(path: str) -> None:
    """Raises StorageError where the package is missing by which Orbax reaches buckets."""
    if gcs.owns(path) and importlib.util.find_spec("gcsfs") is None:
        raise StorageError(f"{path}: Orbax reaches buckets through gcsfs: pip install 'mesh-transformer[gcs,orbax]'")


@contextlib.contextmanager
def _errors(path: str, action: str) -> Iterator[None]:
    """tensorstore's and gcsfs's errors as StorageError, with the operating system's remedies."""
    with storage.errors(path, action):
        try:
            yield
        except MeshTransformerError:
            raise
        except ValueError as error:
            text = " ".join(str(error).split())
            number = _SYSTEM_ERROR.search(text)
            if number:
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise StorageError(f"{path}: cannot {action}: {text.partition(' [')[0]}") from error


class Arrays:
    """Arrays of a step that are being written; `write` returns before the values are on the disk, `finish` after."""

    def __init__(self, stores: Mapping[str, Any]) -> None:
        self._stores = stores
        self._writing: deque[tuple[int, Any]] = deque()
        self._bytes = 0

    def write(self, label: str, region: Region, values: np.ndarray) -> None:
        """Put `values` into a region of an array; they must stay as they are until `finish`."""
        store = self._stores[label]
        for part, piece in _pieces(region, values, tuple(store.chunk_layout.write_chunk.shape or ())):
            while self._writing and self._bytes + piece.nbytes > UNDER_WAY:
                self._wait()
            target = store[tuple(slice(*ends) for ends in part)]
            self._writing.append((piece.nbytes, target.write(piece, can_reference_source_data_indefinitely=True)))
            self._bytes += piece.nbytes

    def finish(self) -> None:
        """Wait for all writes. Raises what one of them met."""
        while self._writing:
            self._wait()

    def settle(self) -> None:
        """Wait for all writes and raise nothing: after a failure, so that none is under way when its files go."""
        for _, future in self._writing:
            future.exception()
        self._writing.clear()

    def _wait(self) -> None:
        count, future = self._writing.popleft()
        self._bytes -= count
        future.result()


def _pieces(region: Region, values: np.ndarray, chunks: tuple[int, ...]) -> Iterator[tuple[Region, np.ndarray]]:
    """A block cut along the borders of the array's chunks.

    A chunk that comes in several parts would be written several times, and read again between them.
    """
    origin = [start for start, _ in region]
    firsts = [range(start // size * size, stop, size) for (start, stop), size in zip(region, chunks, strict=True)]
    for corner in itertools.product(*firsts):
        part = tuple(
            (max(first, start), min(first + size, stop))
            for first, size, (start, stop) in zip(corner, chunks, region, strict=True)
        )
        within = tuple(slice(first - o, last - o) for (first, last), o in zip(part, origin, strict=True))
        yield part, values[within]


def save(step_dir: str, arrays: Mapping[str, NewArray], fill: Callable[[Arrays], None]) -> None:
    """Write a checkpoint of Orbax's at `step_dir`/state, with values that `fill` writes; all on the disk at the end.

    Every process calls this and fills in its own parts. Raises StorageError, and what `fill` raises.
    """
    import jax

    ocp = _orbax()
    _of_bucket(step_dir)
    target = storage.join(step_dir, orbax_layout.FOLDER)
    if not storage.is_url(target):
        target = os.path.abspath(target)
    registry = ocp.type_handlers.create_type_handler_registry((NewArray, _handler(fill)))
    # Named processes meet through jax's coordinator: by default they would do so on the devices, which are training.
    processes = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())), barrier_sync_key_prefix=storage.name(step_dir)
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, type_handler_registry=registry, multiprocessing_options=processes
    )
    with _errors(target, "write"):
        ocp.Checkpointer(handler, multiprocessing_options=processes).save(
            target, args=ocp.args.PyTreeSave(orbax_layout.nested(arrays))
        )


def _handler(fill: Callable[[Arrays], None]) -> Any:
    """How Orbax writes a tree of `NewArray`: it makes them in order, and `fill` writes their values."""
    ocp, tensorstore = _orbax(), _tensorstore()

    class Handler(ocp.type_handlers.TypeHandler):  # type: ignore[name-defined]
        def typestr(self) -> str:
            return "np.ndarray"  # what Orbax by itself makes of them, wherever they are read

        async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
            raise NotImplementedError("arrays are read by other handlers")

        async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            raise NotImplementedError("arrays are read by other handlers")

        async def serialize(self, values: Sequence[NewArray], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            opening = {
                info.name.replace(".", "/"): tensorstore.open(_spec(str(info.path), new), create=True, open=True)
                for new, info in zip(values, infos, strict=True)
            }
            arrays = Arrays({label: await store for label, store in opening.items()})
            try:
                fill(arrays)
                arrays.finish()
            finally:
                arrays.settle()
            return []

    return Handler()


def _spec(path: str, new: NewArray | None = None) -> dict[str, Any]:
    """Where an array is, as tensorstore wants it; `new`: and what it will be."""
    if gcs.owns(path):
        bucket, _, name = path.removeprefix(gcs.SCHEME).partition("/")
        place = {"driver": "gcs", "bucket": bucket, "path": f"{name}/"}
    else:
        place = {"driver": "file", "path": f"{os.path.abspath(path)}/"}
    spec: dict[str, Any] = {"driver": "zarr", "kvstore": place}
    if new is not None:
        spec["metadata"] = {
            "shape": list(new.shape),
            "chunks": list(new.chunks),
            "dtype": "bfloat16" if new.dtype == BFLOAT16 else new.dtype.str,
            "compressor": None,  # weights do not shrink, and the time is noticed
            "fill_value": None,
        }
    return spec


class StoredArray:
    """An array of a step on the disk, of which parts are read."""

    def __init__(self, step_dir: str, label: str) -> None:
        self.path = storage.join(step_dir, orbax_layout.folder_of(label))
        with self._reading():
            self._store = _tensorstore().open(_spec(self.path), open=True, read=True).result()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._store.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._store.dtype.numpy_dtype)

    @property
    def chunks(self) -> tuple[int, ...]:
        return tuple(self._store.chunk_layout.read_chunk.shape)

    def read(self, region: Region) -> np.ndarray:
        """The values of a region, as they are stored."""
        with self._reading():
            return np.asarray(self._store[tuple(slice(*ends) for ends in region)].read().result())

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with _errors(self.path, "read"):
                yield
        except StorageError as error:
            if storage.is_missing(error) or "NOT_FOUND" in str(error) or "FAILED_PRECONDITION" in str(error):
                raise DamagedError(str(error)) from error
            raise


_meetings = itertools.count()


def meet() -> None:
    """Return when every process has called this."""
    import jax

    if jax.process_count() > 1:
        name = f"mesh-transformer checkpoint {next(_meetings)}"
        _orbax().multihost.sync_global_processes(name, processes=set(range(jax.process_count())))
