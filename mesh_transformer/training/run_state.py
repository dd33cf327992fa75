"""What a run remembers besides arrays and data position: its counters and where it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from mesh_transformer.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class RunState:
    """Saved as JSON beside each checkpoint step and restored with it.

    step: completed updates of this run.  sequences, tokens: truly consumed, skipped batches included.  skipped:
    batches whose gradient was not finite.  G_average, S_average: of the gradient noise scale, None before the first.
    run_id: the run's name towards trackers.  tuned_from: the checkpoint that fine-tuning started from, or None.
    """

    run_id: str
    step: int = 0
    sequences: int = 0
    tokens: int = 0
    skipped: int = 0
    G_average: float | None = None
    S_average: float | None = None
    tuned_from: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; keys that a newer release added are ignored. Raises CheckpointError."""
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(found.get("run_id"), str) or not isinstance(found.get("step"), int):
            raise CheckpointError(
                f"the checkpoint's record of its run has keys {sorted(found)}; expected at least run_id and step: "
                "it was not written by this trainer; start from it with --tune-model-path instead"
            )
        return cls(**{key: value for key, value in found.items() if key in known})
