"""Which files of a path are read, in an order that does not depend on the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mesh_transformer import storage
from mesh_transformer.data.records import RECORDS_SUFFIX
from mesh_transformer.data.sidecar import SUFFIX as SIDECAR_SUFFIX
from mesh_transformer.errors import DataError, StorageError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstandard", ".xz": "xz", ".bz2": "bzip2"}


class Kind(Enum):
    """How the content of a file, once decompressed, is to be read."""

    TEXT = "text"
    JSON_LINES = "JSON lines"
    TAR = "tar archive"
    UNKNOWN = "tar archive or text"  # the suffix tells the compression only


_KINDS = {
    ".txt": Kind.TEXT,
    ".jsonl": Kind.JSON_LINES,
    ".json": Kind.JSON_LINES,
    ".ndjson": Kind.JSON_LINES,
    ".tar": Kind.TAR,
    ".tgz": Kind.TAR,
}


@dataclass(frozen=True)
class InputFile:
    """A file to read. `name` is relative to what was given, with slashes: the key of the order."""

    path: str
    name: str
    kind: Kind
    size: int  # bytes, as stored


def supported(text_suffixes: Sequence[str] = ()) -> str:
    """The suffixes that are read, for messages."""
    return f"{', '.join([*_KINDS, *text_suffixes])}, alone or followed by {', '.join(COMPRESSIONS)} (alone too)"


def kind_of(name: str, text_suffixes: Sequence[str] = ()) -> Kind | None:
    """What a file's suffix says about it, in any case of letters; None if it is not one that is read."""
    if name.endswith(RECORDS_SUFFIX + SIDECAR_SUFFIX):
        return None  # what an earlier run has written into the same folder
    stem, suffix = os.path.splitext(name.lower())
    packed = suffix in COMPRESSIONS
    if packed:
        suffix = os.path.splitext(stem)[1]
    if suffix in {text.lower() for text in text_suffixes}:
        return Kind.TEXT
    return _KINDS.get(suffix, Kind.UNKNOWN if packed else None)


def find_inputs(path: str, recursive: bool, text_suffixes: Sequence[str] = ()) -> tuple[list[InputFile], list[str]]:
    """The files to read, sorted by name, and the names of those that are left out.

    Raises DataError when the path is missing, of an unknown suffix, or a folder without anything to read.
    """
    root = storage.normalise(path)
    if not storage.is_url(root) and not os.path.exists(root):
        raise DataError(f"{path}: no such file or folder; expected text to read ({supported(text_suffixes)})")
    if os.path.isfile(root) or (storage.is_url(root) and kind_of(root, text_suffixes)):
        kind = kind_of(root, text_suffixes)
        if kind is None:
            raise DataError(
                f"{path}: not a kind of file that is read; expected {supported(text_suffixes)}, "
                f"or name its suffix with --text-suffix"
            )
        return [InputFile(root, storage.name(root), kind, storage.size(root))], []
    found: list[InputFile] = []
    left_out: list[str] = []
    for name in sorted(_walk(root, recursive)):
        kind = kind_of(name, text_suffixes)
        if kind is None or name.endswith("/"):
            left_out.append(name)
        else:
            full = storage.join(root, name)
            found.append(InputFile(full, name, kind, storage.size(full)))
    if not found:
        hint = " (sub-folders are read with --recursive)" if any(name.endswith("/") for name in left_out) else ""
        raise DataError(
            f"{path}: the folder has nothing to read among {len(left_out)} entries{hint}; "
            f"expected {supported(text_suffixes)}, or name a suffix with --text-suffix"
        )
    return found, left_out


def _walk(root: str, recursive: bool) -> list[str]:
    """Names under a folder, relative to it, with slashes; folders that are not entered end with one."""
    if storage.is_url(root):
        if recursive:
            raise DataError(f"{root}: --recursive is for local folders; name the folders of a bucket one by one")
        return storage.listdir(root)

    def fail(error: OSError) -> None:
        raise StorageError(f"{error.filename}: cannot list the folder: {error.strerror}") from error

    names: list[str] = []
    for folder, folders, files in os.walk(root, onerror=fail):
        prefix = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if prefix == "." else prefix + "/"
        names += [prefix + file for file in files]
        if not recursive:
            names += [prefix + name + "/" for name in folders]
            folders.clear()
    return names
