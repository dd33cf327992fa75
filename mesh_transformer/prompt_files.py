"""Files of prompts, completed group by group: JSONL in, JSONL out, and going on where an earlier run stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mesh_transformer import storage
from mesh_transformer.errors import DataError
from mesh_transformer.progress import Progress

if TYPE_CHECKING:
    from mesh_transformer.completion import Completer, Completion, Options

logger = logging.getLogger(__name__)

Prompt = dict[str, Any]


def read_prompts(path: str) -> list[Prompt]:
    """One object a line, a bare string standing for {"prompt": it}. Raises DataError naming the line at fault."""
    content = storage.read_bytes(path)
    try:
        return _parse(content, path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from error


def _parse(content: bytes, path: str) -> list[Prompt]:
    found = []
    for number, line in enumerate(content.decode("utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        value = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise DataError(f'{path}, line {number}: expected a string, or an object with a string "prompt"')
        try:
            value["prompt"].encode()
        except UnicodeEncodeError as error:  # JSON can say it, but it is no character
            raise DataError(f"{path}, line {number}: half a surrogate pair at character {error.start}") from error
        found.append(value)
    return found


class Answers:
    """Where completions go: a file, each group appended as it comes; a URL, written at the end; or a stream.

    A file of an earlier run is continued: `done` prompts have their answers there. A last line that was cut short is
    taken off. Raises DataError where the file is not of these prompts.
    """

    def __init__(self, path: str | None, prompts: Sequence[Prompt]) -> None:
        self.path = None if path is None else storage.normalise(path)
        self.done = 0
        self._kept: list[str] = []
        if self.path is None or not storage.exists(self.path):
            return
        content = storage.read_bytes(self.path)
        whole = content[: content.rfind(b"\n") + 1]
        there = _parse(whole, self.path)
        if [each["prompt"] for each in there] != [each["prompt"] for each in prompts[: len(there)]]:
            raise DataError(f"{self.path} (--output) holds answers to other prompts: remove it, or name another file")
        if storage.is_url(self.path):
            self._kept = [whole.decode()]
        elif whole != content:
            storage.write_atomic(self.path, whole)
        self.done = len(there)

    def add(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> str:
        """Writes a group; returns what it wrote, which is all that happens where there is no path."""
        lines = ""
        each = len(completions) // len(prompts)
        for i, prompt in enumerate(prompts):
            mine = [_told(found) for found in completions[i * each : (i + 1) * each]]
            lines += json.dumps(prompt | (mine[0] if each == 1 else {"completions": mine}), ensure_ascii=False) + "\n"
        if self.path is not None and storage.is_url(self.path):
            self._kept.append(lines)
        elif self.path is not None:
            with storage.open_file(self.path, "a") as file:
                file.write(lines)
        return lines

    def close(self) -> None:
        """Writes what a URL could not be given piece by piece."""
        if self.path is not None and storage.is_url(self.path):
            storage.write_atomic(self.path, "".join(self._kept).encode())


def _told(found: Completion) -> Prompt:
    told: Prompt = {"completion": found.text, "tokens": found.tokens, "finish_reason": found.finish_reason}
    if found.logprobs:
        told["logprobs"] = [
            {"id": token.id, "token": token.text, "logprob": token.logprob, "top": [list(one) for one in token.top]}
            for token in found.logprobs
        ]
    return told


def complete(completer: Completer, prompts: Sequence[Prompt], answers: Answers, options: Options, batch: int) -> Any:
    """Completes the prompts that have no answer yet, `batch` texts at once; yields the JSONL lines of each group.

    With n completions of each, completion j of prompt i draws by seed + n i + j, whatever the batch and wherever an
    earlier run stopped.
    """
    if answers.done:
        logger.info("%d of %d prompts have their answers already", answers.done, len(prompts))
    n, size = options.n, max(1, batch // options.n)
    with Progress("prompts", len(prompts), first=answers.done, say=logger.info, line_seconds=0) as progress:
        for start in range(answers.done, len(prompts), size):
            group = prompts[start : start + size]
            mine = dataclasses.replace(options, seed=options.seed + n * start)
            texts = [each["prompt"] for each in group for _ in range(n)]
            yield answers.add(group, completer.complete(texts, mine))
            progress.advance(len(group))
    answers.close()
