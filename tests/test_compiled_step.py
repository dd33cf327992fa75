"""What XLA makes of the training step: collectives are counted, buffers are looked at, size against depth."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from conftest import batch_of, network_of

from mesh_transformer import steps, transformer_shard
from mesh_transformer.planning.program import collectives


def compiled(dp: int, mp: int, **changes: Any) -> Any:
    net = network_of(dp, mp, n_vocab=136, logit_chunk=8, per_replica_batch=3, **changes)
    batch = batch_of(1, 3 * dp, net.model.seq, vocab=136)
    placed = steps.place(
        net.mesh, steps.BATCH_SPEC, steps.Batch(batch["obs"], batch["target"], np.ones(batch["obs"].shape, np.float32))
    )
    return transformer_shard.train_step(net.model, net.config.optim, net.mesh).lower(net.state, placed).compile()


def all_reduces(text: str) -> tuple[Counter[str], int]:
    """All-reduces of a step: of the scanned layers, forward and backward, and of everything else."""
    found: Counter[str] = Counter()
    for one in collectives(text):
        layers = "/hidden/" in one.source and "embedding_shard" not in one.source
        found[("backward" if "transpose(" in one.source else "forward") if layers else "else"] += one.runs
    return found, found.pop("else")


@pytest.mark.parametrize(
    ("pe", "norm", "remat"),
    [
        ("rotary", "layernorm", "none"),
        ("rotary", "layernorm", "dots"),
        ("rotary", "layernorm", "full"),
        ("t5", "rmsnorm-bias", "full"),
        ("fixed", "layernorm-desync", "dots"),
    ],
)
def test_one_reduction_per_layer_forward_and_one_backward(pe: str, norm: str, remat: str) -> None:
    scanned, outside = all_reduces(compiled(1, 4, layers=3, pe=pe, norm=norm, remat=remat).as_text())
    assert scanned == {"forward": 3, "backward": 3}
    # embedding forward, output head backward, the gradient's norm and a microbatch's; and for each of the loss's six
    # chunks of positions the maximum and the sums
    assert outside <= 4 + 2 * 6


def test_one_device_has_no_collective() -> None:
    assert "all-reduce" not in compiled(1, 1).as_text()


def test_no_buffer_has_the_whole_vocabulary() -> None:
    dims = {d for shape in re.findall(r"\w+\[([\d,]+)\]", compiled(2, 4).as_text()) for d in shape.split(",")}
    assert "34" in dims, "a shard's part of the vocabulary is there"
    assert "136" not in dims
    whole = {d for shape in re.findall(r"\w+\[([\d,]+)\]", compiled(2, 1).as_text()) for d in shape.split(",")}
    assert "136" in whole, "the test can see a vocabulary axis"


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    # 48 positions on each replica, 136 / 4 vocabulary rows, chunks of 8
    text = compiled(2, 4).as_text()
    assert re.search(r"f32\[8,34\]", text)
    assert not re.search(r"f32\[48,34\]", text)


def test_the_program_does_not_grow_with_depth() -> None:
    shallow, deep = (len(compiled(1, 2, layers=n).as_text().splitlines()) for n in (2, 28))
    assert deep < 1.1 * shallow
