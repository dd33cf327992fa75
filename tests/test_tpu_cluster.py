"""`TPUCluster`, the 2021 library's class, on two hosts of this machine, beside the network of one process."""

import numpy as np
import pytest
from conftest import mesh_of, tokens_of
from training_tools import KEYS, S

from mesh_transformer import CausalTransformer, load_config
from mesh_transformer.cluster.cluster import TPUCluster
from mesh_transformer.errors import CheckpointError, ConfigError, DataError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uncached")]


def test_the_class_of_the_2021_library(tmp_path):
    """Train, eval, generate, save, load and move, as the network of one process does them."""
    keys = {"cores_per_replica": 1, "name": "n", "model_dir": "m"}
    config = load_config(KEYS | keys)
    network = CausalTransformer(config, mesh_of(2, 1))
    tokens, rows = tokens_of(2, 2, S + 1), tokens_of(4, S + 1, seed=1)
    with TPUCluster((2, 1), 2, config) as cluster:
        with pytest.raises(DataError, match=r"multiple of dp \(2\).*3 sequences cannot be split evenly"):  # T19
            cluster.train(tokens_of(2, 3, S + 1))
        for _ in range(2):
            found, wanted = cluster.train(tokens), network.train({"obs": tokens[..., :-1], "target": tokens[..., 1:]})
            np.testing.assert_allclose(found, [float(wanted["loss"]), float(wanted["last_loss"])], rtol=1e-5)
        mask = np.zeros((4, S))
        mask[:3, -2:] = 1
        pairs = {"obs": rows[:, :-1], "target": rows[:, 1:], "ctx_length": np.full(4, S)}
        out = {name: np.asarray(value) for name, value in network.eval(pairs).items()}
        assert cluster.eval(rows) == pytest.approx(float(out["loss"].mean()), rel=1e-5)
        counted = cluster.eval(pairs | {"eval_mask": mask})
        assert counted["total"] == 3 and len(counted["each_correct"]) == 4
        np.testing.assert_allclose(counted["mask_loss"], (out["all_loss"] * mask).sum(-1), rtol=1e-4)
        greedy = {"sampler_options": {"top_k": 1}}
        tokens_out = cluster.generate(rows[:2, :S], np.array([S, 5]), 4, **greedy)
        np.testing.assert_array_equal(
            tokens_out, network.generate(rows[:2, :S], np.array([S, 5]), 4, {"top_k": 1})["tokens"]
        )
        cluster.save(2, None, str(tmp_path / "m"), aux={"train_loader": {"used": []}, "more": 1}, init=True)
        with pytest.raises(CheckpointError, match="holds a run at step 2: pass overwrite=True"):
            cluster.save(2, None, str(tmp_path / "m"), init=True)
        before = cluster.train(tokens)
        step, aux = cluster.load(None, str(tmp_path / "m"))
        assert (step, aux["more"]) == (2, 1)
        assert cluster.train(tokens) == before
        cluster.move()
        assert cluster.eval(rows) > 0


def test_a_mesh_that_does_not_fit_is_refused_before_anything_starts():
    with (
        pytest.raises(ConfigError, match=r"mesh_shape \(3, 1\) on 2 hosts"),
        TPUCluster((3, 1), 2, KEYS | {"cores_per_replica": 1}),
    ):
        pass
