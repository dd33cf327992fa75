"""What systems, clouds and readers of URLs raise, told as one StorageError that names the path and what to do."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator

from mesh_transformer import gcs
from mesh_transformer.errors import StorageError

# Packages whose errors are no OSError. They count where the package is imported, which nothing here does.
_FOREIGN = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("paramiko.ssh_exception", "SSHException"),
)
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EROFS: "choose a folder on a file system that can be written",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away, or choose another path",
    errno.EISDIR: "a folder stands where a file is needed: move it away, or choose another path",
    errno.EEXIST: "a file stands where a folder is needed: move it away, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "the links lead in a circle: mend them, or choose another path",
}


@contextlib.contextmanager
def errors(path: str, action: str) -> Iterator[None]:
    """Turn the errors of operating system and cloud into StorageError naming the path; all others pass untouched."""
    try:
        yield
    except StorageError:
        raise
    except Exception as met:
        if not isinstance(met, (OSError, *gcs.error_types(), *_foreign_types())):
            raise
        error = gcs.plain_error(met)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or repr(error)
        problem = gcs.bucket_problem(path, error) or _with_remedy(reason, error)
        raise StorageError(f"{path}: cannot {action}: {problem}") from error


def is_missing(error: StorageError) -> bool:
    """Whether an error means that there is no such file, rather than that it cannot be reached or read."""
    return error.__cause__ is not None and _is_not_found(error.__cause__)


def check_name(path: str, url: bool) -> None:
    """Raises StorageError for a path that cannot exist here, or in URLs, whatever the disks hold."""
    if "\0" in path:
        raise StorageError(f"{path!a}: a path cannot hold the character NUL; leave it out")
    encoding = "utf-8" if url else sys.getfilesystemencoding()
    try:
        path.encode(encoding, "strict" if url else sys.getfilesystemencodeerrors())
    except UnicodeError as error:
        raise StorageError(
            f"{path!a}: names are in {encoding} here, which lacks characters of this one: set PYTHONUTF8=1 or "
            "LC_ALL=C.UTF-8, or choose another path"
        ) from error


def _foreign_types() -> tuple[type[Exception], ...]:
    return tuple(getattr(sys.modules[module], name) for module, name in _FOREIGN if module in sys.modules)


def _is_not_found(error: BaseException) -> bool:
    """By the conventions of the operating system, Google, HTTP clients and (through smart_open) S3."""
    if isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFound":
        return True
    status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    backend = getattr(getattr(error, "backend_error", None), "response", None)
    code = backend.get("Error", {}).get("Code") if isinstance(backend, dict) else None
    return status == 404 or code in ("404", "NoSuchKey")


def _with_remedy(reason: str, error: Exception) -> str:
    if _is_not_found(error):
        return f"{reason}; check the path"
    if isinstance(error, PermissionError):
        return f"{reason}; this user needs permission there, or choose another folder"
    remedy = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{reason}; {remedy}" if remedy else reason
