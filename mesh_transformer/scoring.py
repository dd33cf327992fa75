"""Log-probabilities of texts behind contexts that are read once: what evaluations of many continuations need.

Letters as in `decoding`, and: n continuations, T tokens of each. `context_step` reads contexts into caches; against
these, `score_step` scores any number of continuations of each, writing nothing. For log-probabilities at every position
of whole texts, without a context in common, use the network's `eval`: its `all_loss` are their negatives.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer import decoder_shard, decoding, parameters, steps
from mesh_transformer.collectives import copy_to_replicas
from mesh_transformer.config import ModelConfig
from mesh_transformer.mesh import DP, MP
from mesh_transformer.sampler import Leaf
from mesh_transformer.state import Params


class Contexts(NamedTuple):
    """`keys` and `values` [L, B, H, C, K] of positions 0 to C - 1 of B contexts."""

    keys: Leaf
    values: Leaf


class Continuations(NamedTuple):
    """n texts to score, n a multiple of dp; each behind the first `start` tokens of a context.

    int32: `row` [n], the context, counted among its replica's own; `start` [n], 0 to C, how many of the context's
    tokens are read; `tokens` [n, T], what follows them, `count` [n] of which count; `target` [n, T], the ids whose
    log-probabilities are asked for, each behind the token in its place.

    So a continuation c behind a context x of k tokens is start k - 1, tokens [x[k-1], c[0], ..., c[-2]], target c. No
    text may be longer than the model's `seq`.
    """

    row: Leaf
    start: Leaf
    tokens: Leaf
    count: Leaf
    target: Leaf


class Scores(NamedTuple):
    """[n, T], of which only the first `count` of a row mean anything: natural logarithms of the probabilities of the
    targets, float32, and whether each was the most probable (or one of equals), bool."""

    log_prob: Leaf
    greedy: Leaf


_CONTEXTS = Contexts(P(None, DP, MP), P(None, DP, MP))
_CONTINUATIONS = Continuations(*(P(DP),) * 5)


@functools.lru_cache(maxsize=8)
def context_step(model: ModelConfig, mesh: Mesh) -> Any:
    """The compiled `(params, tokens int32 [B, C]) -> Contexts`; B a multiple of dp, C at most `seq`.

    Shorter contexts are filled at the end with any ids: `start` says how much of each is read. Compiled once for each
    (B, C), which should be buckets (see `decoding.bucket`).
    """
    forward = decoder_shard.apply(model, mesh.shape[MP], "cached")
    specs = parameters.specs(model, mesh.shape[MP])

    def read(params: Params, tokens: jax.Array) -> Contexts:
        _, keys, values = forward(copy_to_replicas(params), tokens)
        return Contexts(keys, values)

    mapped = jax.shard_map(
        read, mesh=mesh, in_specs=steps.live(mesh, (specs, P(DP))), out_specs=steps.live(mesh, _CONTEXTS)
    )
    return jax.jit(
        lambda params, tokens: mapped(decoding.narrow(params, model, mesh.shape[MP]), tokens),
        in_shardings=steps.shardings(mesh, (specs, P(DP))),
        out_shardings=steps.shardings(mesh, _CONTEXTS),
    )


@functools.lru_cache(maxsize=8)
def score_step(model: ModelConfig, mesh: Mesh) -> Any:
    """The compiled `(params, Contexts, Continuations) -> Scores`, whole on every process.

    Logits exist for `logit_chunk` positions at a time. The contexts are not changed, and serve any number of calls.
    Compiled once for each (B, C, n, T).
    """
    forward = decoder_shard.apply(model, mesh.shape[MP], "score")
    specs = parameters.specs(model, mesh.shape[MP])

    def score(params: Params, contexts: Contexts, texts: Continuations) -> Scores:
        losses = forward(
            copy_to_replicas(params), contexts.keys, contexts.values, texts.row, texts.tokens, texts.start,
            texts.count, texts.target,
        )  # fmt: skip
        return Scores(-losses.cross_entropy, losses.correct > 0)

    in_specs = (specs, _CONTEXTS, _CONTINUATIONS)
    mapped = jax.shard_map(
        score, mesh=mesh, in_specs=steps.live(mesh, in_specs), out_specs=steps.live(mesh, Scores(P(DP), P(DP)))
    )
    return jax.jit(
        lambda params, *arguments: mapped(decoding.narrow(params, model, mesh.shape[MP]), *arguments),
        in_shardings=steps.shardings(mesh, in_specs),
        out_shardings=NamedSharding(mesh, P()),
    )


def place(mesh: Mesh, texts: Continuations) -> Continuations:
    """Host arrays, whole on every process, as `score_step` takes them."""
    placed: Continuations = steps.place(mesh, _CONTINUATIONS, texts)
    return placed
