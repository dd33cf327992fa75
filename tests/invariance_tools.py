"""Three updates of the tiny model under some settings, and the comparison of two such runs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from conftest import batch_of, network_of

SEQUENCES = 16
ADAM_B1 = 0.9
# Keys' biases move every score of a query alike, so their gradient is zero but for rounding, which Adam blows up.
NO_GRADIENT = "['b_k']"


def network(dp: int, mp: int, microbatches: int, **changes: Any) -> Any:
    sizes = {
        "gradient_accumulation_steps": microbatches,
        "per_replica_batch": SEQUENCES // microbatches // dp,
        "max_grad_norm": 1e9,  # unclipped, so that the first moment shows the gradient itself
        "remat": "dots",
    }
    return network_of(dp, mp, **sizes | changes)


def leaves(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@functools.cache
def trained(dp: int, mp: int, microbatches: int, changes: tuple[tuple[str, Any], ...] = ()) -> dict[str, Any]:
    net = network(dp, mp, microbatches, **dict(changes))
    out: dict[str, Any] = {"initial": leaves(net.state.params), "metrics": []}
    for step in range(3):
        rows = batch_of(SEQUENCES, net.model.seq, seed=step)
        shaped = {k: v.reshape(microbatches, -1, net.model.seq) for k, v in rows.items()}
        out["metrics"].append({k: float(v) for k, v in net.train(shaped).items()})
        if step == 0:
            out["gradient"] = {k: v / (1 - ADAM_B1) for k, v in leaves(net.state.opt_state.mu).items()}
    out["final"] = leaves(net.state.params)
    return out


def compare(case: dict[str, Any], reference: dict[str, Any]) -> None:
    """Losses and the first gradient within 1e-5; what three updates made of the parameters within 1e-4 of how far these
    moved, which is 1e-6 to 1e-5 of numbers."""
    for key, value in case["initial"].items():
        np.testing.assert_array_equal(value, reference["initial"][key], err_msg=key)
    for got, expected in zip(case["metrics"], reference["metrics"], strict=True):
        for key in ("loss", "last_loss", "cross_entropy"):
            assert got[key] == pytest.approx(expected[key], rel=1e-5)
    for key, expected in reference["gradient"].items():
        if key.endswith(NO_GRADIENT):
            continue
        largest = np.abs(expected).max()
        assert np.abs(case["gradient"][key] - expected).max() <= 1e-5 * largest, key
        movement = np.abs(reference["final"][key] - reference["initial"][key]).max()
        assert movement > 1e-3, f"{key} did not move"
        assert np.abs(case["final"][key] - reference["final"][key]).max() <= 1e-4 * movement, key
