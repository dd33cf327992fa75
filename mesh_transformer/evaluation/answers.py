"""What has been scored already, kept on disk so that an evaluation that was stopped goes on where it stood."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from typing import IO, Any

from mesh_transformer import storage
from mesh_transformer.errors import EvaluationError

logger = logging.getLogger(__name__)


class Answers:
    """Answers by question, in memory and, given a path, in a file of JSON lines that is only ever appended to.

    settings: everything else that an answer depends on (checkpoint, compute type, ...): answers given under others are
    not found. A last line that was cut short is dropped. A path has to be local, since files elsewhere cannot grow.
    """

    def __init__(self, path: str | None, settings: Mapping[str, Any]) -> None:
        self._salt = json.dumps(settings, sort_keys=True)
        self._found: dict[str, Any] = {}
        self._file: IO[str] | None = None
        if path is not None:
            self._open(storage.normalise(path))

    def __len__(self) -> int:
        return len(self._found)

    def get(self, question: Any) -> Any | None:
        """The answer to a question (JSON values), or None."""
        return self._found.get(self._key(question))

    def add(self, answered: Iterable[tuple[Any, Any]]) -> None:
        """Keeps answers (JSON values), handed to the operating system before this returns."""
        lines = []
        for question, answer in answered:
            key = self._key(question)
            self._found[key] = answer
            lines.append(json.dumps([key, answer]) + "\n")
        if self._file is not None and lines:
            with storage.errors(self._file.name, "write"):
                self._file.write("".join(lines))
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with storage.errors(self._file.name, "write"):
                self._file.close()
            self._file = None

    def _key(self, question: Any) -> str:
        return hashlib.sha256((self._salt + json.dumps(question)).encode()).hexdigest()[:32]

    def _open(self, path: str) -> None:
        if storage.is_url(path):
            raise EvaluationError(f"{path}: answers are kept in a file that grows, which needs a local folder")
        whole = 0
        if os.path.exists(path):
            content = storage.read_bytes(path)
            whole = content.rfind(b"\n") + 1
            try:
                for line in content[:whole].splitlines():
                    key, answer = json.loads(line)
                    self._found[key] = answer
            except (ValueError, TypeError) as error:
                raise EvaluationError(f"{path} does not hold answers of an evaluation ({error}): remove it") from error
        storage.makedirs(storage.parent(path))
        with storage.errors(path, "write"):
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
            self._file.truncate(whole)
