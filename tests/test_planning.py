"""Plans: names of slices, what a program's text says, and what is refused in a line."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from conftest import network_of
from hf_tools import hf_tensors, random_tree
from training_tools import KEYS, ROOT, Run

import train
from mesh_transformer import load_config, parameters, steps, transformer_shard
from mesh_transformer.cluster import pod, remote
from mesh_transformer.cluster.hosts import HostError
from mesh_transformer.config import Config
from mesh_transformer.errors import EXIT_FAILED, ConfigError
from mesh_transformer.planning import check, chips, exact
from mesh_transformer.planning import search as searching
from mesh_transformer.planning.accessed import accessed_bytes
from mesh_transformer.planning.analytic import analytic
from mesh_transformer.planning.check import check_memory
from mesh_transformer.planning.estimate import Estimate, time_of
from mesh_transformer.planning.program import collectives, product_flops, stacked_bytes
from mesh_transformer.training import session
from scripts import plan


@pytest.mark.parametrize(
    ("name", "xla", "devices"),
    [
        ("v3-8", "v3:2x2", 8), ("v4-8", "v4:2x2x1", 4), ("v4-32", "v4:2x2x4", 16), ("v5e-16", "v5e:4x4", 16),
        ("v5litepod-16", "v5e:4x4", 16), ("v5e:4x8", "v5e:4x8", 32), ("gpu:h100x8", "h100:8", 8), ("cpu:8", "cpu:8", 8),
        ("a100-40gb:16", "a100-40gb:16", 16),
    ],
)  # fmt: skip
def test_slices_by_the_names_people_use(name: str, xla: str, devices: int) -> None:
    found = chips.topology(name)
    assert (found.name, found.devices) == (xla, devices)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5-8", "nearest to 'v5' is 'v5p'"),
        ("v5e:32x32", "at most 256 devices"),
        ("v4-9", "powers of two"),
        ("v5e-2", "from v5e-4 on"),
        ("v4:2x2", "linked in 3 dimensions"),
        ("h100x", "not known"),
    ],
)
def test_other_names_are_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chips.topology(name)


def test_products_are_counted_with_the_loops_around_them() -> None:
    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    text = jax.jit(program).lower(jnp.ones((8, 16)), jnp.ones((5, 16, 16))).compile().as_text()
    assert product_flops(text) == 5 * 2 * 8 * 16 * 16


TPU_LOOP = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = f32[8]{0} all-reduce(%x), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(6)
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
}
"""


def test_a_loop_that_tells_its_length_by_its_condition() -> None:
    (found,) = collectives(TPU_LOOP)
    assert (found.runs, found.bytes, found.first_group) == (6, 32, [0, 2, 4, 6])
    with pytest.raises(ValueError, match="does not say how often"):
        collectives(TPU_LOOP.replace("direction=LT", "direction=NE"))
    (found,) = collectives(TPU_LOOP.replace("direction=LT", "direction=NE"), unknown=2)
    assert found.runs == 2


def test_a_token_is_what_two_rounds_of_the_loop_take_less_what_one_takes() -> None:
    """As `planning.compiler.read` counts a generation: what happens once before the loop is not in it."""

    def program(x: jax.Array, w: jax.Array, n: jax.Array) -> jax.Array:
        start = (x @ w[0] @ w[1], jnp.int32(0))
        return jax.lax.while_loop(lambda c: (c[1] < n) & (c[0][0, 0] < 9), lambda c: (c[0] @ w[2], c[1] + 1), start)[0]

    text = jax.jit(program).lower(jnp.ones((8, 16)), jnp.ones((3, 16, 16)), jnp.int32(4)).compile().as_text()
    product = 2 * 8 * 16 * 16
    assert product_flops(text, 1) == 3 * product and product_flops(text, 2) - product_flops(text, 1) == product
    assert 0 < accessed_bytes(text, 2) - accessed_bytes(text, 1) < accessed_bytes(text, 1)


@pytest.mark.parametrize(("microbatches", "sums"), [(1, 0), (4, 1)])
def test_what_gathering_all_layers_at_once_takes_by_hand(microbatches: int, sums: int) -> None:
    d, layers, dp = 1024, 8, 8
    keys = {**KEYS, "model_dir": "m", "version": 2, "layers": layers, "d_model": d, "zero_stage": 3,
            "cores_per_replica": 1, "gradient_accumulation_steps": microbatches}  # fmt: skip
    early, late = (
        analytic(
            load_config(keys | {"compute_dtype": "bfloat16", "early_collect": how}), chips.topology("v5e-8"), "full"
        )
        for how in (True, False)
    )
    matrices = layers * 16 * d * d
    blocks = matrices // dp * (microbatches == 1)
    assert early.copies - late.copies == 2 * (2 * matrices - blocks), "in bfloat16, weights and their gradients"
    assert early.gradients - late.gradients == 4 * (sums * matrices - matrices // dp), "sums are whole"


TPU_FUSIONS = """
%read (p0: f32[6,8,4], p1: s32[]) -> f32[8,4] {
  %p0 = f32[6,8,4]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %slice = f32[1,8,4]{2,1,0} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,8,4}
  ROOT %out = f32[8,4]{1,0} bitcast(%slice)
}

%write (p0: f32[6,8,4], p1: f32[8,4], p2: s32[]) -> f32[6,8,4] {
  %p0 = f32[6,8,4]{2,1,0} parameter(0)
  %p1 = f32[8,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %new = f32[1,8,4]{2,1,0} bitcast(%p1)
  ROOT %out = f32[6,8,4]{2,1,0} dynamic-update-slice(%p0, %new, %p2, %p2, %p2)
}

ENTRY %main (a: f32[6,8,4], i: s32[]) -> f32[6,8,4] {
  %a = f32[6,8,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %layer = f32[8,4]{1,0} fusion(%a, %i), kind=kLoop, calls=%read
  %near = f32[8,4]{1,0:S(1)} copy(%layer)
  ROOT %b = f32[6,8,4]{2,1,0} fusion(%a, %layer, %i), kind=kLoop, calls=%write
}
"""


def test_fusions_read_and_write_only_the_slices_that_they_use() -> None:
    layer = 8 * 4 * 4
    # Read and written by the first fusion, read by the copy into the chip's own memory, read and written in place.
    assert accessed_bytes(TPU_FUSIONS) == 5 * layer + 2 * 4  # and the index, twice


def test_bytes_of_a_scan_are_those_of_one_layer_each_time() -> None:
    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    few, many = (
        accessed_bytes(jax.jit(program).lower(jnp.ones((8, 64)), jnp.ones((n, 64, 64))).compile().as_text())
        for n in (5, 10)
    )
    assert 5 * 64 * 64 * 4 < many - few < 5 * 64 * 64 * 4 * 4  # a layer is copied out of the stack, at most


def kept(model: dict[str, Any], remat: str) -> tuple[int, int]:
    """What a CPU's compiled step keeps of its layers, and its copies of their weights."""
    network = network_of(1, 2, layers=3, remat=remat, **model)
    shapes = [kind.local_shape(2) for kind in parameters.kinds(network.model, 2) if kind.stacked]
    batch = steps.Batch(*(jax.ShapeDtypeStruct((1, 3, 16), kind) for kind in (jnp.int32, jnp.int32, jnp.float32)))
    step = transformer_shard.train_step(network.model, network.config.optim, network.mesh)
    return stacked_bytes(step.lower(network.state, batch).compile().as_text(), 3, shapes)


D, MP = 32, 2


@pytest.mark.parametrize(
    ("remat", "saved"),
    [
        # The stream; q, k, v, attended and hidden; a row's normaliser for a head.
        ("dots", D + (4 * D + 4 * D) / MP + 8 / MP),
        pytest.param("full", D, marks=pytest.mark.long),
    ],
)
def test_what_is_kept_of_the_layers_is_read_from_the_program(remat: str, saved: float) -> None:
    assert kept({"per_replica_batch": 3}, remat)[0] == pytest.approx(3 * 3 * 16 * saved * 4, rel=0.02)


@pytest.mark.parametrize("task", ["train", "eval", "generate"])
def test_an_analytic_plan_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, task: str
) -> None:
    monkeypatch.setattr(exact, "library", lambda: None)
    config = ["--config", str(ROOT / "configs" / "quickstart.json"), "--task", task]
    assert plan.main([*config, "--topology", "gpu:h100x8"]) == 0
    assert "by arithmetic alone" in capsys.readouterr().out
    assert plan.main([*config, "--topology", "v5e:2x4"]) == 0
    found = capsys.readouterr()
    assert "by arithmetic alone" in found.out and "pip install 'mesh-transformer[plan]'" in found.err


def test_what_cannot_be_planned_is_said_in_a_line(capsys: pytest.CaptureFixture) -> None:
    config = ["--config", str(ROOT / "configs" / "quickstart.json")]
    assert plan.main([*config, "--topology", "v4:2x2"]) == 2
    assert "linked in 3 dimensions" in capsys.readouterr().err
    assert plan.main([*config, "--topology", "gpu:h100x6"]) == 2
    assert "cannot be split into replicas" in capsys.readouterr().err
    for words in (["--task", "eval", "--search"], ["--search", "--remat", "full"], ["--sequences", "8"],
                  ["--smallest", "v4", "--topology", "v4-8"], ["--compile", "-1"]):  # fmt: skip
        with pytest.raises(SystemExit):
            plan.main([*config, *words])


def test_the_count_of_parameters_is_that_of_hugging_face_and_the_embedding_bias_on_every_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """P01. GPT-J-6B has 6,050,882,784 there."""
    model = load_config({**KEYS, "model_dir": "m"}).model
    theirs = sum(tensor.size for tensor in hf_tensors(random_tree(model)).values())
    run = Run(tmp_path, tmp_path)
    cases = [(run.arguments(cores_per_replica=mp)[1], "cpu:4", theirs + model.d_model) for mp in (1, 2, 4)]
    cases += [(str(ROOT / "configs/6B_roto_256.json"), f"v5e-{n}", 6_050_882_784 + 4096) for n in (8, 16)]
    for file, topology, count in cases:
        plan.main(["--config", file, "--topology", topology, "--analytic"])
        out = capsys.readouterr().out
        assert f"parameters        {count:,}\n" in out
        assert all(f"\n  {name} " in out for name in ("weights", "moments", "gradients", "activations"))


def test_too_large_a_step_is_refused_with_what_would_help(capsys: pytest.CaptureFixture) -> None:
    config = ["--config", str(ROOT / "configs" / "175B_v1.json"), "--analytic"]
    assert plan.main([*config, "--topology", "v4-32"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out and "what would help: a larger slice" in out
    assert plan.main(["--config", str(ROOT / "configs/6B_roto_256.json"), "--topology", "v5e-1024", "--analytic"]) == 0
    assert "DCN" in capsys.readouterr().out, "four slices are linked by the network"


def test_search_ranks_all_ways_and_writes_the_best(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    written = tmp_path / "best.json"
    options = ["--config", str(ROOT / "configs/6B_roto_256.json"), "--topology", "v5e-16", "--sequences", "32"]
    assert plan.main([*options, "--analytic", "--search", "--write", str(written)]) == 0
    out = capsys.readouterr().out
    assert "cores_per_replica 16: " in out and "per_replica_batch 32: needs" in out
    found, wanted = load_config(written), load_config(ROOT / "configs/6B_roto_256.json")
    mesh = found.mesh
    assert mesh.per_replica_batch * mesh.gradient_accumulation_steps * 16 // mesh.cores_per_replica == 32
    assert f"best: cores_per_replica {mesh.cores_per_replica}, per_replica_batch {mesh.per_replica_batch}" in out
    assert found.optim == wanted.optim and found.data == wanted.data, "nothing else is another"
    assert plan.main(["--config", str(written), "--topology", "v5e-16", "--analytic"]) == 0


def test_search_lets_the_compiler_overrule_the_arithmetic() -> None:
    config, topology = load_config(ROOT / "configs/6B_roto_256.json"), chips.topology("v5e-16")
    first, second = searching.search(config, topology, 32)[:2]

    def compile_(config: Config, topology: chips.Topology, remat: str) -> Estimate:
        if config == first.config:
            raise exact.TooLargeError("RESOURCE_EXHAUSTED: 17 GiB of 15.75")
        return dataclasses.replace(analytic(config, topology, remat), exact=True)

    found = searching.search(config, topology, 32, compile_, best=2)
    assert found[0].config == second.config and [each.estimate.exact for each in found[:3]] == [True, True, False]
    loser = next(each for each in found if each.config == first.config)
    assert searching.why(loser, found[0]) == "the compiler says that it does not fit"


def test_the_smallest_slice(capsys: pytest.CaptureFixture) -> None:
    config = ["--config", str(ROOT / "configs/6B_roto_256.json"), "--analytic"]
    assert plan.main([*config, "--smallest", "v5e"]) == 0
    assert "the smallest: v5e:2x4" in capsys.readouterr().out
    assert plan.main([*config, "--smallest", "v5e", "--remat", "none"]) == 1
    assert re.search("no slice of v5e, .*: remat full; .*a chip with more memory", capsys.readouterr().out)
    assert plan.main([*config, "--smallest", "v5e", "--search"]) == 0
    assert "the smallest: v5e:2x4" in capsys.readouterr().out
    assert plan.main(["--config", str(ROOT / "configs/175B_v1.json"), "--analytic", "--smallest", "rtx4090"]) in (0, 1)
    assert plan.main([*config, "--smallest", "v9"]) == 2
    assert "chip 'v9' is not known; the nearest is 'v4'" in capsys.readouterr().err


def test_the_cores_of_simulated_devices_do_one_thing_after_the_other() -> None:
    config = load_config(ROOT / "configs" / "quickstart.json")
    cpu, gpu = (
        time_of(analytic(config, chips.topology(name), "dots"), chips.topology(name)) for name in ("cpu:8", "t4x8")
    )
    assert cpu.in_turn == cpu.overlapped == cpu.compute + cpu.memory + cpu.links
    assert gpu.in_turn == max(gpu.compute, gpu.memory) + gpu.links > gpu.overlapped
    kept = [analytic(config, chips.topology("cpu:8"), remat) for remat in ("none", "dots")]
    more = (kept[0].peak - kept[1].peak) / chips.CHIPS["cpu"].fresh_bandwidth
    times = [time_of(each, chips.topology("cpu:8")) for each in kept]
    assert times[0].memory - times[1].memory == pytest.approx(more), "temporaries are taken anew from the system"


def test_a_run_that_cannot_fit_is_refused_before_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    large, small = (load_config(ROOT / "configs" / name) for name in ("6B_roto_256.json", "quickstart.json"))
    check_memory(large, "TPU v4", 8)
    check_memory(small, "cpu", 8, check.device_memory(jax.devices()[0], 8))
    check_memory(large, "an accelerator without a name", 8)
    with pytest.raises(ConfigError, match="about 1[0-9].* GiB on a device.*of 8.00 GiB .*what would help: .*--no-plan"):
        check_memory(large, "NVIDIA L4", 8, 8 * 2**30)
    with pytest.raises(ConfigError, match="zero_stage 3"):
        check_memory(large, "TPU v2", 16)
    assert not caplog.records
    peak = analytic(large, chips.topology("l4x8"), "full").peak
    check_memory(large, "NVIDIA L4", 8, int(peak * 1.02))
    assert "it may not fit" in caplog.text


def test_training_asks_the_plan_first(
    monkeypatch: pytest.MonkeyPatch, training_data: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(check, "_machine_memory", lambda: 1_000_000)
    monkeypatch.setattr(session._Session, "try_out", lambda _: EXIT_FAILED)  # where a dry run begins to compile
    run = Run(tmp_path / "run", training_data)
    assert run("--dry-run") == 2
    assert "a training step takes about" in capsys.readouterr().err
    assert run("--dry-run", "--no-plan") == EXIT_FAILED


LARGE = {"layers": 28, "d_model": 4096, "n_heads": 16, "n_vocab": 50400, "pe_rotary_dims": 64}


def test_train_py_asks_the_plan_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, training_data: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(pod, "RaySession", refuse_to_start)
    small, large = Run(tmp_path / "small", training_data), Run(tmp_path / "large", training_data, **LARGE)
    words = ["--config", small.arguments()[1], "--tpu", "local", "--hosts", "2", "--devices-per-host", "4"]
    assert train.main(words) == 1, "what fits begins to start"
    assert "Ray would start here" in capsys.readouterr().err
    monkeypatch.setattr(check, "_machine_memory", lambda: 1_000_000)
    assert train.main(words) == 2
    assert "a training step takes about" in capsys.readouterr().err
    assert train.main([*words, "--no-plan"]) == 1
    assert "Ray would start here" in capsys.readouterr().err
    monkeypatch.setattr(remote, "hosts_of", refuse_to_start)
    words = ["--config", large.arguments()[1], "--tpu", "pod", "--tpu_region", "z", "--tpu_type", "v2-8"]
    for more in ([], ["--dry-run"]):  # before a TPU is made, and paid for
        assert train.main([*words, *more]) == 2
        assert "of 7.48 GiB that it has" in capsys.readouterr().err
    assert train.main([*words, "--dry-run", "--no-plan"]) == 1
    assert "Ray would start here" in capsys.readouterr().err


def refuse_to_start(*arguments: object) -> None:
    raise HostError("Ray would start here")
