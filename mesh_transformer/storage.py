"""The one module that touches files: local paths, `gs://` objects, and whatever else smart_open reads.

A path is a string or `os.PathLike`: `/x/step_10`, `x/step_10/`, `~/x`, `file:///x/step_10`, `gs://bucket/x`, `https://...`,
`s3://...`. Local and `gs://` paths can be read, written, listed and removed; other URLs can be read (and written where
smart_open can). Failures are `StorageError`, naming the path, chained to the operating system's or cloud's own error.

Object stores have no folders: there, a folder exists while an object lies under it, and `makedirs` does nothing.
Packages for the cloud are imported only when a path needs them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import urllib.parse
from typing import IO, Any

from mesh_transformer import gcs
from mesh_transformer.errors import StorageError
from mesh_transformer.storage_errors import check_name, errors, is_missing

PathLike = str | os.PathLike[str]

_PROBE = ".write-probe"
_DRAFT = ".tmp"


def normalise(path: PathLike) -> str:
    """The path as this module uses it: no `file://`, no trailing slash, `~` expanded; other URLs as they stand."""
    text = os.fspath(path)
    if text.startswith("file:"):
        parts = urllib.parse.urlparse(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise StorageError(f"{text}: a file URL has three slashes and an absolute path: file:///folder/name")
        text = urllib.parse.unquote(parts.path)
    if not text:
        raise StorageError("an empty path was given; a file or folder is needed")
    url = is_url(text)
    check_name(text, url)
    if url:
        return text.rstrip("/")
    return os.path.expanduser(text).rstrip("/") or "/"


def is_url(path: PathLike) -> bool:
    """Whether the path lies on another machine (`gs://`, `https://`, ...); `file://` does not."""
    scheme, found, _ = os.fspath(path).partition("://")
    return bool(found) and scheme != "file" and scheme.replace("+", "").isalnum()


def join(base: PathLike, *parts: PathLike) -> str:
    """Base and parts with one slash between; an absolute or URL part replaces what stands before it."""
    path = normalise(base)
    for part in parts:
        text = os.fspath(part)
        if is_url(text) or text.startswith(("/", "file:")):
            path = normalise(text)
        elif text:
            path = normalise(f"{path}/{text}" if path != "/" else f"/{text}")
    return path


def name(path: PathLike) -> str:
    """The last component."""
    return normalise(path).rpartition("/")[2]


def parent(path: PathLike) -> str:
    """The folder that holds the path (`.` for a bare name)."""
    head = normalise(path).rpartition("/")[0]
    return head or ("/" if normalise(path).startswith("/") else ".")


def open_file(path: PathLike, mode: str = "rb") -> IO[Any]:
    """An open file; text modes are UTF-8. Bytes come as stored: nothing is decompressed by its name.

    Files opened for reading in binary are seekable. Raises StorageError if it cannot be opened.
    """
    target = normalise(path)
    encoding = None if "b" in mode else "utf-8"
    with errors(target, "open"):
        if gcs.owns(target):
            return gcs.open_object(target, mode)
        if is_url(target):
            return _smart_open(target, mode)
        return open(target, mode, encoding=encoding)


def read_bytes(path: PathLike) -> bytes:
    """The whole content of a small file."""
    with errors(normalise(path), "read"), open_file(path, "rb") as file:
        content: bytes = file.read()
    return content


def exists(path: PathLike) -> bool:
    """Whether a file or folder is there."""
    target = normalise(path)
    with errors(target, "look up"):
        if gcs.owns(target):
            return gcs.exists(target)
        if not is_url(target):
            return os.path.exists(target)
    try:
        open_file(target).close()
    except StorageError as error:
        if is_missing(error):
            return False
        raise
    return True


def size(path: PathLike) -> int:
    """Bytes in a file."""
    target = normalise(path)
    with errors(target, "look up"):
        if gcs.owns(target):
            return gcs.size(target)
        if not is_url(target):
            return os.path.getsize(target)
        with _smart_open(target, "rb") as file:
            return int(file.seek(0, os.SEEK_END))


def can_list(path: PathLike) -> bool:
    """Whether folders there can be listed: local ones and in `gs://`; of other URLs, only files can be asked for."""
    return not is_url(path) or gcs.owns(normalise(path))


def listdir(path: PathLike) -> list[str]:
    """Sorted names of what lies directly under a folder; nothing when it is not there, as in an object store."""
    target = normalise(path)
    with errors(target, "list"):
        if gcs.owns(target):
            return gcs.listdir(target)
        _refuse_other_url(target, "listed")
        try:
            return sorted(os.listdir(target))
        except FileNotFoundError:
            return []


def makedirs(path: PathLike) -> None:
    """Make a folder and its parents; done already is fine. Raises StorageError also where files can only be read."""
    target = normalise(path)
    if gcs.owns(target):
        return
    with errors(target, "make the folder"):
        _refuse_other_url(target, "written")
        os.makedirs(target, exist_ok=True)


def remove(path: PathLike) -> None:
    """Remove a file; not there is fine."""
    target = normalise(path)
    with errors(target, "remove"):
        if gcs.owns(target):
            gcs.remove(target)
            return
        _refuse_other_url(target, "removed")
        with contextlib.suppress(FileNotFoundError):
            os.remove(target)


def remove_tree(path: PathLike) -> None:
    """Remove a folder and all under it; not there is fine. A link is removed, not followed."""
    target = normalise(path)
    with errors(target, "remove"):
        if gcs.owns(target):
            gcs.remove_tree(target)
            return
        _refuse_other_url(target, "removed")
        if os.path.islink(target):
            os.remove(target)
        else:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(target)


def write_atomic(path: PathLike, content: bytes) -> None:
    """Write a small file so that readers, and a crash at any instant, see the old content or the new, never a part."""
    target = normalise(path)
    with errors(target, "write"):
        if gcs.owns(target):
            gcs.write(target, content)
            return
        _refuse_other_url(target, "written")
        draft = f"{parent(target)}/.{name(target)}.{os.getpid()}{_DRAFT}"
        try:
            with open(draft, "wb") as file:
                file.write(content)
                sync(file)
            os.replace(draft, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(draft)
            raise
        sync_folder(parent(target))


def is_draft(found: str, wanted: str) -> bool:
    """Whether a file name is what a kill inside `write_atomic` of the file name `wanted` leaves."""
    return found.startswith(f".{wanted}.") and found.endswith(_DRAFT)


def is_probe(found: str) -> bool:
    """Whether a file name is what a kill inside `probe_writable` leaves."""
    return found.startswith(f"{_PROBE}-")


def rename(old: PathLike, new: PathLike) -> None:
    """Rename a local file or folder, replacing a file that has the new name."""
    source, target = normalise(old), normalise(new)
    if is_url(source) or is_url(target):
        raise StorageError(f"{source} -> {target}: only local files can be renamed")
    with errors(source, "rename"):
        os.replace(source, target)
        sync_folder(parent(target))


def swap(path: PathLike, old: bytes | None, new: bytes | None) -> bool:
    """Replace a small file's content only if it is `old` now; None stands for "no such file". True if it was done.

    Two processes that try the same swap at the same time, on one machine or through one bucket, cannot both succeed.
    """
    target = normalise(path)
    with errors(target, "write"):
        if gcs.owns(target):
            return gcs.swap(target, old, new)
        _refuse_other_url(target, "written")
        return _swap_local(target, old, new)


def abandon(file: IO[Any]) -> None:
    """Close a file whose writing failed, without publishing an object and without another error."""
    with contextlib.suppress(OSError):
        # Uploads have this method: closing one would publish it.
        getattr(file, "terminate", file.close)()


def sync(file: IO[Any]) -> None:
    """Flush an open file down to the disk; objects in a bucket are durable when closed."""
    file.flush()
    try:
        number = file.fileno()
    except OSError:
        return
    os.fsync(number)


def sync_folder(path: PathLike) -> None:
    """Make the names in a local folder durable."""
    target = normalise(path)
    if is_url(target):
        return
    handle = os.open(target, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems cannot sync a folder, and need not
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def free_bytes(path: PathLike) -> int | None:
    """Bytes that can still be written where the path lies (or will lie); None where there is no such limit."""
    target = normalise(path)
    if is_url(target):
        return None
    with errors(target, "look up"):
        missing = _missing_folders(target)
        return shutil.disk_usage(os.path.dirname(missing[-1]) if missing else target).free


def probe_writable(path: PathLike) -> None:
    """Check that files can be written into a folder, by writing one and removing it; folders it makes are removed too.

    Raises StorageError, chained to the cause (PermissionError, a cloud error), naming the folder.
    """
    target = normalise(path)
    with errors(target, "write into"):
        if gcs.owns(target):
            probe = join(target, f"{_PROBE}-{os.getpid()}")
            gcs.write(probe, b"probe")
            gcs.remove(probe)
            return
        _refuse_other_url(target, "written")
        missing = _missing_folders(target)
        try:
            os.makedirs(target, exist_ok=True)
            probe = f"{target}/{_PROBE}-{os.getpid()}"
            with open(probe, "wb") as file:
                file.write(b"probe")
            os.remove(probe)
        finally:
            for folder in missing:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


def _missing_folders(target: str) -> list[str]:
    """The folders that would have to be made, innermost first."""
    folder, missing = os.path.abspath(target), []
    while not os.path.exists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def _refuse_other_url(target: str, done: str) -> None:
    if is_url(target):
        raise StorageError(f"{target}: only local and gs:// paths can be {done}; other URLs are for reading")


def _smart_open(target: str, mode: str) -> IO[Any]:
    scheme = target.partition("://")[0]
    try:
        import smart_open
    except ImportError as error:
        raise StorageError(
            f"{target}: reading this URL needs the package smart_open: pip install smart_open"
        ) from error
    encoding = None if "b" in mode else "utf-8"
    try:
        file: IO[Any] = smart_open.open(target, mode, compression="disable", encoding=encoding)
    except ImportError as error:
        raise StorageError(
            f"{target}: reading {scheme}:// needs a package that is not installed: pip install 'smart_open[{scheme}]'"
        ) from error
    except NotImplementedError as error:
        raise StorageError(
            f"{target}: smart_open reads no {scheme}:// here; expected a local path, gs://, https://, s3:// or another "
            "URL that it reads (some need a package: pip install 'smart_open[all]')"
        ) from error
    except ValueError as error:  # how it tells what a URL lacks, such as a user, and buckets that it cannot reach
        raise StorageError(f"{target}: cannot open: {' '.join(str(error).split())}; check the URL") from error
    return file


def _swap_local(target: str, old: bytes | None, new: bytes | None) -> bool:
    while True:
        handle = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
        with os.fdopen(handle, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                if os.fstat(file.fileno()).st_ino != os.stat(target).st_ino:
                    continue  # another process removed or replaced the file while this one waited for it
            except FileNotFoundError:
                continue
            # An empty file counts as none: it is what creation leaves when its writer dies before the first byte.
            if (file.read() or None) != old:
                return False
            if new is None:
                os.remove(target)
                return True
            file.seek(0)
            file.truncate()
            file.write(new)
            sync(file)
            return True
