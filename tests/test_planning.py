"""Plans: names of slices, what a program's text says, and what is refused in a line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from training_tools import ROOT

from mesh_transformer.errors import ConfigError
from mesh_transformer.planning import chips, exact
from mesh_transformer.planning.program import collectives, product_flops
from scripts import plan


@pytest.mark.parametrize(
    ("name", "xla", "devices"),
    [
        ("v3-8", "v3:2x2", 8), ("v4-8", "v4:2x2x1", 4), ("v4-32", "v4:2x2x4", 16), ("v5e-16", "v5e:4x4", 16),
        ("v5litepod-16", "v5e:4x4", 16), ("v5e:4x8", "v5e:4x8", 32), ("gpu:h100x8", "h100:8", 8), ("cpu:8", "cpu:8", 8),
    ],
)  # fmt: skip
def test_slices_by_the_names_people_use(name: str, xla: str, devices: int) -> None:
    found = chips.topology(name)
    assert (found.name, found.devices) == (xla, devices)


@pytest.mark.parametrize(
    ("name", "words"),
    [("v9-8", "is not known"), ("v4-9", "powers of two"), ("v4:2x2", "linked in 3 dimensions"), ("h100x", "not known")],
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


def test_what_cannot_be_planned_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = ["--config", str(ROOT / "configs" / "quickstart.json")]
    assert plan.main([*config, "--topology", "gpu:h100x8"]) == 2
    assert "only steps for TPU slices" in capsys.readouterr().err
    monkeypatch.setattr(exact, "library", lambda: None)
    assert plan.main([*config, "--topology", "v5e:2x4"]) == 2
    assert "pip install 'mesh-transformer[plan]'" in capsys.readouterr().err
