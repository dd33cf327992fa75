"""Pure training and evaluation steps around a per-shard loss, mapped over the (dp, mp) mesh.

A network hands in functions of one shard; here they are accumulated over microbatches, summed over replicas, mapped
with `shard_map` and compiled. Replication checking is on in every `shard_map` (`check_vma=True`, the default): it is
what makes the collectives' backward passes right by type.

ZeRO (`Placement`): what is cut over dp is declared by specs alone. In stage 1 the summed gradient is scattered over
replicas, each updates its part, and the new parameters are gathered, once a step. In stage 3 parameters stay cut; the
network gathers a layer's when it needs them (`layers.ShardModule.collect`), whose backward pass scatters the gradient.

Letters: A microbatches, B sequences of all replicas, b sequences of this replica, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_transformer import optimizer
from mesh_transformer.collectives import (
    Probe,
    copy_to_replicas,
    make_probe,
    scatter_over_replicas,
    sum_over_replicas,
    sum_over_shards,
    varying,
)
from mesh_transformer.config import OptimConfig
from mesh_transformer.cross_entropy import PositionLosses
from mesh_transformer.mesh import DP, MP
from mesh_transformer.state import OptimizerState, Params, TrainState

Metrics = dict[str, jax.Array]

# (params, probe, obs [b, S], target [b, S], weight [b, S]) -> (sum of weight * loss, losses of every position [b, S])
TrainLoss = Callable[[Params, Probe, jax.Array, jax.Array, jax.Array], tuple[jax.Array, PositionLosses]]
# (params, obs [b, S], target [b, S], ctx_length [b]) -> losses of every position [b, S]
EvalLoss = Callable[[Params, jax.Array, jax.Array, jax.Array], PositionLosses]


T = TypeVar("T")


class Batch(NamedTuple, Generic[T]):
    """Of T: `obs` and `target` int32 [A, B, S], `mask` float32 [A, B, S] (1 where the target counts)."""

    obs: T
    target: T
    mask: T


class Placement(NamedTuple):
    """Trees of PartitionSpecs: where parameters live between steps, and Adam's moments."""

    params: Any
    moments: Any

    @property
    def state(self) -> Any:
        """Placement of a training state; counts are on every device."""
        count: Any = P()
        return TrainState(self.params, OptimizerState(count, self.moments, self.moments, count), count)


class _Sums(NamedTuple):
    """Sums over this replica's microbatches, float32 []."""

    cross_entropy: jax.Array
    z_loss: jax.Array
    last_cross_entropy: jax.Array
    last_count: jax.Array
    micro_norm: jax.Array
    micro_norm_squared: jax.Array


_VALUE: Any = jax.ad.GradValue()  # type: ignore[attr-defined]  # a gradient wanted as a value, not added up in place

FILLER = -1  # `ctx_length` of a row that is there to fill a batch

BATCH_SPEC = Batch(P(None, DP), P(None, DP), P(None, DP))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """NamedShardings of a tree of PartitionSpecs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def live(mesh: Mesh, specs: Any) -> Any:
    """`specs` for `shard_map`, without the mesh axes of size 1, over which nothing can vary."""

    def strip(spec: P) -> P:
        return P(*(axis if axis is not None and mesh.shape[axis] > 1 else None for axis in spec))

    return jax.tree.map(strip, specs, is_leaf=lambda x: isinstance(x, P))


def squared_norm(gradient: Params, specs: Any) -> jax.Array:
    """Squared norm [] of a whole gradient from one device's blocks, placed by `specs`, each entry counted once."""
    sums = {(dp, mp): jnp.float32(0) for dp in (False, True) for mp in (False, True)}
    for leaf, spec in zip(jax.tree.leaves(gradient), _leaves(specs), strict=True):
        cut = (DP in spec, MP in spec)
        sums[cut] = sums[cut] + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    if any(DP in spec for spec in _leaves(specs)):
        sums[False, True] = sums[False, True] + sum_over_replicas(sums[True, True])
        sums[False, False] = sums[False, False] + sum_over_replicas(sums[True, False])
    return sum_over_shards(sums[False, True]) + sums[False, False]


def _leaves(specs: Any) -> list[P]:
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))


def use_on_replicas(params: Params, specs: Any) -> Params:
    """Parameters as a replica computes with them; those that are cut over dp vary over it already."""
    return jax.tree.map(lambda x, spec: x if DP in spec else copy_to_replicas(x), params, specs)


def _gradient(loss: TrainLoss, placement: Placement, replicas: int, params: Params, batch: Batch[jax.Array]) -> Any:
    """One shard: the gradient summed over microbatches and replicas, placed like the moments, and the step's metrics.

    Each position's weight is mask * A / (unmasked positions of the whole step), so that the optimizer's division by
    A leaves the mean over all unmasked positions, however they are spread over microbatches and replicas.
    """
    microbatches = batch.obs.shape[0]
    params = use_on_replicas(params, placement.params)
    count = sum_over_replicas(jnp.sum(batch.mask))
    # A step without a single unmasked position has a zero gradient, not 0/0.
    share = microbatches / jnp.maximum(count, 1.0)
    # Accumulators are float32 like the masters: in bfloat16 small contributions would be lost as A grows. They are
    # mutable, so that the backward pass adds each layer's gradient where it belongs: with a gradient for every
    # microbatch beside them a device would need room for one more of the whole model.
    zeros = lambda x, spec: varying(jnp.zeros(x.shape, jnp.float32), (DP, MP) if MP in spec else (DP,))  # noqa: E731
    totals = jax.tree.map(lambda x, spec: jax.new_ref(zeros(x, spec)), params, placement.params)

    def microbatch(_: None, micro: Batch[jax.Array]) -> tuple[None, _Sums]:
        objective = lambda p, probe: loss(p, probe, micro.obs, micro.target, micro.mask * share)  # noqa: E731
        differentiated: Any = jax.vjp(objective, params, make_probe(), has_aux=True)
        _, backward, losses = differentiated
        accumulate = backward.with_refs(totals, Probe(_VALUE, _VALUE))
        _, norms = accumulate(varying(jnp.float32(1), (DP,)))
        # One replica's gradient of its own mean loss: its share of the positions is 1/dp of the microbatch.
        norm_squared = (sum_over_shards(norms.split) + norms.whole) * replicas**2
        mask = micro.mask
        return None, _Sums(
            jnp.sum(losses.cross_entropy * mask), jnp.sum(losses.z_loss * mask),
            jnp.sum(losses.cross_entropy[:, -1] * mask[:, -1]), jnp.sum(mask[:, -1]),
            jnp.sqrt(norm_squared), norm_squared,
        )  # fmt: skip

    _, each = lax.scan(microbatch, None, batch)
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)
    gradient = jax.tree.map(lambda total: total[...], totals)
    gradient = jax.tree.map(_reduce, gradient, placement.params, placement.moments)
    norm = jnp.sqrt(squared_norm(gradient, placement.moments))
    return gradient, norm, _metrics(sum_over_replicas(sums), count, microbatches * replicas)


def _reduce(gradient: jax.Array, param: P, moment: P) -> jax.Array:
    """One leaf's sum over replicas, as its moments are placed; where its parameter is cut, that has been done."""
    if DP in param:
        return gradient
    return scatter_over_replicas(gradient, moment.index(DP)) if DP in moment else sum_over_replicas(gradient)


def _metrics(sums: _Sums, count: jax.Array, micros: int) -> Metrics:
    positions = jnp.maximum(count, 1.0)
    cross_entropy, z_loss = sums.cross_entropy / positions, sums.z_loss / positions
    return {
        "loss": cross_entropy + z_loss,
        "last_loss": sums.last_cross_entropy / jnp.maximum(sums.last_count, 1.0) + z_loss,
        "cross_entropy": cross_entropy,
        "z_loss": z_loss,
        "grad_norm_micro": sums.micro_norm / micros,
        "noise_small_sq": sums.micro_norm_squared / micros,
    }


def compile_train_step(
    loss: TrainLoss, mesh: Mesh, placement: Placement, optim: OptimConfig, decay: Any
) -> Callable[[TrainState, Batch[jax.Array]], tuple[TrainState, Metrics]]:
    """The compiled update: (state, batch) -> (state, metrics), all global arrays; the state passed in is donated."""

    blocks = Placement(*live(mesh, tuple(placement)))

    def gradient(params: Params, batch: Batch[jax.Array]) -> Any:
        return _gradient(loss, blocks, mesh.shape[DP], params, batch)

    mapped = jax.shard_map(
        gradient, mesh=mesh, in_specs=(blocks.params, live(mesh, BATCH_SPEC)), out_specs=(blocks.moments, P(), P())
    )

    def step(state: TrainState, batch: Batch[jax.Array]) -> tuple[TrainState, Metrics]:
        grads, norm, metrics = mapped(state.params, batch)
        # Each device updates what it has moments of; in stage 1 the new parameters are then gathered, by the output's
        # placement.
        own = jax.lax.with_sharding_constraint(state.params, shardings(mesh, placement.moments))
        update = optimizer.apply(state._replace(params=own), grads, norm, batch.obs.shape[0], optim, decay)
        params = jax.lax.with_sharding_constraint(update.state.params, shardings(mesh, placement.moments))
        extra = {"grad_norm": norm, "learning_rate": update.learning_rate, "skipped": update.skipped}
        return update.state._replace(params=params), metrics | extra

    placed = shardings(mesh, placement.state)
    return jax.jit(
        step,
        in_shardings=(placed, shardings(mesh, BATCH_SPEC)),
        out_shardings=(placed, NamedSharding(mesh, P())),
        donate_argnums=0,
    )


def compile_eval_step(
    loss: EvalLoss, mesh: Mesh, param_specs: Any, with_z_loss: bool = False
) -> Callable[[Params, jax.Array, jax.Array, jax.Array], Metrics]:
    """The compiled evaluation: (params, obs [B, S], target [B, S], ctx_length [B]) -> loss, last_loss [B];
    all_loss, correct [B, S]; float32, cross-entropy alone, or `with_z_loss` its mean over all rows in every position.

    Rows whose ctx_length is FILLER do not count in that mean."""

    blocks = live(mesh, param_specs)

    def evaluate(params: Params, obs: jax.Array, target: jax.Array, ctx_length: jax.Array) -> Metrics:
        losses = loss(use_on_replicas(params, blocks), obs, target, ctx_length)
        ce = losses.cross_entropy
        if with_z_loss:
            real = jnp.broadcast_to(ctx_length[:, None] != FILLER, ce.shape).astype(jnp.float32)
            total, count = sum_over_replicas((jnp.sum(losses.z_loss * real), jnp.sum(real)))
            ce = ce + total / count
        return {"loss": ce.mean(-1), "last_loss": ce[:, -1], "all_loss": ce, "correct": losses.correct}

    rows = live(mesh, P(DP))
    mapped = jax.shard_map(evaluate, mesh=mesh, in_specs=(blocks, rows, rows, rows), out_specs=rows)
    placed = NamedSharding(mesh, P(DP))
    return jax.jit(
        mapped,
        in_shardings=(shardings(mesh, param_specs), placed, placed, placed),
        out_shardings=NamedSharding(mesh, P()),
    )


def place(mesh: Mesh, specs: Mapping[str, P] | Any, values: Any, replicas: Sequence[int] | None = None) -> Any:
    """Host arrays -> global arrays placed by `specs` (a tree like `values`).

    Every process holds the values whole; or, with `replicas`, the rows of these alone, one replica's behind the
    other's, where `specs` cut the rows over dp and nothing else.
    """

    def put(value: Any, sharding: NamedSharding) -> jax.Array:
        if replicas is not None:
            return _place_rows(value, sharding, replicas)
        if sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
        # Not `device_put`, with which all processes would first compare their values over the network.
        whole = np.asarray(value)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(put, values, shardings(mesh, specs))


def _place_rows(own: np.ndarray, sharding: NamedSharding, replicas: Sequence[int]) -> jax.Array:
    place_of = {replica: at for at, replica in enumerate(replicas)}
    axis = sharding.spec.index(DP)
    rows = own.shape[axis] // len(replicas)
    shape = (*own.shape[:axis], rows * int(sharding.mesh.shape[DP]), *own.shape[axis + 1 :])

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        where = index or ()
        at = place_of[(where[axis].start or 0) // rows] * rows  # with one replica a slice of everything
        return own[(*where[:axis], slice(at, at + rows))]

    return jax.make_array_from_callback(shape, sharding, block)


def replicas_of(mesh: Mesh, process: int) -> tuple[int, ...]:
    """The replicas (indices along dp) of which a process holds a part."""
    holds = np.vectorize(lambda device: device.process_index == process)(mesh.devices)
    return tuple(int(replica) for replica in np.flatnonzero(holds.any(axis=mesh.axis_names.index(MP))))
