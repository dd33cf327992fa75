"""Pods whose model-parallel part spans hosts, whose state is cut over them, and that write Orbax's layout."""

import numpy as np
import pytest
from conftest import network_of  # noqa: F401  starts the devices
from pod_tools import cluster_of
from test_pods import ORDER, back_to, losses
from training_tools import Run

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("uncached")]


@pytest.fixture(scope="module")
def quarters():
    """Four hosts of two devices: mp 4 spans two of them."""
    with cluster_of(4, 2) as made:
        yield made


@pytest.mark.parametrize(
    "keys",
    [{}, {"zero_stage": 1}, {"zero_stage": 3}, {"ckpt_format": "orbax"}, {"version": 2, "ckpt_format": "orbax"}],
    ids=str,
)
def test_the_numbers_and_the_checkpoints_are_those_of_one_process(quarters, training_data, tmp_path, keys):
    alone, pod = (Run(tmp_path / name, training_data, val_every=2, ckpt_every=2, **keys) for name in ("alone", "pod"))
    assert alone() == 0
    assert quarters.train(pod, hosts=4) == 0
    np.testing.assert_allclose(losses(pod), losses(alone), rtol=10 * ORDER)
    # Each goes on from the other's.
    for name, source in (("to-alone", pod), ("to-pod", alone)):
        run = Run(tmp_path / name, training_data, val_every=2, ckpt_every=2, **keys)
        back_to(4, source, run)
        assert (run() if name == "to-alone" else quarters.train(run, hosts=4)) == 0
        np.testing.assert_allclose(losses(run), losses(alone), rtol=10 * ORDER)
