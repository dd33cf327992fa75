"""Memory that training steps on a CPU free is kept for the next step.

A step's temporary memory is one block of hundreds of megabytes. glibc gives such a block back to the system when it is
freed, and the next step gets it again page by page, each filled with zeros first: some 5 % of the time of a step. What
is kept stays in the process until it ends, also what validation and saving took beside it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of glibc's <malloc.h>
_NEVER = -1
_shared = _kept = False


def is_for_cpu(platform: str | None) -> bool:
    """Whether a command with this --platform computes on the CPU for sure, whatever the machine has."""
    return (platform or os.environ.get("JAX_PLATFORMS")) == "cpu"


def share_one_arena() -> None:
    """Have all threads take memory from one place, which alone can grow large blocks without a mapping of their own.

    For commands that train on a CPU, before any thread starts: a thread stays where its first memory came from. Does
    nothing where malloc is not glibc's, or the environment (`MALLOC_*`, `GLIBC_TUNABLES`) says how it is to work.
    """
    global _shared
    set_option = _mallopt()
    if set_option is not None:
        _shared = bool(set_option(_ARENA_MAX, 1))


def keep_freed(mesh: Mesh) -> None:
    """From now on give nothing back, if `share_one_arena` was called and `mesh` is of CPU devices.

    For before the first step, but behind the loading of weights, whose passing blocks would leave gaps into which
    nothing fits.
    """
    global _kept
    if not _shared or _kept or mesh.devices.flat[0].platform != "cpu":
        return
    set_option = _mallopt()
    if set_option is not None:
        _kept = bool(set_option(_TRIM_THRESHOLD, _NEVER) and set_option(_MMAP_MAX, 0))


def _mallopt() -> Callable[[int, int], int] | None:
    told = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if told or sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
