"""Log-probabilities of texts behind contexts that are read once: what evaluations of many continuations need.

Letters as in `decoding`, and: n continuations, T tokens of each. `context_step` reads contexts into caches; against
these, `score_step` scores any number of continuations of each, writing nothing. For log-probabilities at every position
of whole texts, without a context in common, use the network's `eval`: its `all_loss` are their negatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer import decoder_shard, decoder_weights, steps
from mesh_transformer.collectives import copy_to_replicas
from mesh_transformer.config import ModelConfig
from mesh_transformer.decoder_weights import Weights, cache_spec
from mesh_transformer.mesh import DP, MP
from mesh_transformer.sampler import Leaf
from mesh_transformer.sampling import LogProbs, log_probs


class Contexts(NamedTuple):
    """`keys` and `values`, [B, H, C, K] of each layer, of positions 0 to C - 1 of B contexts."""

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


_CONTINUATIONS = Continuations(*(P(DP),) * 5)


@functools.lru_cache(maxsize=8)
def context_step(model: ModelConfig, mesh: Mesh) -> Any:
    """The compiled `(weights, tokens int32 [B, C]) -> Contexts`; B a multiple of dp, C at most `seq`.

    Shorter contexts are filled at the end with any ids: `start` says how much of each is read. Compiled once for each
    (B, C), which should be buckets (see `decoding.bucket`).
    """
    forward = decoder_shard.apply(model, mesh.shape[MP], "cached")

    def read(weights: Weights, tokens: jax.Array) -> Contexts:
        _, keys, values = forward(copy_to_replicas(weights), tokens)
        return Contexts(keys, values)

    in_specs, out_specs = (_specs(model, mesh), P(DP)), Contexts(*(cache_spec(mesh),) * 2)
    return _compiled(read, model, mesh, in_specs, out_specs, steps.shardings(mesh, out_specs))


@functools.lru_cache(maxsize=8)
def score_step(model: ModelConfig, mesh: Mesh) -> Any:
    """The compiled `(weights, Contexts, Continuations) -> Scores`, whole on every process.

    Logits exist for `logit_chunk` positions at a time. The contexts are not changed, and serve any number of calls.
    Compiled once for each (B, C, n, T).
    """
    forward = decoder_shard.apply(model, mesh.shape[MP], "score")

    def score(weights: Weights, contexts: Contexts, texts: Continuations) -> Scores:
        losses = forward(
            copy_to_replicas(weights), contexts.keys, contexts.values, texts.row, texts.tokens, texts.start,
            texts.count, texts.target,
        )  # fmt: skip
        return Scores(-losses.cross_entropy, losses.correct > 0)

    contexts = Contexts(*(cache_spec(mesh),) * 2)
    in_specs = (_specs(model, mesh), contexts, _CONTINUATIONS)
    return _compiled(score, model, mesh, in_specs, Scores(P(DP), P(DP)), NamedSharding(mesh, P()))


@functools.lru_cache(maxsize=8)
def listed_step(model: ModelConfig, mesh: Mesh, most: int, window: str = "full") -> Any:
    """The compiled `(weights, Contexts, Continuations, n_tokens []) -> LogProbs`, whole on every process: as
    `score_step`, of each target [n, T] (as `drawn`) and of the `most` most probable ids in its place, [n, T, most],
    none of them at or above `n_tokens`.
    """
    forward = decoder_shard.apply(model, mesh.shape[MP], "behind", window)

    def listed(weights: Weights, contexts: Contexts, texts: Continuations, n_tokens: jax.Array) -> LogProbs:
        logits = forward(
            copy_to_replicas(weights), contexts.keys, contexts.values, texts.row, texts.tokens, texts.start, texts.count
        )
        asked = jnp.full_like(texts.target, most).reshape(-1)
        found = log_probs(logits, texts.target.reshape(-1), asked, most, n_tokens)
        return LogProbs(*(x.reshape(*texts.target.shape, *x.shape[1:]) for x in found))

    contexts = Contexts(*(cache_spec(mesh),) * 2)
    in_specs = (decoder_weights.specs(model, mesh), contexts, _CONTINUATIONS, P())
    placed = NamedSharding(mesh, P())
    return _compiled(listed, model, mesh, in_specs, LogProbs(*(P(DP),) * 3), placed, whole_matrices=False)


def _specs(model: ModelConfig, mesh: Mesh) -> Weights:
    """An evaluation reads many rows at once, so its matrices are whole."""
    return decoder_weights.specs(model, mesh, whole_matrices=True)


def _compiled(
    function: Callable[..., Any],
    model: ModelConfig,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    placed: Any,
    whole_matrices: bool = True,
) -> Any:
    """Takes parameters, and makes views of their layers at each call; or weights of this kind, as they are."""
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=steps.live(mesh, in_specs), out_specs=steps.live(mesh, out_specs)
    )
    run = jax.jit(mapped, in_shardings=steps.shardings(mesh, in_specs), out_shardings=placed)
    return lambda params, *arguments: run(decoder_weights.weights(model, mesh, params, whole_matrices), *arguments)


def place(mesh: Mesh, texts: Continuations) -> Continuations:
    """Host arrays, whole on every process, as `score_step` takes them."""
    placed: Continuations = steps.place(mesh, _CONTINUATIONS, texts)
    return placed
