"""Tiny networks with parameters that matter, and prompts, for tests of decoding."""

from __future__ import annotations

import functools
from contextlib import contextmanager

import jax
import numpy as np
from conftest import network_of

from mesh_transformer import parameters, steps
from mesh_transformer.state import TrainState

SEQ = 16
GREEDY = {"temp": 0}


@functools.lru_cache(maxsize=32)
def network(dp=1, mp=1, **changes):
    """The tiny network; its parameters come from numpy, since fresh ones have zero biases and equal scales.

    They are large enough for logits of size 1, and the same on every mesh.
    """
    net = network_of(dp, mp, **changes)
    random = np.random.default_rng(0)
    kinds = parameters.kinds(net.model, mp)
    values = [(kind, ((kind.init if not kind.random else 0) + 0.2 * random.normal(size=kind.shape))) for kind in kinds]
    tree = parameters.tree((kind, value.astype(np.float32)) for kind, value in values)
    placed = steps.place(net.mesh, parameters.specs(net.model, mp), tree)
    net.state = TrainState(placed, None, steps.place(net.mesh, jax.sharding.PartitionSpec(), np.int32(0)))
    return net


def right_aligned(prompts, width=SEQ):
    """context [B, width] and ctx_length [B]."""
    context = np.zeros((len(prompts), width), np.uint32)
    for row, prompt in zip(context, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return context, np.array([len(p) for p in prompts])


def generate(net, prompts, count, options=None, width=SEQ, **more):
    return net.generate(*right_aligned(prompts, width), count, options, **more)


@contextmanager
def compilations():
    """A list that grows by one with each executable that is built or fetched from the cache."""
    seen: list[str] = []
    active = True

    def listen(event, _duration, **_):
        if active and event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    # There is no public way to take one listener off again, so it falls silent.
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        active = False
