"""The error that lets a restore fall back to an older checkpoint; every other error ends it."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_transformer.errors import CheckpointError


class DamagedError(CheckpointError):
    """Files of a checkpoint step are missing, empty, truncated or altered: the step is no use, another may be.

    `problems`: one line for each file, where they are several.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)
