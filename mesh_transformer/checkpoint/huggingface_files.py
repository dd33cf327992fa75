"""The tensors of a Hugging Face model's folder by name: safetensors or .bin, in one file or several with an index.

.bin files are Python pickles, which can run any code when loaded: torch reads them here with weights only, which
refuses everything that is not a tensor or a plain container.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import safetensors
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.npz import BFLOAT16, Header
from mesh_transformer.checkpoint.safetensors import SafetensorsReader
from mesh_transformer.errors import CheckpointError

_NO_FLOAT = np.dtype(np.void)  # of tensors in other types, which only buffers have
# In the order in which they are looked for: safetensors first, since nothing in them can be harmful.
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXED = (safetensors.INDEX, "pytorch_model.bin.index.json")


class _Reader(Protocol):
    @property
    def headers(self) -> dict[str, Header]: ...
    def read(self, name: str) -> np.ndarray: ...
    def close(self) -> None: ...


class TensorFiles:
    """A folder's tensors; a context manager. `headers`: shape and dtype of each, read from the files themselves."""

    def __init__(self, folder: str) -> None:
        """Opens every file. Raises CheckpointError where there are none, DamagedError naming what is missing."""
        self.folder = folder
        self._readers: list[_Reader] = []
        self._of: dict[str, _Reader] = {}
        try:
            for name in _files(folder):
                reader = _open(storage.join(folder, name))
                self._readers.append(reader)
                self._of |= dict.fromkeys(reader.headers, reader)
        except BaseException:
            self.close()
            raise

    @property
    def headers(self) -> dict[str, Header]:
        return {name: header for reader in self._readers for name, header in reader.headers.items()}

    @property
    def metadata(self) -> dict[str, str]:
        """What a safetensors file says about itself."""
        return next((r.metadata for r in self._readers if isinstance(r, SafetensorsReader)), {})

    def read(self, name: str) -> np.ndarray:
        """A whole tensor in its own type."""
        return self._of[name].read(name)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _files(folder: str) -> list[str]:
    """Names of the files of weights."""
    present = set(storage.listdir(folder))
    for whole, index in zip(_WHOLE, _INDEXED, strict=True):
        if whole in present:
            return [whole]
        if index in present:
            names = _indexed(storage.join(folder, index))
            missing = [name for name in names if name not in present]
            if missing:
                raise DamagedError(f"{folder} is not complete: {', '.join(missing)} missing; copy the model again")
            return names
    raise CheckpointError(
        f"{folder} holds no weights that can be read; expected one of {', '.join((*_WHOLE, *_INDEXED))}, found "
        f"{', '.join(sorted(present)[:8]) or 'nothing'}"
    )


def _indexed(path: str) -> list[str]:
    try:
        names = sorted({str(name) for name in json.loads(storage.read_bytes(path))["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{path} is corrupt ({error!r}); copy it again") from error
    if any("/" in name or "\\" in name for name in names):
        raise CheckpointError(f"{path} names files outside its folder; expected bare names")
    return names


def _open(path: str) -> _Reader:
    return SafetensorsReader(path) if path.endswith(".safetensors") else _TorchReader(path)


class _TorchReader:
    """One .bin file. A local file in torch's usual format is mapped, not read: memory stays that of one tensor."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._tensors: dict[str, Any] = {}
        loaded = self._load()
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path} holds a {type(loaded).__name__}, expected a state dict of names and tensors")
        self._tensors = loaded

    def _load(self) -> Any:
        try:
            import torch
        except ImportError as error:
            raise CheckpointError(
                f"{self.path}: reading .bin files needs the package torch: pip install torch; safetensors need nothing"
            ) from error
        options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
        try:
            if not storage.is_url(self.path):
                with contextlib.suppress(RuntimeError):  # torch's older format, which cannot be mapped
                    return torch.load(self.path, mmap=True, **options)
            with storage.errors(self.path, "read"), storage.open_file(self.path, "rb") as file:
                return torch.load(file, **options)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self.path} was not loaded: it holds more than weights, or is corrupt, and loading that could run "
                f"any code ({str(error).splitlines()[0]}); convert it to safetensors where it is trusted"
            ) from error
        except (RuntimeError, EOFError, ValueError, KeyError) as error:
            raise DamagedError(f"{self.path} is corrupt ({str(error).splitlines()[0]}); copy it again") from error

    @property
    def headers(self) -> dict[str, Header]:
        return {name: Header(tuple(tensor.shape), _dtype(tensor)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        import torch

        tensor = self._tensors[name].detach().contiguous()
        if tensor.dtype == torch.bfloat16:  # numpy's torch bridge does not know it
            return tensor.view(torch.int16).numpy().view(BFLOAT16)
        array: np.ndarray = tensor.numpy()
        return array

    def close(self) -> None:
        self._tensors = {}


def _dtype(tensor: Any) -> np.dtype:
    names = {"torch.float32": np.dtype(np.float32), "torch.float16": np.dtype(np.float16), "torch.bfloat16": BFLOAT16}
    return names.get(str(tensor.dtype), _NO_FLOAT)
