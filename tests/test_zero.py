"""ZeRO: the update is the same whatever is cut over the replicas, and what a device holds and sends is what the scheme
says: read from the compiled step."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, mesh_of, network_of, tiny
from invariance_tools import compare, trained
from training_tools import ROOT, Run, equal, interrupt_at

from mesh_transformer import load_config, make_mesh, parameters, steps
from mesh_transformer.config import Config, ModelConfig, check_mesh
from mesh_transformer.config_report import device_bytes
from mesh_transformer.errors import ConfigError
from mesh_transformer.planning.program import Collective, collectives
from mesh_transformer.state import OptimizerState, TrainState
from mesh_transformer.transformer_shard import Zero, settle, train_step

pytestmark = pytest.mark.usefixtures("uncached")

V2 = (("version", 2), ("d_head", 6))
FEW = [  # (dp, mp, A), zero_stage, other settings
    ((8, 1, 2), 3, (("logit_chunk", 7),)),  # three chunks of a replica's tokens, the last one filled up
    ((4, 2, 1), 1, ()),
    ((2, 2, 1), 3, (*V2, ("early_collect", False))),  # whose reference collects nothing
    ((4, 1, 2), 1, V2),
]
MORE = [
    # eps: see test_mesh_invariance.test_other_positions_and_norms
    *(((2, 4, 2), 3, (("logit_chunk", 7), ("z_loss", z), ("eps", 1e-4))) for z in ("reference", "log_z", "off")),
    ((2, 2, 1), 3, V2),
    *((case, stage, (*V2, ("early_collect", False))) for case in ((4, 2, 2), (8, 1, 1)) for stage in (1, 3)),
] + [
    ((dp, mp, A), stage, settings)
    for dp, mp, A in ((2, 1, 1), (4, 2, 2), (2, 4, 1), (8, 1, 1))
    for stage in (1, 3)
    for settings in ((), V2, (("remat", "none"),), (("remat", "full"),))
]


@pytest.mark.parametrize(
    ("case", "stage", "settings"), [*FEW, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)], ids=str
)
def test_the_update_is_that_of_stage_0_on_one_device(
    case: tuple[int, int, int], stage: int, settings: tuple[tuple[str, Any], ...]
) -> None:
    same = tuple(item for item in settings if item[0] not in ("remat", "early_collect", "logit_chunk"))
    reference = trained(1, 1, 1, (*same, ("zero_stage", 0)))
    got = trained(*case, (*settings, ("zero_stage", stage)))
    compare(got, reference)
    for step, other in zip(got["metrics"], reference["metrics"], strict=True):
        assert step["grad_norm"] / case[2] == pytest.approx(other["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [pytest.param((("pe", "fixed"),), marks=pytest.mark.long), (("pe", "t5"), ("norm", "rmsnorm-bias"))],
    ids=str,
)
def test_tables_and_other_norms_too(settings: tuple[tuple[str, Any], ...]) -> None:
    changes = (*settings, ("eps", 1e-4))  # see test_mesh_invariance.test_other_positions_and_norms
    compare(trained(2, 4, 1, (*changes, ("zero_stage", 3))), trained(1, 1, 1, changes))


def test_norms_of_small_batches_are_each_replicas_own() -> None:
    """The noise scale needs them, though stage 3 scatters a replica's gradient before it is whole anywhere."""
    for got, expected in zip(
        trained(8, 1, 2, (("zero_stage", 3),))["metrics"], trained(8, 1, 2)["metrics"], strict=True
    ):
        for key in ("noise_small_sq", "grad_norm_micro"):
            assert got[key] == pytest.approx(expected[key], rel=1e-5)


def test_evaluation_and_generation_of_a_cut_state() -> None:
    cut, whole = network_of(4, 2, zero_stage=3, seed=5), network_of(1, 1, seed=5)
    rows = batch_of(6, 16)
    for key, value in cut.eval(rows).items():
        np.testing.assert_allclose(value, whole.eval(rows)[key], atol=1e-5, err_msg=key)
    np.testing.assert_allclose(cut.logits(rows["obs"][:4]), whole.logits(rows["obs"][:4]), atol=1e-5)
    answers = [net.generate(rows["obs"], [16] * 6, 4, {"temp": 0})["tokens"] for net in (cut, whole)]
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize(("stage", "words"), [(1, "zero_stage 1 splits d_model"), (3, "zero_stage 3 splits d_model")])
def test_replicas_that_do_not_divide_the_width_are_refused(stage: int, words: str) -> None:
    config = load_config(tiny(d_model=36, n_heads=6, cores_per_replica=1, zero_stage=stage))
    with pytest.raises(ConfigError, match=rf"{words} \(36\) over the 8 replicas of 8 devices"):
        check_mesh(config, 8)
    assert check_mesh(load_config(tiny(d_model=36, n_heads=6, cores_per_replica=1, zero_stage=0)), 8) == (8, 1)


# What the compiled step holds and sends


class Compiled(NamedTuple):
    config: Config
    model: ModelConfig
    program: Any

    @property
    def held(self) -> int:
        """Bytes of one device at the fullest moment: its state, the batch, and what the step needs besides."""
        memory = self.program.memory_analysis()
        return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)


def shapes_of(model: ModelConfig, mp: int) -> TrainState:
    tree = parameters.tree((k, jax.ShapeDtypeStruct(k.shape, jnp.float32)) for k in parameters.kinds(model, mp))
    count: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return TrainState(tree, OptimizerState(count, tree, tree, count), count)


@functools.cache
def compiled(dp: int, mp: int, stage: int, microbatches: int = 1, **changes: Any) -> Compiled:
    """The step of a model whose parameters are large beside its activations."""
    sizes = {"layers": 3, "d_model": 128, "n_vocab": 512, "d_head": None, "remat": "dots"}
    config = load_config(tiny(cores_per_replica=mp, zero_stage=stage, **(sizes | changes)))
    mesh = make_mesh(config, list(mesh_of(dp, mp).devices.flat))
    model = settle(config, mesh)
    zero = Zero(stage, config.version == 2 and config.run.early_collect)
    ids = jax.ShapeDtypeStruct((microbatches, dp, model.seq), jnp.int32)
    batch = steps.Batch(ids, ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32))
    lowered = train_step(model, config.optim, mesh, zero).lower(shapes_of(model, mp), batch)
    return Compiled(config, model, lowered.compile())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_state_of_a_device_is_what_the_config_report_says(stage: int) -> None:
    one = compiled(4, 2, stage)
    held = device_bytes(one.config, 4)
    batch = 3 * 4 * one.model.seq
    arguments = one.program.memory_analysis().argument_size_in_bytes
    assert arguments - batch == pytest.approx(held.weights + held.optimizer, abs=64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"n_vocab": 4096, "layers": 2}, marks=pytest.mark.long),
        pytest.param({"version": 2, "early_collect": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_stage_3_holds_a_share_of_the_state_and_what_one_layer_needs(changes: dict[str, Any]) -> None:
    changes = changes | {"seq": 2}  # so that activations are a hundredth of it
    one = compiled(8, 1, 3, **changes)
    kinds = parameters.kinds(one.model, 1)
    state = 16 * parameters.count(one.model)  # masters, two moments and a gradient, float32
    layer = 4 * sum(math.prod(kind.layer_shape) for kind in kinds if kind.stacked)
    vocabulary = 4 * one.model.n_vocab * one.model.d_model
    vectors = 16 * sum(math.prod(kind.shape) for kind in kinds if kind.zero is None)
    activations = 4 * one.model.layers * one.model.seq * (5 * one.model.d_model + 2 * one.model.d_ff)
    bound = state / 8 + max(2 * layer, vocabulary) + vectors + activations
    assert one.held < bound
    assert compiled(8, 1, 0, **changes).held > 2 * bound, "or the bound says nothing"


def moved(found: list[Collective], kind: str, size: int) -> int:
    """Bytes that one device takes part in moving, per step, over groups of `size` devices."""
    return sum(one.total for one in found if one.kind == kind and one.group_size == size)


def matrix_bytes(model: ModelConfig, mp: int) -> tuple[int, int, int]:
    """Of one replica's device: the layers' matrices, the embedding's and the output's, float32."""
    kinds = [kind for kind in parameters.kinds(model, mp) if kind.zero is not None]
    groups = (parameters.LAYERS, parameters.EMBEDDING, parameters.PROJECTION)
    layers, embedding, output = (
        4 * sum(math.prod(kind.local_shape(mp)) for kind in kinds if kind.module == group) for group in groups
    )
    return layers, embedding, output


@pytest.mark.parametrize(
    ("microbatches", "changes"),
    [
        (1, {}),
        (3, {"remat": "full"}),
        pytest.param(3, {}, marks=pytest.mark.long),
        pytest.param(1, {"version": 2, "early_collect": False}, marks=pytest.mark.long),
    ],
)
def test_stage_3_moves_three_times_the_weights_per_microbatch(microbatches: int, changes: dict[str, Any]) -> None:
    one = compiled(4, 2, 3, microbatches, **changes)
    found = collectives(one.program.as_text())
    kinds = {(one.kind, one.group_size) for one in found}
    assert kinds <= {("all-gather", 4), ("reduce-scatter", 4), ("all-reduce", 4), ("all-reduce", 2), ("all-reduce", 8)}
    layers, embedding, output = matrix_bytes(one.model, 2)
    # Layers and the output matrix are gathered forward and again backward; of the embedding no gradient needs values.
    assert moved(found, "all-gather", 4) == microbatches * (2 * layers + embedding + 2 * output)
    assert moved(found, "reduce-scatter", 4) == microbatches * (layers + embedding + output)
    vectors = 4 * sum(math.prod(k.local_shape(2)) for k in parameters.kinds(one.model, 2) if k.zero is None)
    assert vectors <= moved(found, "all-reduce", 4) < vectors + 256  # and a few scalars, once a step
    one_layer = microbatches * one.model.layers
    over_mp = [c for c in found if c.kind == "all-reduce" and c.group_size == 2 and "/hidden/" in c.source]
    scanned = [c for c in over_mp if "embedding_shard" not in c.source]
    assert sum(c.runs for c in scanned) == 2 * one_layer, "one reduction per layer each way"


def test_stage_1_moves_what_stage_0_does_once_a_step() -> None:
    none, one = (compiled(4, 2, stage, 3) for stage in (0, 1))
    matrices = sum(matrix_bytes(one.model, 2))
    found = collectives(one.program.as_text())
    assert moved(found, "reduce-scatter", 4) == matrices
    assert moved(found, "all-gather", 4) == matrices
    plain = collectives(none.program.as_text())
    assert moved(plain, "all-gather", 4) == moved(plain, "reduce-scatter", 4) == 0
    assert matrices < moved(plain, "all-reduce", 4) < 1.1 * matrices


def test_counting_takes_loops_into_account() -> None:
    def program(x: jax.Array) -> jax.Array:
        body = lambda total, row: (total + jax.lax.psum(row, "mp"), None)  # noqa: E731
        return jax.lax.scan(body, jnp.zeros(x.shape[1:]), x)[0]

    columns, whole = jax.sharding.PartitionSpec(None, "mp"), jax.sharding.PartitionSpec()
    mapped = jax.jit(jax.shard_map(program, mesh=mesh_of(1, 4), in_specs=columns, out_specs=whole))
    (found,) = collectives(mapped.lower(jnp.ones((7, 8))).compile().as_text())
    assert (found.kind, found.runs, found.bytes, found.group_size) == ("all-reduce", 7, 8, 4)


# Through device_train.py


@pytest.mark.parametrize("version", [1, pytest.param(2, marks=pytest.mark.long)])  # short: test_device_train_version2
def test_a_run_with_stage_3_stops_and_resumes_bit_for_bit(
    version: int, training_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"version": version, "zero_stage": 3, "d_head": 6 if version == 2 else None, "ckpt_format": "shards"}
    straight = Run(tmp_path / "straight", training_data, **keys)
    assert straight() == 0
    stopped = Run(tmp_path / "stopped", training_data, **keys)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        assert stopped() == 75
    assert stopped() == 0
    assert stopped.trace == straight.trace
    assert equal(stopped.tensors(6), straight.tensors(6))


def test_sixteen_shards(training_data: Path, tmp_path: Path) -> None:
    """More model-parallel parts than the 2021 library's eight; a process of its own, for its sixteen devices."""
    keys = {"n_heads": 16, "pe_rotary_dims": 2, "total_steps": 1}
    run = Run(tmp_path / "run", training_data, **keys, cores_per_replica=16)
    arguments = [*run.arguments(), "--devices", "16"]
    done = subprocess.run(
        [sys.executable, ROOT / "device_train.py", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mesh dp 1 x mp 16" in done.stderr
    assert len(list((tmp_path / "run").glob("**/step_1/shard_*"))) == 16
    alone = Run(tmp_path / "alone", training_data, **keys, cores_per_replica=1)
    assert alone("--devices", "1") == 0
    assert run.lines[0]["train/loss"] == pytest.approx(alone.lines[0]["train/loss"], rel=1e-5)
