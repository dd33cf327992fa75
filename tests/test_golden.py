"""Against numbers measured on the 2021 library: its checkpoints are loaded and must give its losses.

`tests/data/golden` holds, per model, what that library computed (`eval.npz`, `train_trace.json`) and its checkpoint in
the published layout, reduced to the parameters (`slim_step_N`) where the moments are not needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import mesh_of

from mesh_transformer import CausalTransformer, load_config

GOLDEN = Path(__file__).parent / "data" / "golden"
F32_CASES = sorted(p.name for p in GOLDEN.iterdir() if p.name.endswith("_f32"))
BF16 = "v1_rotary_mp4_bf16"


def network(case: str, dp: int, mp: int, **changes: Any) -> CausalTransformer:
    config = json.loads((GOLDEN / case / "config.json").read_text())
    config.update(cores_per_replica=mp, compute_dtype="float32", train_set="none.index", total_steps=100, name="golden")
    return CausalTransformer(load_config(config | changes), mesh_of(dp, mp))


def evaluated(case: str, net: CausalTransformer) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    golden = dict(np.load(GOLDEN / case / "eval.npz"))
    tokens = golden["tokens"]
    out = net.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})
    return {k: np.asarray(v) for k, v in out.items()}, golden


def trained_mp(case: str) -> int:
    return json.loads((GOLDEN / case / "config.json").read_text())["cores_per_replica"]


@pytest.mark.parametrize("case", F32_CASES)
def test_evaluation_of_a_loaded_checkpoint(case: str) -> None:
    mp = trained_mp(case)
    net = network(case, 8 // mp if mp > 4 else 2, mp)
    net.load_ckpt(next((GOLDEN / case).glob("slim_step_[1-9]*")), optimizer=False)
    out, golden = evaluated(case, net)
    for key in ("loss", "last_loss", "all_loss"):
        np.testing.assert_allclose(out[key], golden[key], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(out["correct"], golden["correct"])


@pytest.mark.parametrize("mp", [1, 8])
def test_a_checkpoint_of_four_shards_on_another_mesh(mp: int) -> None:
    case = "v1_rotary_mp4_f32"
    net = network(case, 1, mp)
    net.load_ckpt(GOLDEN / case / "slim_step_8", optimizer=False)
    out, golden = evaluated(case, net)
    np.testing.assert_allclose(out["all_loss"], golden["all_loss"], atol=1e-4, rtol=0)


def test_bfloat16_weights_in_float32_and_in_bfloat16() -> None:
    exact, narrow = network(BF16, 2, 4), network(BF16, 2, 4, compute_dtype="bfloat16")
    for net in (exact, narrow):
        net.load_ckpt(GOLDEN / BF16 / "slim_step_8", optimizer=False)
    out, golden = evaluated(BF16, exact)
    np.testing.assert_allclose(out["loss"], golden["loss"], atol=1e-4, rtol=0)
    rounded, _ = evaluated(BF16, narrow)
    difference = np.abs(rounded["all_loss"] - golden["all_loss"]).max()
    assert 1e-4 < difference < 3e-2, "bfloat16 activations are close, but not float32"


def test_the_whole_trace_on_one_shard() -> None:
    case = "v1_rotary_mp1_f32"
    net = network(case, 2, 1)
    net.load_ckpt(GOLDEN / case / "step_0")
    trace = json.loads((GOLDEN / case / "train_trace.json").read_text())
    for tokens, expected in zip(np.load(GOLDEN / case / "train_batches.npz")["tokens"], trace, strict=True):
        metrics = net.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
        for key in ("loss", "last_loss", "grad_norm", "grad_norm_micro"):
            assert float(metrics[key]) == pytest.approx(expected[key], rel=1e-4), key
    final = network(case, 2, 1)
    final.load_ckpt(GOLDEN / case / "slim_step_4", optimizer=False)
    for module, group in final.state.params.items():
        for name, value in group.items():
            got = np.asarray(net.state.params[module][name])
            np.testing.assert_allclose(got, np.asarray(value), atol=1e-5, rtol=0, err_msg=f"{module}/{name}")


def test_the_first_step_on_four_shards() -> None:
    # Further steps cannot agree: the 2021 library's summed biases learned M times as fast (docs/faithfulness.md).
    case = "v1_rotary_mp4_f32"
    net = network(case, 2, 4)
    net.load_ckpt(GOLDEN / case / "slim_step_0")
    tokens = np.load(GOLDEN / case / "train_batches.npz")["tokens"][0]
    metrics = net.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
    expected = json.loads((GOLDEN / case / "train_trace.json").read_text())[0]
    assert float(metrics["loss"]) == pytest.approx(expected["loss"], rel=1e-4)
    assert float(metrics["last_loss"]) == pytest.approx(expected["last_loss"], rel=1e-4)
