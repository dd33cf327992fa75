"""When periodic work is due. `step` is the number of completed updates, here and everywhere."""

from __future__ import annotations


def is_due(every: int | None, step: int, total_steps: int) -> bool:
    """Whether work with the period `every` is due after update number `step`.

    After k, 2k, 3k, ... and after the last update, `total_steps`; 0 or None is off.
    """
    if not every or step <= 0:
        return False
    return step % every == 0 or step == total_steps
