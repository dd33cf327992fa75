"""docs/planning.md and docs/scale.md are what their command writes; arithmetic is as near to the compiler as they say;
and steps compile for TPUs here."""

from __future__ import annotations

from typing import Any

import pytest
from training_tools import ROOT

from benchmarks import plan_cases, plan_ranking
from mesh_transformer.planning import chips, exact
from scripts import install_compiler, plan_docs

# Searches over thousands of ways: seconds each, in `make test-long` alone.
SLOW = {"smallest", "weak-6B", "weak-175B"}
KNOWN = plan_cases.results()


@pytest.mark.parametrize("name", sorted(plan_docs.PAGES))
def test_pages_are_what_the_command_writes(name: str) -> None:
    text = plan_docs.PAGES[name].read_text()
    assert plan_docs.page(text, only=lambda block: block not in SLOW) == text
    for block in plan_docs.BLOCKS:
        assert sum(f"<!-- begin {block} -->" in path.read_text() for path in plan_docs.PAGES.values()) == 1, block


@pytest.mark.long
def test_searches_of_the_pages_are_what_the_command_writes() -> None:
    assert plan_docs.main(["--check"]) == 0


def test_pictures_are_what_the_command_draws() -> None:
    for name, drawn in plan_docs.pictures().items():
        assert (ROOT / "docs/images" / name).read_text() == drawn


@pytest.mark.parametrize("case", [*plan_cases.FIT, *plan_cases.CHECK], ids=lambda case: case.name)
def test_arithmetic_is_near_what_the_compiler_found(case: plan_cases.Case) -> None:
    assert case.name in KNOWN, "not compiled yet: python benchmarks/plan_cases.py --compile"
    peak, flops, _ = plan_cases.errors(case, KNOWN[case.name])
    assert abs(peak) < 0.10 and abs(flops) < 0.02
    moved = {(each.kind, each.axis): 0.0 for each in case.analytic().traffic}
    for each in case.analytic().traffic:
        moved[each.kind, each.axis] += each.sent
    if case.config().mesh.zero_stage == 0:
        for kind, axis in moved:
            found = sum(e.sent for e in case.exact(KNOWN[case.name]).traffic if (e.kind, e.axis) == (kind, axis))
            assert moved[kind, axis] == pytest.approx(found, rel=0.02), (kind, axis)


def test_the_grids_have_no_case_in_common() -> None:
    fit, check = ({case.name for case in grid} for grid in (plan_cases.FIT, plan_cases.CHECK))
    assert not fit & check and len(fit) == len(plan_cases.FIT) and len(check) == len(plan_cases.CHECK)


def test_the_ranking_knows_an_order() -> None:
    assert plan_ranking.correlation([1, 2, 3], [10, 20, 40]) == pytest.approx(1)
    assert plan_ranking.correlation([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert plan_ranking.correlation([1, 1, 2], [20, 10, 40]) == plan_ranking.correlation([1, 1, 2], [10, 20, 40])
    assert len({tuple(way.items()) for way in plan_ranking.ways()}) == 24


def test_the_compiler_is_the_one_that_jax_names() -> None:
    wanted = install_compiler.requirement()
    assert wanted is None or wanted.startswith("libtpu==0.0.")


compiler = pytest.mark.skipif(exact.library() is None, reason="libtpu is not here: scripts/install_compiler.py")
TINY = {
    "layers": 2, "d_model": 128, "n_heads": 2, "n_vocab": 512, "seq": 128, "per_replica_batch": 2, "pe_rotary_dims": 64,
    "cores_per_replica": 2, "gradient_accumulation_steps": 2, "lr": 1e-4, "total_steps": 10, "train_set": "x.index",
}  # fmt: skip


def compiled(topology: str, task: str, **keys: Any) -> Any:
    from mesh_transformer import load_config

    config, slice_ = load_config({**TINY, **keys}), chips.topology(topology)
    found = exact.exact(config, slice_, "dots", task)
    return found, exact.analytic(config, slice_, "dots", task)


@compiler
@pytest.mark.slow
def test_a_step_compiles_for_a_tpu_slice() -> None:
    found, worked = compiled("v5e:2x2", "train")
    assert (found.dp, found.mp) == (2, 2) and found.exact
    assert found.peak == pytest.approx(worked.peak, rel=0.5)  # a tiny model is mostly padding
    assert found.flops == pytest.approx(worked.flops, rel=0.02)
    sums = {(e.kind, e.axis): e.runs for e in found.traffic if e.bytes == 2 * 128 * 128 * 2}
    assert sums["all-reduce", "mp"] == (2 * 2 + 1) * 2, "two a layer and one for the head, of each microbatch"


@compiler
@pytest.mark.long
@pytest.mark.parametrize("chip", ["v3-8", "v4-8", "v5e-4", "v5p-8", "v6e-4"])
@pytest.mark.parametrize("keys", [{}, {"version": 2, "zero_stage": 3}, {"zero_stage": 1}], ids=["v1", "v2", "zero1"])
def test_steps_compile_for_every_family(chip: str, keys: dict[str, Any], record_property: Any) -> None:
    found, worked = compiled(chip, "train", **keys)
    record_property("peak", f"{found.peak:,} bytes, {worked.peak / found.peak:.2f} by arithmetic")
    assert found.flops == pytest.approx(worked.flops, rel=0.02)


@compiler
@pytest.mark.long
@pytest.mark.parametrize("task", ["eval", "generate"])
def test_scoring_and_generating_compile_too(task: str) -> None:
    found, worked = compiled("v5e-4", task)
    assert found.moments == found.gradients == 0 and found.weights == worked.weights
    assert found.flops == pytest.approx(worked.flops, rel=0.05)
