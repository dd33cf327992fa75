"""Fine-tuning from a checkpoint of the 2021 library, trained on four shards, on other numbers of them."""

import numpy as np
import pytest
from checkpoint_tools import read_plain, without_fsync
from training_tools import Run
from weights_tools import GOLDEN, extract_golden, golden_config

from mesh_transformer.checkpoint import layout, streaming
from mesh_transformer.config import load_config
from mesh_transformer.data.records import RecordWriter
from mesh_transformer.optimizer import schedule

CASE = "v1_rotary_mp4_f32"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Records of the tokens that the 2021 library evaluated this checkpoint on, and the checkpoint's step folder."""
    folder = tmp_path_factory.mktemp("data")
    with (folder / "train.tfrecords").open("wb") as file:
        writer = RecordWriter(file)
        for tokens in np.load(GOLDEN / CASE / "eval.npz")["tokens"]:
            writer.write({"text": tokens})
    (folder / "train.index").write_text("train.tfrecords\n")
    extract_golden(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(data, tmp_path_factory):
    """Two steps of fine-tuning at a model-parallel size, with or without the moments; made once each."""
    done = {}

    def tune(mp, *flags):
        if (mp, *flags) not in done:
            keys = golden_config(CASE, cores_per_replica=mp, per_replica_batch=2, gradient_accumulation_steps=1)
            keys |= {"train_set": "train.index", "val_set": {}, "total_steps": 2, "compute_dtype": "float32"}
            keys |= {"warmup_steps": 1, "anneal_steps": 4}
            del keys["model_dir"], keys["name"]  # the run has its own
            run = Run(tmp_path_factory.mktemp(f"mp{mp}"), data, **keys)
            with pytest.MonkeyPatch.context() as patch:
                without_fsync(patch)
                assert run("--devices", str(mp), "--tune-model-path", f"{data}/step_8/", *flags) == 0
            done[mp, *flags] = run
        return done[mp, *flags]

    return tune


@pytest.mark.slow
@pytest.mark.parametrize("mp", [1, 2, 8])
def test_it_begins_at_the_librarys_losses_with_a_fresh_schedule(tuned, mp):
    run = tuned(mp)
    lines = run.lines
    golden = np.load(GOLDEN / CASE / "eval.npz")["loss"]
    assert lines[0]["train/cross_entropy"] == pytest.approx(golden.mean(), abs=2e-6)
    rate = schedule(load_config(run.keys).optim)
    assert [line["train/learning_rate"] for line in lines] == [0.0, float(rate(1))] and rate(1) > 0
    with streaming.open_weights(run.store.path(2)) as weights:
        assert weights.step == 2 and weights.shards == mp
        # The weights' own count and Adam's go on, the schedule's is of this run.
        assert dict(weights.counters) == {layout.COUNT: 10, layout.SCHEDULE_COUNT: 2, layout.STEP: 10}


@pytest.mark.slow
@pytest.mark.parametrize("mp", [2, 8])
def test_the_mesh_makes_no_difference(tuned, mp):
    """Parameters and moments after the second update, on any mesh."""
    one, other = tuned(1), tuned(mp)
    assert [line["train/loss"] for line in other.lines] == pytest.approx(
        [line["train/loss"] for line in one.lines], abs=1e-5
    )
    with streaming.open_weights(one.store.path(2)) as a, streaming.open_weights(other.store.path(2)) as b:
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            np.testing.assert_allclose(x.value, y.value, atol=2e-5, err_msg=x.leaf.label)


@pytest.mark.slow
def test_moments_of_the_checkpoint_count_unless_fresh_opt(tuned, data):
    """At rate 0 the first update leaves the weights; the moments afterwards show what they began with."""
    kept, fresh = tuned(1), tuned(1, "--fresh-opt")
    before = read_plain(data / "step_8", 0)
    with streaming.open_weights(kept.store.path(2)) as a, streaming.open_weights(fresh.store.path(2)) as b:
        assert b.counters[layout.COUNT] == 2 and b.counters[layout.STEP] == 10
        moment = streaming.tensor_leaves(a.model, 1, full=True)[0]  # of the embedding's bias, equal on all shards
        assert moment.section == layout.MU and moment.leaf.kind.combine.name == "SUM"
        mean, drawn = a.read(moment).value, b.read(moment).value
        assert np.abs(before[1]).max() > 0
        # mu = b1 mu + (1 - b1) g, twice with one g, since the weights and the batch are the same: b1^2 of it remains.
        np.testing.assert_allclose(mean - drawn, 0.81 * before[1], atol=1e-4 * np.abs(before[1]).max())
