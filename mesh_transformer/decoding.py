"""The state that decoding carries, prefill of whole prompts, and the token loop on the devices.

Letters: B rows of all replicas, T length of the prompts' bucket, C slots of the cache, N tokens of a chunk, V
vocabulary, k listed log-probabilities. `decoder_shard` tells how the cache works, `batching` how rows join and leave a
batch that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer import decoder_shard, decoder_weights, sampling, steps
from mesh_transformer.collectives import copy_to_replicas, sum_over_replicas
from mesh_transformer.config import ModelConfig
from mesh_transformer.decoder_weights import Weights, cache_spec, each_layer, weights
from mesh_transformer.mesh import DP, MP
from mesh_transformer.sampler import NO_LOGPROBS, PLAIN, Bias, Leaf, Mode, Penalties, Sampler
from mesh_transformer.sampling import History, LogProbs

CHUNK = 32  # tokens that one call of the token loop can return; fewer are asked for without another compilation

# What has become of a row: it draws; it ended with a stop id; at its limit; it holds no text that may draw (nothing, or
# a prompt that is not whole yet); its logits were not finite.
RUNNING, STOPPED, FULL, IDLE, BROKEN = range(5)


class Rows(NamedTuple):
    """Everything that decoding carries from token to token; one entry for each row.

    `keys` and `values` [B, H, C, K] of each layer, in the compute dtype (see `decoder_weights`); int32 [B]: `token`,
    the newest, whose key is not in the cache yet, `position`, where it goes, `drawn`, the tokens drawn so far, `limit`,
    when to stop drawing, `status`; `stop` int32 [B, n], ids that end a row (-1 never does); `sampler`, how tokens are
    drawn; `history`, what penalties look at (None where the mode has none).
    """

    keys: Leaf
    values: Leaf
    token: Leaf
    position: Leaf
    drawn: Leaf
    limit: Leaf
    status: Leaf
    stop: Leaf
    sampler: Sampler
    history: History | None


class Prompts(NamedTuple):
    """What prefill starts from: `tokens` int32 [B, T], padded at the end, `length` int32 [B], at least 1, and the
    `limit`, `stop` and `sampler` of `Rows`. A row with limit 0 is filler."""

    tokens: Leaf
    length: Leaf
    limit: Leaf
    stop: Leaf
    sampler: Sampler


class Drawn(NamedTuple):
    """Tokens int32 [B, N] (those of a row's `counts` int32 [B] are its own, the rest is padding), the rows' `status`,
    the steps that the loop took, int32 []; and, or None: the logits float32 [B, N, V] that the tokens were drawn from,
    before bias, penalties and filters, and `logprobs`, as in `sampling` with an axis N behind B.

    On every process whole.
    """

    tokens: Leaf
    counts: Leaf
    status: Leaf
    steps: Leaf
    logits: Leaf | None
    logprobs: LogProbs | None


_ROW = P(DP)


def sampler_spec(mode: Mode) -> Sampler:
    """Placement of a sampler."""
    return Sampler(
        *(_ROW,) * 5,
        penalties=Penalties(_ROW, _ROW, _ROW) if mode.penalties else None,
        bias=Bias(_ROW, _ROW) if mode.bias else None,
        logprobs=_ROW if mode.logprobs > NO_LOGPROBS else None,
    )


def rows_spec(mesh: Mesh, mode: Mode) -> Rows:
    """Placement of rows: the cache by sequences over dp and by heads over mp, everything else by rows over dp."""
    history = History(_ROW, _ROW) if mode.penalties else None
    cache = cache_spec(mesh)
    return Rows(cache, cache, *(_ROW,) * 6, sampler_spec(mode), history)


def prompts_spec(mode: Mode) -> Prompts:
    """Placement of prompts."""
    return Prompts(_ROW, _ROW, _ROW, _ROW, sampler_spec(mode))


def _drawn_spec(mode: Mode) -> Drawn:
    logprobs = LogProbs(_ROW, _ROW, _ROW) if mode.logprobs > NO_LOGPROBS else None
    return Drawn(_ROW, _ROW, _ROW, P(), _ROW if mode.logits else None, logprobs)


def cache_bucket(length: int, most: int) -> int:
    """As `bucket`, with one and a half times each power of two in between: attention reads every slot."""
    size = bucket(length, most)
    return size * 3 // 4 if size < most and size > 16 and length <= size * 3 // 4 else size


def bucket(length: int, most: int, least: int = 16) -> int:
    """The smallest of `least`, 2 `least`, 4 `least`, ... that holds `length`, and `most` at most."""
    size = least
    while size < min(length, most):
        size *= 2
    return min(size, most)


def draw(rows: Rows, logits_BV: jax.Array, n_tokens: jax.Array, mode: Mode) -> tuple[Rows, Drawn]:
    """The next token of every row that runs, whether it ends there, and the token as the only one of a `Drawn`.

    The cache and the position of the rows are not looked at.
    """
    adjusted_BV = sampling.adjust(logits_BV, rows.sampler, rows.history)
    token = sampling.choose(adjusted_BV, rows.sampler, rows.drawn, n_tokens, mode.order)
    running = rows.status == RUNNING
    one = running.astype(jnp.int32)
    drawn = rows.drawn + one
    hit = jnp.any(token[:, None] == rows.stop, axis=1)
    status = jnp.where(hit, STOPPED, jnp.where(drawn >= rows.limit, FULL, RUNNING))
    # A maximum may pass over NaN, a sum does not.
    status = jnp.where(jnp.isfinite(jnp.sum(logits_BV, axis=-1)), status, BROKEN)
    history = rows.history
    if history is not None:
        each = jnp.arange(len(token), dtype=jnp.int32)
        history = history._replace(drawn=history.drawn.at[each, token].add(one))
    logprobs = None
    if rows.sampler.logprobs is not None:
        found = sampling.log_probs(logits_BV, token, rows.sampler.logprobs, mode.logprobs, n_tokens)
        logprobs = LogProbs(*(x[:, None] for x in found))
    rows = rows._replace(
        token=jnp.where(running, token, rows.token), drawn=drawn, status=jnp.where(running, status, rows.status),
        history=history,
    )  # fmt: skip
    kept = logits_BV[:, None] if mode.logits else None
    return rows, Drawn(rows.token[:, None], one, rows.status, jnp.int32(0), kept, logprobs)


@functools.lru_cache(maxsize=64)
def prefill_step(model: ModelConfig, mesh: Mesh, slots: int, mode: Mode = PLAIN) -> Any:
    """The compiled `(weights, Prompts, n_tokens []) -> (Rows, Drawn)`: a cache of `slots` slots and one token a row.

    T is at most `slots` and the window. `n_tokens`: ids from there on are never drawn. Compiled once for each (B, T);
    raises nothing.
    """
    forward = decoder_shard.apply(model, mesh.shape[MP], "prefill")

    def prefill(weights: Weights, prompts: Prompts, n_tokens: jax.Array) -> tuple[Rows, Drawn]:
        logits, keys, values = forward(copy_to_replicas(weights), prompts.tokens, prompts.length)
        padding = ((0, 0), (0, 0), (0, slots - prompts.tokens.shape[1]), (0, 0))
        keys, values = (each_layer(lambda x: jnp.pad(x, padding), cache) for cache in (keys, values))
        zero = jnp.zeros_like(prompts.length)
        history = None
        if mode.penalties:
            within = jnp.arange(prompts.tokens.shape[1], dtype=jnp.int32)[None, :] < prompts.length[:, None]
            history = read(empty_history(zero, model.n_vocab), prompts.tokens, within)
        rows = Rows(
            keys, values, zero, prompts.length, zero, prompts.limit,
            jnp.where(prompts.limit > 0, RUNNING, FULL), prompts.stop, prompts.sampler, history,
        )  # fmt: skip
        return draw(rows, logits, n_tokens, mode)

    return compiled(prefill, model, mesh, (prompts_spec(mode), P()), mode, donate=())


def empty_history(like_B: jax.Array, vocabulary: int) -> History:
    """Nothing read and nothing drawn, for as many rows as `like_B`, typed as varying like it."""
    nothing = jnp.broadcast_to(jnp.zeros_like(like_B)[:, None], (len(like_B), vocabulary))
    return History(nothing > 0, nothing)


def read(history: History, tokens_BT: jax.Array, within_BT: jax.Array) -> History:
    """`history` with these tokens, where `within_BT`, as part of the rows' prompts."""
    each = jnp.arange(len(tokens_BT), dtype=jnp.int32)[:, None]
    beyond = history.prompt.shape[1]
    ids = jnp.where(within_BT, tokens_BT, beyond)
    return history._replace(prompt=history.prompt.at[each, ids].set(True, mode="drop"))


@functools.lru_cache(maxsize=64)
def decode_steps(model: ModelConfig, mesh: Mesh, mode: Mode = PLAIN) -> Any:
    """The compiled `(weights, Rows, count [], n_tokens []) -> (Rows, Drawn)`: `count` (at most CHUNK) tokens a row.

    The loop runs on the devices and ends early when no row of any replica runs. The rows passed in are donated.
    Compiled once for each (B, C).
    """
    forward = decoder_shard.apply(model, mesh.shape[MP], "step", mode.window)

    def decode(weights: Weights, rows: Rows, count: jax.Array, n_tokens: jax.Array) -> tuple[Rows, Drawn]:
        weights = copy_to_replicas(weights)
        before = rows.drawn

        def any_running(rows: Rows) -> jax.Array:
            # Summed over replicas, so that all of them take the same number of steps.
            return sum_over_replicas(jnp.sum(rows.status == RUNNING)) > 0

        def go_on(carry: Any) -> jax.Array:
            return (carry[0] < count) & carry[1]

        def step(carry: Any) -> Any:
            i, _, rows, kept = carry
            logits_bV, keys, values = forward(weights, rows.keys, rows.values, rows.token, rows.position)
            running = (rows.status == RUNNING).astype(jnp.int32)
            rows = rows._replace(keys=keys, values=values, position=rows.position + running)
            rows, drawn = draw(rows, logits_bV, n_tokens, mode)
            put = lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new, i, axis=1)  # noqa: E731
            return i + 1, any_running(rows), rows, jax.tree.map(put, kept, _kept(drawn))

        start = (jnp.int32(0), any_running(rows), rows, _room(rows, model.n_vocab, mode))
        taken, _, rows, (tokens, logits, logprobs) = lax.while_loop(go_on, step, start)
        return rows, Drawn(tokens, rows.drawn - before, rows.status, taken, logits, logprobs)

    return compiled(decode, model, mesh, (rows_spec(mesh, mode), P(), P()), mode, donate=(1,))


def _kept(drawn: Drawn) -> tuple[Any, Any, Any]:
    """What the loop keeps of every step."""
    return drawn.tokens, drawn.logits, drawn.logprobs


def _room(rows: Rows, vocabulary: int, mode: Mode) -> tuple[Any, Any, Any]:
    """Zeros for what CHUNK steps keep."""
    batch = len(rows.token)

    def zeros(dtype: Any, *more: int) -> jax.Array:
        whole: jax.Array = copy_to_replicas(jnp.zeros((batch, CHUNK, *more), dtype))
        return whole

    logprobs = None
    if mode.logprobs > NO_LOGPROBS:
        listed = mode.logprobs
        logprobs = LogProbs(zeros(jnp.float32), zeros(jnp.int32, listed), zeros(jnp.float32, listed))
    return zeros(jnp.int32), zeros(jnp.float32, vocabulary) if mode.logits else None, logprobs


def compiled(
    function: Callable[..., Any], model: ModelConfig, mesh: Mesh, in_specs: Any, mode: Mode, donate: tuple[int, ...]
) -> Any:
    """`(weights, *arguments) -> (Rows, Drawn)` mapped over the mesh and compiled; takes parameters for weights too, of
    which it makes weights at each call.

    `in_specs` are those of the arguments. `Drawn` is whole on every process.
    """
    in_specs = (decoder_weights.specs(model, mesh), *in_specs)
    out_specs = (rows_spec(mesh, mode), _drawn_spec(mode))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=steps.live(mesh, in_specs), out_specs=steps.live(mesh, out_specs)
    )
    whole = NamedSharding(mesh, P())
    drawn = jax.tree.map(lambda _: whole, out_specs[1], is_leaf=lambda x: isinstance(x, P))
    run = jax.jit(
        mapped,
        in_shardings=steps.shardings(mesh, in_specs),
        out_shardings=(steps.shardings(mesh, out_specs[0]), drawn),
        donate_argnums=donate,
    )
    return lambda params, *arguments: run(weights(model, mesh, params), *arguments)
