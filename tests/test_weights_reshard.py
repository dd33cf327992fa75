"""Re-sharding: any number of shards in, any out, against the 2021 layout written out by hand."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from checkpoint_tools import read_plain, without_fsync, write_2021
from conftest import network_of, tokens_of
from weights_tools import (
    GOLDEN,
    VALUES,
    assert_same_arrays,
    config_file,
    extract_golden,
    golden_config,
    model_of,
    state_of,
)

from mesh_transformer import load_config
from mesh_transformer.checkpoint import convert, inventory, layout, streaming
from mesh_transformer.checkpoint.casting import FLOAT_TYPES
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config_groups import NORMS, POSITIONS
from mesh_transformer.parameters import Combine
from scripts import reshard

COUNTS = (1, 2, 4, 8, 16)
GRID = [(m, n, values) for values in VALUES for m in COUNTS for n in COUNTS]
SHORT = [(8, 1, "trained"), (1, 16, "trained"), (4, 2, "fresh"), (2, 8, "equal"), (16, 4, "zeros"), (4, 4, "trained")]
WIDE = {"layers": 2, "n_heads": 16, "d_model": 32, "pe_rotary_dims": 2}


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch):
    without_fsync(monkeypatch)


def long_form(grid, short):
    return [case if case in short else pytest.param(*case, marks=pytest.mark.long) for case in grid]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(config, step folder as the 2021 library would have written it) of values on so many shards; made once each."""
    config = load_config(config_file(tmp_path_factory.mktemp("config"), **WIDE))
    made = {}

    def write(values, shards):
        if (values, shards) not in made:
            made[values, shards] = tmp_path_factory.mktemp(f"{values}{shards}") / "step_9"
            write_2021(made[values, shards], config.model, state_of(config.model, values), shards)
        return config, made[values, shards]

    return write


@pytest.mark.parametrize(("m", "n", "values"), long_form(GRID, SHORT))
def test_every_pair_and_back(published, tmp_path, m, n, values):
    """The new files are those that the 2021 library would have written on that many shards, moments included."""
    (config, source), (_, expected) = published(values, m), published(values, n)
    there = convert.reshard(source, tmp_path / "out", n, config=config)
    assert_same_arrays(there.path, expected, n)
    back = convert.reshard(tmp_path / "out", tmp_path / "back", m, config=config)
    assert_same_arrays(back.path, source, m)
    shutil.rmtree(tmp_path)  # a hundred of them would lie about


NORM_GRID = [(norm, pe) for norm in NORMS for pe in POSITIONS]


@pytest.mark.parametrize(
    ("norm", "pe"), long_form(NORM_GRID, [("layernorm-nobias", "t5"), ("rmsnorm-bias", "fixed"), ("scalenorm", "t5")])
)
def test_every_kind_of_model(tmp_path, norm, pe):
    config = load_config(config_file(tmp_path, **WIDE, norm=norm, pe=pe, cores_per_replica=4))
    shards = 4 if norm == "layernorm-desync" else 2
    state = state_of(load_config(config_file(tmp_path, norm=norm, pe=pe, **WIDE)).model, "trained")
    if norm == "layernorm-desync":
        state = state._replace(params=_desync(state.params, 4), opt_state=None)
    write_2021(tmp_path / "in", config.model, state, 4)
    write_2021(tmp_path / "expected", config.model, state, shards)
    done = convert.reshard(tmp_path / "in", tmp_path / "out", shards, config=config)
    assert_same_arrays(done.path, tmp_path / "expected", shards)


def _desync(params, shards):
    """Norms of one shard as norms of so many, all different."""
    factors = np.arange(1, shards + 1, dtype=np.float32)
    spread = {}
    for module, group in params.items():
        spread[module] = {
            name: np.concatenate([array * f for f in factors], axis=-2) if name.startswith("norm_") else array
            for name, array in group.items()
        }
    return spread


def test_only_shard_0s_norms_and_the_sum_of_biases_count(tmp_path):
    """The 2021 library left norms on other shards as they were initialised; unequal biases still add up."""
    config = load_config(config_file(tmp_path))
    state = state_of(config.model, "trained")
    write_2021(tmp_path / "in" / "step_9", config.model, state, 2)
    leaves = layout.state_leaves(config.model, 2, full=True)
    arrays = [read_plain(tmp_path / "in" / "step_9", shard) for shard in range(2)]
    for number, leaf in enumerate(leaves):
        if leaf.leaf is None or leaf.moment:
            continue
        if leaf.leaf.kind.combine is Combine.FIRST:
            arrays[1][number] = np.full_like(arrays[1][number], 7)
        elif leaf.leaf.kind.combine is Combine.SUM:
            arrays[0][number], arrays[1][number] = arrays[0][number] + 0.5, arrays[1][number] - 0.5
    _save(tmp_path / "in" / "step_9", arrays)
    with streaming.open_weights(tmp_path / "in" / "step_9", config.model) as weights:
        for tensor in weights.tensors():
            kind, layer = tensor.leaf.leaf.kind, tensor.leaf.leaf.layer
            trees = {layout.PARAMS: state.params, layout.MU: state.opt_state.mu, layout.NU: state.opt_state.nu}
            whole = trees[tensor.leaf.section][kind.module][kind.name]
            np.testing.assert_allclose(tensor.value, whole if layer is None else whole[layer], atol=1e-6)


def _save(folder, arrays):
    for shard, leaves in enumerate(arrays):
        for file, numbers in enumerate(np.array_split(np.arange(len(leaves)), 16)):
            np.savez(folder / f"shard_{shard}" / f"{file}.npz", *[leaves[i] for i in numbers])


GOLDEN_SLIM = sorted(GOLDEN.glob("v1_*/slim_step_*"))


@pytest.mark.parametrize(
    "step", [*GOLDEN_SLIM, "full"], ids=lambda path: getattr(path, "parent", path).name if path != "full" else path
)
def test_golden_steps_are_written_back_byte_for_byte(tmp_path, step):
    """Every array of every shard, except the norms' copies on shards 1 and up, where shard 0's is written."""
    if step == "full":
        step, case = extract_golden(tmp_path), "v1_rotary_mp4_f32"
    else:
        case = step.parent.name
    config = load_config(golden_config(case))
    shards = config.mesh.cores_per_replica
    done = convert.reshard(step, tmp_path / "out", shards, config=config)
    found = inventory.take(step)
    leaves = layout.state_leaves(config.model, shards, found.full)
    first = read_plain(step, 0)
    for shard in range(shards):
        arrays = zip(leaves, read_plain(step, shard), read_plain(done.path, shard), first, strict=True)
        for leaf, old, new, of_shard_0 in arrays:
            copied = leaf.leaf is not None and leaf.leaf.kind.combine is Combine.FIRST
            old = of_shard_0 if copied else old
            assert (old.dtype, old.shape, old.tobytes()) == (new.dtype, new.shape, new.tobytes()), leaf.label


@pytest.mark.slow
def test_training_goes_on_after_resharding_as_if_nothing_had_happened(tmp_path):
    """Three steps at mp 2, re-sharded, three more at mp 1 and 4: the moments of summed biases are not multiplied."""
    batches = [{k: tokens_of(1, 2, 16, seed=10 * i + j) for j, k in enumerate(("obs", "target"))} for i in range(6)]
    straight = network_of(1, 2, per_replica_batch=2)
    for batch in batches[:3]:
        straight.train(batch)
    straight.write_ckpt(tmp_path / "step_3")
    expected = [float(straight.train(batch)["loss"]) for batch in batches[3:]]
    for shards in (1, 4):
        assert reshard.main([str(tmp_path / "step_3"), str(tmp_path / f"to_{shards}"), "--shards", str(shards)]) == 0
        network = network_of(1, shards, per_replica_batch=2)
        network.load_ckpt(tmp_path / f"to_{shards}" / "step_3")
        losses = [float(network.train(batch)["loss"]) for batch in batches[3:]]
        np.testing.assert_allclose(losses, expected, atol=1e-5)


def test_the_new_folder_is_complete_and_says_where_it_comes_from(tmp_path, capsys):
    config_path = config_file(tmp_path)
    config = load_config(config_path)
    write_2021(tmp_path / "in" / "step_20", config.model, state_of(config.model, "trained"), 2)
    aux = {"train_loader": {"used": ["a.tfrecords"], "file_idx": 3}}
    meta = (
        '{"step": 20, "checkpoints": [20], "aux": {"20": {"train_loader": {"used": ["a.tfrecords"], "file_idx": 3}}}}'
    )
    (tmp_path / "in" / "meta.json").write_text(meta)
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), "--shards", "4", "--config", config_path]
    assert reshard.main(arguments) == 0
    assert "step_20: " in capsys.readouterr().out
    store = CheckpointStore(tmp_path / "out")
    assert store.steps() == [20] and store.aux(20) == aux
    assert '"file_idx": 3' in (tmp_path / "out" / "meta.json").read_text()
    with streaming.open_weights(tmp_path / "out") as weights:
        # Its folder's number is the run's step; the weights' own count of updates is another thing.
        assert weights.step == 20 and weights.counters[layout.STEP] == 9
        assert weights.known and weights.model.n_heads == config.model.n_heads
    assert reshard.main(arguments) == 2
    assert "is already there" in capsys.readouterr().err
    assert reshard.main([str(tmp_path / "out"), str(tmp_path / "again" / "step_20"), "--shards", "1"]) == 0
    assert CheckpointStore(tmp_path / "again").steps() == [20]
    assert reshard.main([str(tmp_path / "out"), str(tmp_path / "step_7"), "--shards", "1"]) == 2
    assert "the weights are of step 20" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bf16", "f16", "f32"])
def test_dtype_changes_every_parameter_and_no_moment(tmp_path, name):
    config = load_config(config_file(tmp_path))
    state, dtype = state_of(config.model, "trained"), FLOAT_TYPES[name]
    write_2021(tmp_path / "in", config.model, state, 2)
    write_2021(tmp_path / "expected", config.model, state, 2, dtype)
    done = convert.reshard(tmp_path / "in", tmp_path / "out", 2, dtype, config)
    for shard in range(2):
        leaves = layout.state_leaves(config.model, 2, full=True)
        for leaf, new, expected in zip(
            leaves, read_plain(done.path, shard), read_plain(tmp_path / "expected", shard), strict=True
        ):
            # A bias is cast whole and then divided, by a power of two: the same bits.
            assert new.dtype == expected.dtype and new.tobytes() == expected.tobytes(), leaf.label


def test_sums_are_taken_in_float32_and_cast_once(tmp_path):
    """Eight bf16 biases of which seven are lost if they are added up in bf16."""
    config = load_config(config_file(tmp_path))
    state = state_of(config.model, "zeros")._replace(opt_state=None)
    write_2021(tmp_path / "in", config.model, state, 8, ml_dtypes.bfloat16)
    arrays = [read_plain(tmp_path / "in", shard) for shard in range(8)]
    leaves = layout.state_leaves(config.model, 8, full=False)
    for number, leaf in enumerate(leaves):
        if leaf.leaf is not None and leaf.leaf.kind.combine is Combine.SUM:
            for shard in range(8):
                arrays[shard][number] = np.full_like(arrays[shard][number], 1 if shard == 0 else 2**-9)
    _save(tmp_path / "in", [[a.view("V2") if a.dtype.itemsize == 2 else a for a in leaves] for leaves in arrays])
    done = convert.reshard(tmp_path / "in", tmp_path / "out", 1, config=config)
    for leaf, array in zip(leaves, read_plain(done.path, 0), strict=True):
        if leaf.leaf is not None and leaf.leaf.kind.combine is Combine.SUM:
            assert float(array[0]) == float(ml_dtypes.bfloat16(1 + 7 * 2**-9)) == 1.015625


def test_a_bias_too_small_to_be_divided_stays_whole_in_sixteen_bits(tmp_path):
    """An eighth of float16's smallest value is 0, and the sum of eight zeros would be 0."""
    config = load_config(config_file(tmp_path))
    state = state_of(config.model, "zeros")._replace(opt_state=None)
    state.params["causal_transformer_shard/~/transformer_layer_shard"]["b2"][:] = 2**-24
    write_2021(tmp_path / "in", config.model, state, 1)
    done = convert.reshard(tmp_path / "in", tmp_path / "out", 8, FLOAT_TYPES["f16"], config)
    with streaming.open_weights(done.path) as weights:
        (bias,) = [t.value for t in weights.tensors() if t.leaf.label.endswith("layer_0/~/linear_5/b")]
    assert (bias == np.float32(2**-24)).all()


def test_every_spelling_of_a_path_opens_the_same(tmp_path):
    write_2021(tmp_path / "step_9", model_of(), state_of(model_of(), "trained"), 2)
    for path in (f"{tmp_path}/step_9", f"{tmp_path}/step_9/", f"file://{tmp_path}/step_9/", tmp_path / "step_9"):
        with streaming.open_weights(path, model_of()) as weights:
            assert weights.step == 9 and weights.path == f"{tmp_path}/step_9"


def test_a_version_2_config_is_refused(published, tmp_path, capsys):
    _, source = published("trained", 2)
    command = [str(source), str(tmp_path / "out"), "--shards", "1", "--config", config_file(tmp_path, **WIDE)]
    assert reshard.main([*command, "--version", "2"]) == 2
    assert "version 2" in capsys.readouterr().err
    assert reshard.main([*command, "--version", "1"]) == 0
