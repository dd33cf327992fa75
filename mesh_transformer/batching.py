"""Continuous batching: rows that join a running batch, a bounded chunk of their prompt at a time, and leave it.

Letters as in `decoding`, and: n entries of a chunk (rows that it feeds), T tokens of each. A batch is `idle_rows`; a
prompt is fed to a free row by `extend_step`, chunk after chunk, the last of which draws its first token; between
chunks, `decode_steps` goes on with the rows that run; a row that ended, or is `release`d, may be fed another prompt.
Nothing of this changes what any other row draws, not by a bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer import decoder_shard, decoding, sampler, steps
from mesh_transformer.collectives import copy_to_replicas
from mesh_transformer.config import ModelConfig
from mesh_transformer.decoder_weights import Weights, cache_heads, stands_alone
from mesh_transformer.decoding import FULL, IDLE, RUNNING, Drawn, Rows, bucket
from mesh_transformer.mesh import DP, MP
from mesh_transformer.sampler import PLAIN, Leaf, Mode, Sampler
from mesh_transformer.sampling import History


class Chunk(NamedTuple):
    """The next tokens of some rows' prompts; one entry for each row that is fed, n a multiple of dp.

    int32 [n]: `row`, the row that the entry feeds, counted among its replica's own; `count`, how many of its `tokens`
    int32 [n, T] count, 0 for filler; `start`, the position of the first (0 begins a new text). `last` bool [n]: the
    prompt ends with this chunk, so its first token is drawn and the row runs. `limit`, `stop` and `sampler`: the row's,
    as in `Rows`.
    """

    row: Leaf
    tokens: Leaf
    count: Leaf
    start: Leaf
    last: Leaf
    limit: Leaf
    stop: Leaf
    sampler: Sampler


class Part(NamedTuple):
    """One row's entry of a chunk, on the host: `row` among all B rows, token ids, the position of the first, whether
    the prompt ends with it, and what `place_chunk` puts into `Rows`; `sampler` has one row."""

    row: int
    tokens: Sequence[int]
    start: int
    last: bool
    limit: int
    stop: Sequence[int]
    sampler: Sampler


def chunk_spec(mode: Mode) -> Chunk:
    """Placement of a chunk: by entries over dp."""
    return Chunk(*(P(DP),) * 7, decoding.sampler_spec(mode))


def idle_rows(model: ModelConfig, mesh: Mesh, batch: int, slots: int, stop_width: int, mode: Mode = PLAIN) -> Rows:
    """`batch` rows (a multiple of dp) that hold nothing, on the devices.

    slots: of the cache, `seq` at most; enough for the longest prompt, and, where fewer than `seq`, for all but the last
    of the tokens that follow it. stop_width: stop ids that a row can have.
    """
    return _idle_rows(model, mesh, batch, slots, stop_width, mode)()


@functools.lru_cache(maxsize=16)
def _idle_rows(model: ModelConfig, mesh: Mesh, batch: int, slots: int, stop_width: int, mode: Mode) -> Any:
    alone, heads = stands_alone(mesh), cache_heads(model, mesh.shape[MP])
    nothing = sampler.filler(sampler.sampler_of(None, 0, mode=mode), batch)

    def make() -> Rows:
        layers, shape = model.layers, (batch, heads, slots, model.attention_width)
        zeros = lambda *more: jnp.zeros((*more, *shape), jnp.dtype(model.compute_dtype))  # noqa: E731
        keys, values = (tuple(zeros() for _ in range(layers)) if alone else zeros(layers) for _ in "kv")
        zero = jnp.zeros(batch, jnp.int32)
        history = decoding.empty_history(zero, model.n_vocab) if mode.penalties else None
        stop = jnp.full((batch, stop_width), -1, jnp.int32)
        idle = jnp.full(batch, IDLE, jnp.int32)
        return Rows(keys, values, zero, zero, zero, zero, idle, stop, jax.tree.map(jnp.asarray, nothing), history)

    return jax.jit(make, out_shardings=steps.shardings(mesh, decoding.rows_spec(mesh, mode)))


def place_chunk(
    mesh: Mesh, batch: int, slots: int, parts: Sequence[Part], stop_width: int, mode: Mode = PLAIN
) -> Chunk:
    """The parts, at least one, as a chunk on the devices for the rows that `idle_rows` made with these sizes.

    T is a bucket that holds every part; the number of entries is dp times a power of two. Each replica's parts are
    among its own entries, in the order in which they are given.
    """
    dp = mesh.shape[DP]
    mine = batch // dp
    groups: list[list[Part]] = [[part for part in parts if part.row // mine == replica] for replica in range(dp)]
    each = bucket(max(map(len, groups)), mine, 1)
    n, T = dp * each, bucket(max(len(part.tokens) for part in parts), slots)
    row, count, start, limit = (np.zeros(n, np.int32) for _ in range(4))
    tokens, last = np.zeros((n, T), np.int32), np.zeros(n, bool)
    stop = np.full((n, stop_width), -1, np.int32)
    samplers = [sampler.filler(parts[0].sampler, 1)] * n
    for replica, group in enumerate(groups):
        for i, part in enumerate(group, replica * each):
            row[i], count[i], start[i], limit[i] = part.row % mine, len(part.tokens), part.start, part.limit
            tokens[i, : len(part.tokens)], last[i] = part.tokens, part.last
            stop[i, : len(part.stop)] = part.stop
            samplers[i] = part.sampler
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *samplers)
    return steps.place(mesh, chunk_spec(mode), Chunk(row, tokens, count, start, last, limit, stop, whole))


@functools.lru_cache(maxsize=64)
def extend_step(model: ModelConfig, mesh: Mesh, mode: Mode = PLAIN) -> Any:
    """The compiled `(weights, Rows, Chunk, n_tokens []) -> (Rows, Drawn)`: feeds a chunk to some of the rows.

    `Drawn` has one entry for each of the chunk's, with at most one token: the first of a text whose prompt is whole
    now, and the status of its row. The work is that of n rows, not of all. T is at most C. The rows passed in are
    donated; rows that are not named are untouched. Compiled once for each (B, C, n, T).
    """
    forward = decoder_shard.apply(model, mesh.shape[MP], "extend", mode.window)

    def extend(weights: Weights, rows: Rows, chunk: Chunk, n_tokens: jax.Array) -> tuple[Rows, Drawn]:
        logits, keys, values = forward(
            copy_to_replicas(weights), rows.keys, rows.values, chunk.row, chunk.tokens, chunk.start, chunk.count
        )
        fed, drawn = decoding.draw(_fed(rows, chunk), logits, n_tokens, mode)
        # A row that does not exist, where what is written is dropped.
        target = jnp.where(chunk.count > 0, chunk.row, len(rows.token))
        own = rows._replace(keys=None, values=None)
        put = lambda whole, part: whole.at[target].set(part, mode="drop")  # noqa: E731
        rows = jax.tree.map(put, own, fed)._replace(keys=keys, values=values)
        return rows, drawn

    return decoding.compiled(
        extend, model, mesh, (decoding.rows_spec(mesh, mode), chunk_spec(mode), P()), mode, donate=(1,)
    )  # fmt: skip


def _fed(rows: Rows, chunk: Chunk) -> Rows:
    """The n rows that the chunk feeds, without their cache, as they are before their first token is drawn."""
    zero = jnp.zeros_like(chunk.count)
    ends = chunk.last & (chunk.count > 0)
    status = jnp.where(ends, jnp.where(chunk.limit > 0, RUNNING, FULL), IDLE)
    history = None
    if rows.history is not None:
        within = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)[None, :] < chunk.count[:, None]
        goes_on = (chunk.start > 0)[:, None]
        before = History(rows.history.prompt[chunk.row] & goes_on, jnp.zeros_like(rows.history.drawn[chunk.row]))
        history = decoding.read(before, chunk.tokens, within)
    return Rows(
        None, None, zero, chunk.start + chunk.count, zero, chunk.limit, status, chunk.stop, chunk.sampler, history
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def join_step(model: ModelConfig, mesh: Mesh, mode: Mode = PLAIN) -> Any:
    """The compiled `(Rows, arrived, row [dp], joins [dp]) -> Rows`: puts rows into the places of others.

    `arrived` are Rows of dp rows, one a replica, with the slots of `Rows`. In each replica whose `joins` (bool) is set
    its one takes the place of the `row`-th (int32) of the replica's own. `Rows` are donated, `arrived` is not.

    Reading a prompt in a place of its own and moving it once costs less than reading it in a large batch: XLA's CPU
    backend copies a cache of which it reads one row and writes another.
    """
    replicas, alone = mesh.shape[DP], stands_alone(mesh)

    def join(rows: Rows, arrived: Rows, row: jax.Array, joins: jax.Array) -> Rows:
        def put(axis: int, whole: jax.Array, one: jax.Array) -> jax.Array:
            if replicas > 1:
                one = jnp.where(joins[0], one, lax.dynamic_slice_in_dim(whole, row[0], 1, axis))
            return lax.dynamic_update_slice_in_dim(whole, one, row[0], axis)

        cached, own = (functools.partial(put, axis) for axis in (0 if alone else 1, 0))
        rest = jax.tree.map(
            own, rows._replace(keys=None, values=None), arrived._replace(keys=None, values=None)
        )  # fmt: skip
        keys, values = (
            jax.tree.map(cached, *pair) for pair in ((rows.keys, arrived.keys), (rows.values, arrived.values))
        )
        return rest._replace(keys=keys, values=values)

    spec = decoding.rows_spec(mesh, mode)
    in_specs = (spec, spec, P(DP), P(DP))
    mapped = jax.shard_map(join, mesh=mesh, in_specs=steps.live(mesh, in_specs), out_specs=steps.live(mesh, spec))
    return jax.jit(
        mapped,
        in_shardings=steps.shardings(mesh, in_specs),
        out_shardings=steps.shardings(mesh, spec),
        donate_argnums=(0,),
    )


def release(rows: Rows, mask: np.ndarray) -> Rows:
    """The rows with those of `mask` (bool [B]) ended: they draw no more, and may be fed another prompt."""
    return rows._replace(status=_idle(rows.status, jax.device_put(mask, rows.status.sharding)))


@jax.jit
def _idle(status: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, IDLE, status)
