"""The error that lets a restore fall back to an older checkpoint; every other error ends it."""

from __future__ import annotations

from mesh_transformer.errors import CheckpointError


class DamagedError(CheckpointError):
    """Files of a checkpoint step are missing, empty, truncated or altered: the step is no use, another may be."""
