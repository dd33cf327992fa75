"""The model does not depend on the mesh: parameters, loss, gradients and updates agree on any (dp, mp) and any A."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import batch_of
from invariance_tools import ADAM_B1, SEQUENCES, compare, leaves, network, trained

# (dp, mp, A): every mesh, every A at least twice; the first is what the others are compared with.
CASES = [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 4), (2, 4, 2), (1, 8, 1), (8, 1, 2), (1, 1, 4), (2, 4, 1)]


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_same_seed_same_losses_gradients_and_updates(case: tuple[int, int, int]) -> None:
    compare(trained(*case), trained(*CASES[0]))


@pytest.mark.parametrize(("case", "reference"), [((1, 8, 1), (1, 1, 1)), ((2, 4, 2), (1, 1, 4))], ids=str)
def test_norms_of_small_batches_are_the_same_where_the_batches_are(
    case: tuple[int, int, int], reference: tuple[int, int, int]
) -> None:
    """dp * A small batches, however they are spread, are what the noise scale is made of; grad_norm sums over A."""
    for got, expected in zip(trained(*case)["metrics"], trained(*reference)["metrics"], strict=True):
        for key in ("noise_small_sq", "grad_norm_micro"):
            assert got[key] == pytest.approx(expected[key], rel=1e-4), key
        assert got["grad_norm"] / case[2] == pytest.approx(expected["grad_norm"] / reference[2], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"pe": "t5", "norm": "scalenorm"},
        {"pe": "fixed", "norm": "rmsnorm-bias"},
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ({"pe": "t5"}, {"pe": "fixed"}, {"norm": "rmsnorm-bias"}, {"norm": "scalenorm"})
        ),
    ],
    ids=str,
)
def test_other_positions_and_norms(settings: dict[str, str]) -> None:
    # With Adam's usual eps of 1e-8 the update of an entry whose gradient is about 1e-7 is the sign of rounding noise.
    changes = (*settings.items(), ("eps", 1e-4))
    compare(trained(2, 4, 1, changes), trained(1, 1, 1, changes))


def test_another_seed_gives_other_parameters() -> None:
    key = next(k for k in trained(*CASES[0])["initial"] if "'q'" in k)
    other = leaves(network(1, 1, 1, seed=2).state.params)[key]
    assert np.abs(trained(*CASES[0])["initial"][key] - other).max() > 0.1


def test_clipping_uses_the_norm_of_the_whole_gradient() -> None:
    results = {}
    for dp, mp in ((1, 1), (1, 4), (2, 4)):
        net = network(dp, mp, 1, max_grad_norm=0.05)
        rows = batch_of(1, SEQUENCES, net.model.seq)
        norm = float(net.train(rows)["grad_norm"])
        assert norm > 0.5, "well above the limit, or nothing is clipped"
        clipped = leaves(net.state.opt_state.mu)
        whole = np.sqrt(sum(np.square(x / (1 - ADAM_B1)).sum() for x in clipped.values()))
        assert whole == pytest.approx(0.05, rel=1e-4)
        results[dp, mp] = clipped
    for other in ((1, 4), (2, 4)):
        for key, value in results[1, 1].items():
            np.testing.assert_allclose(results[other][key], value, atol=1e-5 * np.abs(value).max(), err_msg=key)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_rematerialisation_changes_nothing(remat: str) -> None:
    case = trained(2, 4, 1, (("remat", remat),))
    compare(case, trained(2, 4, 1))
