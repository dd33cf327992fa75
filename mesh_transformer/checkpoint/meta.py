"""meta.json of a model_dir: which steps are complete. The 2021 library's keys, so that it can resume our runs too.

{"step": newest, "checkpoints": [steps, oldest first], "aux": {"<step>": {"train_loader": {...}, ...}}}
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
from typing import Any

from mesh_transformer import storage
from mesh_transformer.checkpoint import manifest, retention
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.errors import StorageError

NAME = "meta.json"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Meta:
    """`steps`, oldest first; `aux` per step: the data position as `train_loader`, and what else was saved with it."""

    steps: tuple[int, ...] = ()
    aux: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def with_step(self, step: int, aux: dict[str, Any]) -> Meta:
        """With `step` as the newest."""
        return Meta((*(s for s in self.steps if s != step), step), {**self.aux, step: aux})

    def without(self, steps: set[int]) -> Meta:
        return Meta(
            tuple(s for s in self.steps if s not in steps), {s: aux for s, aux in self.aux.items() if s not in steps}
        )


def step_dir(model_dir: str, step: int) -> str:
    return storage.join(model_dir, f"step_{step}")


def step_folders(model_dir: str) -> list[int]:
    """The steps that have a folder, complete or not."""
    return sorted(int(name[5:]) for name in storage.listdir(model_dir) if re.fullmatch(r"step_\d+", name))


def load(model_dir: str) -> Meta:
    """What meta.json says, or where it is lost or corrupt, what the manifests of complete steps say.

    Raises DamagedError if it is corrupt and there are no manifests either.
    """
    path = storage.join(model_dir, NAME)
    damage = None
    try:
        return _parse(path, storage.read_bytes(path))
    except DamagedError as error:
        damage = error
    except StorageError:
        if storage.exists(path):
            raise
    steps = [step for step in step_folders(model_dir) if _is_complete(step_dir(model_dir, step))]
    if damage is not None and not steps:
        raise damage
    if steps:
        logger.warning("%s; using the steps that have a manifest: %s", damage or f"{path} is missing", steps)
    rebuilt = Meta(tuple(steps))
    for step in steps:
        with contextlib.suppress(DamagedError):
            found = manifest.read(step_dir(model_dir, step))
            rebuilt.aux[step] = found.details.get("aux", {}) if found else {}
    return rebuilt


def _is_complete(folder: str) -> bool:
    return storage.exists(storage.join(folder, manifest.NAME)) and not retention.is_unfinished(folder)


def _parse(path: str, content: bytes) -> Meta:
    try:
        body = json.loads(content)
        steps = tuple(int(step) for step in body["checkpoints"])
        aux = {int(step): dict(values) for step, values in body.get("aux", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{path} is corrupt ({error}); expected keys step, checkpoints and aux: move it away, or copy it again"
        ) from error
    return Meta(steps, {step: aux[step] for step in steps if step in aux})


def write(model_dir: str, meta: Meta) -> None:
    """Replace meta.json at once: this is the moment at which a step begins to exist."""
    body = {
        "step": meta.steps[-1] if meta.steps else 0,
        "checkpoints": list(meta.steps),
        "aux": {str(step): meta.aux.get(step, {}) for step in meta.steps},
    }
    storage.write_atomic(storage.join(model_dir, NAME), json.dumps(body, indent=1).encode())


def remove_drafts(model_dir: str) -> None:
    """Remove what a kill leaves in the middle of replacing meta.json, or of the check that model_dir can be written."""
    for name in storage.listdir(model_dir):
        if storage.is_draft(name, NAME) or storage.is_probe(name):
            storage.remove(storage.join(model_dir, name))
