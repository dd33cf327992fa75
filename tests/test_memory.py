"""What the config's report says of activations, against what XLA plans for the compiled training step."""

import math

import jax
import numpy as np
import pytest
from conftest import network_of

from mesh_transformer import memory, optimizer, parameters, steps, transformer_shard
from mesh_transformer.state import TrainState

SIZES = {"layers": 6, "d_model": 128, "n_vocab": 512, "seq": 256, "pe_rotary_dims": 16, "per_replica_batch": 4}


def planned(mp, **changes):
    """Bytes that the compiled step takes besides its arguments and the gradient; and the network."""
    net = network_of(1, mp, **(SIZES | changes))
    kinds = parameters.kinds(net.model, mp)
    params = parameters.tree((kind, jax.ShapeDtypeStruct(kind.shape, np.float32)) for kind in kinds)
    state = TrainState(params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((), np.int32))
    shape = (1, net.config.mesh.per_replica_batch, net.model.seq)
    batch = steps.Batch(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in (np.int32, np.int32, np.float32)))
    step = transformer_shard.train_step(net.model, net.config.optim, net.mesh).lower(state, batch).compile()
    gradient = 4 * sum(math.prod(kind.local_shape(mp)) for kind in kinds)
    return step.memory_analysis().temp_size_in_bytes - gradient, net.model


@pytest.mark.slow
@pytest.mark.parametrize(("mp", "changes"), [
    (1, {"remat": "dots"}), (4, {"remat": "full"}),
    *(pytest.param(mp, changes, marks=pytest.mark.long) for mp, changes in [
        (1, {"remat": "full"}), (4, {"remat": "none"}), (1, {"remat": "dots", "pe": "t5"}),
        (1, {"remat": "full", "seq": 64}), (2, {"remat": "dots", "seq": 2048, "per_replica_batch": 1, "layers": 3}),
    ])
])  # fmt: skip
def test_activations_are_about_what_the_compiler_plans(mp, changes):
    found, model = planned(mp, **changes)
    tokens = changes.get("per_replica_batch", SIZES["per_replica_batch"]) * model.seq
    expected = memory.activation_bytes(model, mp, tokens, model.remat, 4)
    assert expected == pytest.approx(found, rel=0.25)
