"""Pods whose model-parallel part spans hosts, whose state is cut over them, and that write Orbax's layout; and one
mesh cut into one, two and four processes."""

import numpy as np
import pytest
from conftest import network_of  # noqa: F401  starts the devices
from pod_tools import cluster_of
from test_pods import ORDER, back_to, losses
from training_tools import Run, equal

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


# Hosts and devices of each. One mesh of four devices, cut into ever more processes.
CUTS = {"1 x 4": (1, 4), "2 x 2": (2, 2), "4 x 1": (4, 1)}


def train_as(cut, run, cluster):
    """`cut`: of CUTS, or "alone" for device_train.py itself; a second call goes on."""
    hosts, devices = CUTS.get(cut, (0, 0))
    assert (run() if cut == "alone" else cluster.train(run, hosts=hosts, devices=devices)) == 0


@pytest.mark.parametrize("mp", [1, 2, 4])
def test_the_same_mesh_in_one_two_and_four_processes(quarters, training_data, tmp_path, record_property, mp):
    """T18: as device_train.py on that mesh, to the bit in one process, whose sums stay in its memory; and each takes up
    the others' checkpoints."""
    keys = {"devices": 4, "cores_per_replica": mp, "val_every": 2, "ckpt_every": 2}
    runs = {}
    for cut in ("alone", *CUTS):
        runs[cut] = Run(tmp_path / cut.replace(" ", ""), training_data, **keys)
        train_as(cut, runs[cut], quarters)
    assert runs["1 x 4"].trace == runs["alone"].trace
    assert equal(runs["1 x 4"].tensors(6), runs["alone"].tensors(6))
    names = list(runs)
    for source, cut in zip(names, names[1:] + names[:1], strict=True):
        run = runs[f"{source}, then {cut}"] = Run(tmp_path / f"{source}-{cut}".replace(" ", ""), training_data, **keys)
        back_to(4, runs[source], run)
        train_as(cut, run, quarters)
    wanted = np.array(losses(runs["alone"]))
    apart = {
        name: float(np.max(np.abs(np.array(losses(run)) - wanted) / np.maximum(np.abs(wanted), 1e-30)))
        for name, run in runs.items()
    }
    record_property("apart", str({name: f"{value:.1e}" for name, value in apart.items()}))
    assert losses(runs["2 x 2"]) == losses(runs["4 x 1"]), "however many processes: the same, to the last bit"
    for name, value in apart.items():
        # Several processes add over devices by gloo, one in its own memory. The sum of two numbers has one order, that
        # of four has not.
        assert value <= (0 if mp == 2 else ORDER), (name, value)
