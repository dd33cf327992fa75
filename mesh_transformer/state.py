"""What training carries from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax

Params = Mapping[str, Mapping[str, jax.Array]]


class OptimizerState(NamedTuple):
    """Adam and the schedule.

    `count` (int32 []) is Adam's number of updates, for bias correction; `mu` and `nu` are float32 trees like the
    parameters; `schedule_count` (int32 []) is the number of updates since this run began, which a fine-tuning run
    resets while `count` goes on. The training loop's `step` is `schedule_count`.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as optax's own Adam state does
    mu: Params
    nu: Params
    schedule_count: jax.Array


class TrainState(NamedTuple):
    """`params` in float32, `opt_state` (None for inference), `step`: int32 [], updates in the weights' whole life."""

    params: Params
    opt_state: OptimizerState | None
    step: jax.Array
