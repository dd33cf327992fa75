"""Google Cloud Storage, for storage.py alone: `gs://bucket/object` through google-cloud-storage.

STORAGE_EMULATOR_HOST is honoured (the package does so itself). Writing an object is atomic: it appears whole or not.
"""

from __future__ import annotations

import base64
import functools
import io
import os
import sys
from typing import IO, Any, cast

from mesh_transformer.errors import StorageError

SCHEME = "gs://"
_READ_CHUNK = 16 << 20  # bytes fetched at a time when reading; a whole number of 256 KiB, as the service asks
_WRITE_CHUNK = 16 << 20


def owns(path: str) -> bool:
    """Whether the path is an object, or a folder of objects, in a bucket."""
    return path.startswith(SCHEME)


def error_types() -> tuple[type[Exception], ...]:
    """The errors that the cloud packages raise, of those that are imported."""
    found: list[type[Exception]] = []
    for module, name in (
        ("google.api_core.exceptions", "GoogleAPIError"),
        ("google.auth.exceptions", "GoogleAuthError"),
        ("google.cloud.storage.exceptions", "InvalidResponse"),  # what an upload that is under way meets
    ):
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def plain_error(error: Exception) -> Exception:
    """The same error as the API's own class says it (Forbidden, NotFound): uploads give the bare answer instead."""
    response = getattr(error, "response", None)
    if type(error).__name__ != "InvalidResponse" or response is None:
        return error
    from google.api_core.exceptions import from_http_response

    plain: Exception = from_http_response(response)
    plain.__cause__ = error
    return plain


def bucket_problem(path: str, error: Exception) -> str | None:
    """What is wrong with the bucket of a path, and what to do, where `error` came of that; None where it did not."""
    kind = type(error).__name__
    if not owns(path) or kind not in ("NotFound", "Forbidden", "Unauthorized"):
        return None
    bucket, _ = _split(path)
    if kind != "NotFound":
        reason = getattr(error, "message", "") or str(error)
        return (
            f"{reason}; this user needs permission there: a role on the bucket {bucket} (Storage Object User; Storage "
            "Object Viewer to read), or another account (gcloud auth application-default login); or choose another "
            "folder"
        )
    if _has_bucket(bucket):
        return None
    return (
        f"there is no bucket {bucket} that this account can see; check the path, or make the bucket: "
        f"gcloud storage buckets create {SCHEME}{bucket}"
    )


def _has_bucket(bucket: str) -> bool:
    """False where the service says that there is none; where it says nothing, there may be."""
    from google.api_core.exceptions import NotFound

    try:
        # Listing needs no more rights than reading objects does; asking for the bucket itself would.
        next(iter(_client().list_blobs(bucket, max_results=1)), None)
    except NotFound:
        return False
    except error_types():
        return True
    return True


def open_object(path: str, mode: str) -> IO[Any]:
    """An object as a file; reading in binary is seekable and fetches by ranges."""
    blob = _blob(path)
    kind = mode.replace("t", "")
    if kind not in ("r", "rb", "w", "wb"):
        raise StorageError(f"{path}: an object cannot be opened with mode {mode!r}; only r, rb, w and wb")
    if kind.startswith("w"):
        upload: IO[Any] = _upload_class()(blob, chunk_size=_WRITE_CHUNK, ignore_flush=True)
        return upload if "b" in kind else io.TextIOWrapper(cast(Any, upload), encoding="utf-8")
    blob.reload()  # a missing object is reported here, not at the first read
    options = {} if "b" in kind else {"encoding": "utf-8"}
    file: IO[Any] = blob.open(kind, chunk_size=_READ_CHUNK, **options)
    return file


@functools.cache
def _upload_class() -> type:
    from google.cloud.storage.fileio import BlobWriter

    class Upload(BlobWriter):
        """An object being written. It is published by one attempt to close it, or never.

        The package's own class tries again when it is collected, and for two minutes, which stops everything else; and
        to give up it asks the service, which may be what has failed. Uploads that are not finished cost nothing and
        vanish by themselves.
        """

        settled = False

        def close(self) -> None:
            if not self.settled:
                self.settled = True
                super().close()

        def terminate(self) -> None:
            self.settled = True

        @property
        def closed(self) -> bool:
            return bool(self.settled or super().closed)

    return Upload


def exists(path: str) -> bool:
    """Whether an object has this name, or lies under it."""
    bucket, key = _split(path)
    if key and _blob(path).exists():
        return True
    prefix = f"{key}/" if key else ""
    return any(True for _ in _client().list_blobs(bucket, prefix=prefix, max_results=1))


def size(path: str) -> int:
    """Bytes in an object."""
    blob = _blob(path)
    blob.reload()
    return int(blob.size)


def crc32c(path: str) -> str:
    """The bucket's own checksum of an object, eight hexadecimal digits; nothing is downloaded."""
    blob = _blob(path)
    blob.reload()
    return base64.b64decode(blob.crc32c).hex()


def listdir(path: str) -> list[str]:
    """Sorted names of the objects and folders directly under a folder."""
    bucket, key = _split(path)
    prefix = f"{key}/" if key else ""
    listing = _client().list_blobs(bucket, prefix=prefix, delimiter="/")
    names = {blob.name[len(prefix) :] for blob in listing}
    names |= {folder[len(prefix) :].rstrip("/") for folder in listing.prefixes}
    return sorted(names - {""})


def write(path: str, content: bytes) -> None:
    """Write a whole object at once."""
    _blob(path).upload_from_string(content, content_type="application/octet-stream")


def remove(path: str) -> None:
    """Remove an object; not there is fine."""
    from google.api_core.exceptions import NotFound

    try:
        _blob(path).delete()
    except NotFound:
        return


def remove_tree(path: str) -> None:
    """Remove every object under a folder."""
    bucket, key = _split(path)
    if not key:
        raise StorageError(f"{path}: refusing to empty a whole bucket; name a folder in it")
    for blob in list(_client().list_blobs(bucket, prefix=f"{key}/")):
        remove(f"{SCHEME}{bucket}/{blob.name}")


def swap(path: str, old: bytes | None, new: bytes | None) -> bool:
    """Replace an object's content only if it is `old` now (None: absent); generations decide between two writers."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    blob = _blob(path)
    try:
        blob.reload()
        generation = int(blob.generation)
        found: bytes | None = blob.download_as_bytes(if_generation_match=generation)
    except (NotFound, PreconditionFailed):
        generation, found = 0, None
    if found != old:
        return False
    try:
        if new is not None:
            blob.upload_from_string(new, content_type="application/octet-stream", if_generation_match=generation)
        elif found is not None:
            blob.delete(if_generation_match=generation)
    except (NotFound, PreconditionFailed):
        return False
    return True


def _split(path: str) -> tuple[str, str]:
    bucket, _, key = path[len(SCHEME) :].partition("/")
    if not bucket:
        raise StorageError(f"{path}: names no bucket; expected gs://bucket/folder")
    return bucket, key.strip("/")


def _blob(path: str) -> Any:
    bucket, key = _split(path)
    return _client().bucket(bucket).blob(key)


def _client() -> Any:
    # One client per process (a fork must not share sockets) and per emulator.
    return _make_client(os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST"))


@functools.lru_cache(maxsize=4)
def _make_client(_pid: int, emulator: str | None) -> Any:
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import storage
    except ImportError as error:
        raise StorageError(
            "gs:// paths need the package google-cloud-storage: pip install google-cloud-storage"
        ) from error
    if emulator:
        return storage.Client.create_anonymous_client()
    try:
        return storage.Client()
    except DefaultCredentialsError:
        # Public buckets can be read without an account; anything else fails later with the service's own answer.
        return storage.Client.create_anonymous_client()
