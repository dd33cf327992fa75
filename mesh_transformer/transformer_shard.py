"""`CausalTransformerShard`, what one shard computes, and `CausalTransformer`, the network of version 1 on a mesh."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer import attention, fused_attention, memory, optimizer, parameters, steps
from mesh_transformer.collected_vocabulary import collected_loss
from mesh_transformer.collectives import Probe
from mesh_transformer.config import Config, ModelConfig, OptimConfig, check_interpreter
from mesh_transformer.cross_entropy import UNSTOPPED, PositionLosses, position_losses, weighted_loss
from mesh_transformer.errors import ConfigError, DataError
from mesh_transformer.layers import (
    COLLECTED,
    SAVED_NAMES,
    EmbeddingShard,
    ProjectionShard,
    RelativePositionEmbs,
    TransformerLayerShard,
    layer,
    rotary_tables,
)
from mesh_transformer.mesh import DP, MP
from mesh_transformer.state import Params, TrainState


class Zero(NamedTuple):
    """How the state is cut over replicas: `stage` 0, 1 or 3; `early_collect`: stage 3 gathers all layers at once."""

    stage: int = 0
    early_collect: bool = False

    def replicas(self, mesh: Mesh) -> int:
        """Over how many replicas parameters are cut."""
        return int(mesh.shape[DP]) if self.stage == 3 else 1

    def placement(self, model: ModelConfig, mesh: Mesh) -> steps.Placement:
        """Where parameters and moments live between steps."""
        mp = int(mesh.shape[MP])
        return steps.Placement(*(parameters.storage_specs(model, mp, self.stage, moments) for moments in (False, True)))


REPLICATED = Zero()


class CausalTransformerShard(hk.Module):
    """One shard of the network, of either version; call it inside `shard_map` over (dp, mp). Sizes as in `layers`.

    `zero`: the replicas over which ZeRO (stage 3) cuts matrices too; `early_collect`: gather those of all layers at
    once. `probe` of the methods: see `collectives.Probe`.
    """

    def __init__(self, model: ModelConfig, mp: int, zero: int = 1, early_collect: bool = False):
        super().__init__(name="causal_transformer_shard")
        self.model, self.early_collect = model, early_collect
        self.embed = EmbeddingShard(model, mp, parameters.EMBEDDING, zero)
        self.layers = TransformerLayerShard(model, mp, parameters.LAYERS, zero)
        self.projection = ProjectionShard(model, mp, parameters.PROJECTION, zero)
        self.relative = RelativePositionEmbs(model, mp, parameters.RELATIVE) if model.pe == "t5" else None

    def hidden(
        self, obs_BS: jax.Array, key_visible_BS: jax.Array | None = None, probe: Probe | None = None
    ) -> jax.Array:
        """The residual stream behind the last layer, [T, D]."""
        model, (batch, S), dtype = self.model, obs_BS.shape, jnp.dtype(self.model.compute_dtype)
        positions = jnp.tile(jnp.arange(S, dtype=jnp.int32), batch)
        x_TD = self.embed(obs_BS.reshape(-1), positions, dtype, probe)
        tables = rotary_tables(model, S)
        bias = attention.t5_bias_of(self.relative(probe) if self.relative is not None else None)

        def body(x: jax.Array, params: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
            if not self.early_collect:
                params = self.layers.collect(params, probe, dtype)
            return layer(x, params, model, batch, tables, bias, key_visible_BS), None

        stacked: Mapping[str, jax.Array] = self.layers()
        if self.early_collect:
            stacked = jax.vmap(lambda params: self.layers.collect(params, probe, dtype))(stacked)
        collects = (self.layers.zero > 1 or probe is not None) and not self.early_collect
        return lax.scan(rematerialised(body, model.remat, collects), x_TD, stacked)[0]

    def loss(
        self, probe: Probe, obs_BS: jax.Array, target_BS: jax.Array, weight_BS: jax.Array
    ) -> tuple[jax.Array, PositionLosses]:
        """Weighted sum of the losses, float32 [], and each position's, [B, S]."""
        x_TD = self.hidden(obs_BS, probe=probe)
        unstopped = self.model.v2_merged_heads is not None and self.model.z_loss == "reference"
        z_loss = UNSTOPPED if unstopped else self.model.z_loss
        target, weight, chunk = target_BS.reshape(-1), weight_BS.reshape(-1), self.model.logit_chunk
        if self.projection.zero > 1:
            h_TD, w, b = self.projection.uncollected(x_TD, probe)
            total, losses = collected_loss(h_TD, w, b, probe.split, target, weight, chunk, z_loss)
        else:
            h_TD, w, b = self.projection(x_TD, probe)
            total, losses = weighted_loss(h_TD, w, b, target, weight, chunk, z_loss)
        return total, _by_sequence(losses, obs_BS.shape)

    def evaluate(self, obs_BS: jax.Array, target_BS: jax.Array, ctx_length_B: jax.Array) -> PositionLosses:
        """Each position's losses, [B, S]; keys behind position `ctx_length` are hidden, so that many + 1 are seen."""
        S = obs_BS.shape[1]
        visible = jnp.arange(S, dtype=jnp.int32)[None, :] <= ctx_length_B[:, None]
        h_TD, w, b = self.projection(self.hidden(obs_BS, visible))
        losses = position_losses(h_TD, w, b, target_BS.reshape(-1), self.model.logit_chunk, self.model.z_loss)
        return _by_sequence(losses, obs_BS.shape)

    def logits(self, obs_BS: jax.Array) -> jax.Array:
        """This shard's logits, float32 [B, S, v]: for tests and small models, since all exist at once."""
        h_TD, w, b = self.projection(self.hidden(obs_BS))
        out = jnp.dot(h_TD, w.astype(h_TD.dtype), preferred_element_type=jnp.float32) + b.astype(jnp.float32)[None, :]
        return out.reshape(*obs_BS.shape, -1)


def _by_sequence(losses: PositionLosses, shape: tuple[int, ...]) -> PositionLosses:
    return PositionLosses(*(x.reshape(shape) for x in losses))


def rematerialised(body: Any, remat: str, collects: bool) -> Any:
    """The scanned layer, recomputing in the backward pass all (`full`), what is not a matmul (`dots`), or nothing.

    `collects`: weights that the layer collects are never kept, only collected again.

    The layer's sum over shards feeds only its own output, whose value no gradient needs, so that recomputing a layer
    never repeats a collective. `prevent_cse` is off since inside a scan there is nothing to merge with.
    """
    if remat == "none" and not collects:
        return body
    policies = jax.checkpoint_policies
    policy = {
        "none": policies.save_anything_except_these_names(COLLECTED),
        "dots": policies.save_only_these_names(*SAVED_NAMES),
        "full": None,
    }[remat]
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def shard_function(model: ModelConfig, mesh: Mesh, method: str, zero: Zero) -> Any:
    """`CausalTransformerShard(...).method(...)` as a pure function of (params, *arguments)."""

    def forward(*arguments: Any) -> Any:
        shard = CausalTransformerShard(model, int(mesh.shape[MP]), zero.replicas(mesh), zero.early_collect)
        return getattr(shard, method)(*arguments)

    transformed: Any = hk.without_apply_rng(hk.transform(forward))
    return transformed.apply


def init_params(model: ModelConfig, mesh: Mesh, seed: int, zero: Zero = REPLICATED) -> Params:
    """Fresh float32 parameters, whole arrays placed by the table; the same seed gives the same values on any mesh."""
    kinds = parameters.kinds(model, mesh.shape[MP])
    placed = steps.shardings(mesh, zero.placement(model, mesh).params)

    def draw(key: jax.Array) -> Params:
        values = []
        for i, kind in enumerate(kinds):
            if kind.random:
                value = kind.init * jax.random.truncated_normal(jax.random.fold_in(key, i), -2, 2, kind.shape)
            else:
                value = jnp.full(kind.shape, kind.init, jnp.float32)
            values.append((kind, value))
        return parameters.tree(values)

    return jax.jit(draw, out_shardings=placed)(jax.random.key(seed))


@functools.lru_cache(maxsize=8)
def compiled_init(model: ModelConfig, mesh: Mesh, zero: Zero) -> Any:
    """Fresh optimizer state for placed parameters."""
    return jax.jit(optimizer.init, out_shardings=steps.shardings(mesh, zero.placement(model, mesh).state.opt_state))


@functools.lru_cache(maxsize=8)
def train_step(model: ModelConfig, optim: OptimConfig, mesh: Mesh, zero: Zero = REPLICATED) -> Any:
    """The compiled `(state, Batch) -> (state, metrics)`, shared by all networks of these settings."""
    decay = parameters.decay_mask(model, mesh.shape[MP], optim.v2_decay_vectors)
    placement = zero.placement(model, mesh)
    return steps.compile_train_step(shard_function(model, mesh, "loss", zero), mesh, placement, optim, decay)


@functools.lru_cache(maxsize=8)
def eval_step(model: ModelConfig, mesh: Mesh, zero: Zero = REPLICATED) -> Any:
    """The compiled `(params, obs, target, ctx_length) -> losses`."""
    loss = shard_function(model, mesh, "evaluate", zero)
    # QUIRK v2-eval-z-loss: version 2's evaluation of 2021 has the z-loss in it.
    with_z_loss = model.v2_merged_heads is not None
    return steps.compile_eval_step(loss, mesh, zero.placement(model, mesh).params, with_z_loss)


@functools.lru_cache(maxsize=8)
def logits_step(model: ModelConfig, mesh: Mesh, zero: Zero = REPLICATED) -> Any:
    """The compiled `(params, obs [B, S]) -> logits [B, S, V]`."""
    blocks = steps.live(mesh, zero.placement(model, mesh).params)
    forward = shard_function(model, mesh, "logits", zero)

    def logits(params: Params, obs: jax.Array) -> jax.Array:
        return forward(steps.use_on_replicas(params, blocks), obs)

    rows, out = steps.live(mesh, (P(DP), P(DP, None, MP)))
    return jax.jit(jax.shard_map(logits, mesh=mesh, in_specs=(blocks, rows), out_specs=out))


class CausalTransformer:
    """The network of version 1 on a mesh: holds `state` and runs compiled steps on it.

    Nothing is compiled, drawn or read before it is needed. `config.model.compute_dtype` and `remat` that were left
    open are settled here, by the platform and memory of the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.model = settle(config, mesh)
        self.zero = Zero(config.mesh.zero_stage, config.version == 2 and config.run.early_collect)
        self._state: TrainState | None = None
        self._weights: Any = None
        self._decodes = False

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state (none with `early_cast`) and step; fresh ones from the seed on first use."""
        if self._decodes:
            raise RuntimeError("this network only decodes: decode_only() has let go of its state")
        if self._state is None:
            params = init_params(self.model, self.mesh, self.config.run.seed, self.zero)
            if self.model.early_cast:
                params, fresh = jax.tree.map(lambda x: x.astype(self._param_dtype), params), None
            else:
                fresh = compiled_init(self.model, self.mesh, self.zero)(params)
            self._state = TrainState(params, fresh, steps.place(self.mesh, P(), np.int32(0)))
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state, self._weights, self._decodes = state, None, False

    @property
    def weights(self) -> Any:
        """`decoder_weights.weights` of the parameters, made on first use, and kept until `state` is another."""
        from mesh_transformer.decoder_weights import weights  # fmt: skip

        self._weights = self._weights or weights(self.model, self.mesh, self.whole_params())
        return self._weights

    def decode_only(self) -> None:
        """Keeps nothing but `weights`, so that matrices copied for them are held once; `state`, and with it training,
        eval and saving, raises RuntimeError until another one is set."""
        from mesh_transformer.decoder_weights import weights  # fmt: skip

        held = [] if self._decodes else [self.whole_params()]
        self._state, self._decodes = None, True  # before the copies are made
        if self._weights is None:
            self._weights = weights(self.model, self.mesh, held.pop())

    @property
    def _param_dtype(self) -> Any:
        return jnp.bfloat16 if self.model.early_cast else jnp.float32

    def train(self, batch: Mapping[str, Any], replicas: Sequence[int] | None = None) -> steps.Metrics:
        """One update on {"obs", "target" [A, B, S] int[, "mask" [A, B, S]]}; returns scalars without waiting for them.

        `replicas`: each process hands in the rows of these alone (`steps.replicas_of`). loss and last_loss are the
        optimised totals; cross_entropy and z_loss their parts; grad_norm is of the sum over microbatches; skipped is 1
        where a gradient was not finite and nothing changed.
        Raises DataError when the batch does not fit mesh or model, CheckpointError when the state has no optimizer.
        """
        optimizer.of(self.state)
        obs, target = self._tokens(batch, "[A, B, S]")
        dp = self.mesh.shape[DP] if replicas is None else len(replicas)
        if obs.shape[1] % dp:
            raise DataError(f"B of a training batch must be a multiple of dp ({dp}), found {obs.shape}")
        mask = np.asarray(batch["mask"], np.float32) if "mask" in batch else np.ones(obs.shape, np.float32)
        if mask.shape != obs.shape:
            raise DataError(f"mask has shape {mask.shape}, obs has {obs.shape}: they must be equal")
        placed = steps.place(self.mesh, steps.BATCH_SPEC, steps.Batch(obs, target, mask), replicas)
        self._weights = None  # views of what is about to be donated
        self.state, metrics = train_step(self.model, self.config.optim, self.mesh, self.zero)(self.state, placed)
        return metrics

    def eval(self, batch: Mapping[str, Any], replicas: Sequence[int] | None = None) -> steps.Metrics:
        """Losses of {"obs", "target" [B, S][, "ctx_length" [B]]}: loss, last_loss [B]; all_loss, correct [B, S].

        Rows are added up to a multiple of dp and taken off again, but with `replicas` (see `train`). Raises DataError.
        """
        obs, target = self._tokens(batch, "[B, S]")
        rows, S = obs.shape
        ctx_length = np.asarray(batch.get("ctx_length", np.full(rows, S)), np.int32).reshape(-1)
        missing = -rows % self.mesh.shape[DP] if replicas is None else 0
        if missing:
            obs, target = (np.pad(x, ((0, missing), (0, 0))) for x in (obs, target))
            ctx_length = np.pad(ctx_length, (0, missing), constant_values=steps.FILLER)
        arrays = steps.place(self.mesh, (P(DP), P(DP), P(DP)), (obs, target, ctx_length), replicas)
        out = eval_step(self.model, self.mesh, self.zero)(self.state.params, *arrays)
        return {k: v[:rows] for k, v in out.items()} if missing else out

    def _tokens(self, batch: Mapping[str, Any], axes: str) -> tuple[np.ndarray, np.ndarray]:
        """obs and target, int32, of the rank of `axes`, of equal shape, with S at most seq and ids below n_vocab.

        Checked here since compiled code would not: an id out of range finds no row and an all-zero embedding.
        """
        obs, target = np.asarray(batch["obs"]), np.asarray(batch["target"])
        if obs.ndim != axes.count(",") + 1 or obs.shape != target.shape or not 1 <= obs.shape[-1] <= self.model.seq:
            raise DataError(
                f"obs and target must be {axes} with S at most seq ({self.model.seq}), "
                f"found {obs.shape} and {target.shape}"
            )
        for name, ids in (("obs", obs), ("target", target)):
            if ids.size and not 0 <= ids.min() <= ids.max() < self.model.n_vocab:
                found = f"{name} holds ids from {ids.min()} to {ids.max()}"
                raise DataError(f"{found}, outside 0 to n_vocab - 1 ({self.model.n_vocab - 1})")
        return obs.astype(np.int32), target.astype(np.int32)

    def logits(self, obs: Any) -> jax.Array:
        """Logits [B, S, V] float32 of obs [B, S], all at once: for tests and small models."""
        placed = steps.place(self.mesh, P(DP), np.asarray(obs, np.int32))
        return logits_step(self.model, self.mesh, self.zero)(self.state.params, placed)

    def generate(
        self,
        context: Any,
        ctx_length: Any,
        gen_length: int,
        sampler_options: Mapping[str, Any] | None = None,
        return_logits: bool = False,
        seed: int | Sequence[int] = 0,
        *,
        eot_id: int | None = None,
        n_tokens: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Continues each prompt by `gen_length` (G) tokens: {"tokens": [B, G], "lengths": [B][, "logits": [B, G, V]]}.

        context [B, S]: token ids, right-aligned, of which the last `ctx_length` [B] of a row are read, and of more than
        the model's seq the last, with a logged warning; 0 stands for one end-of-text token, `eot_id` (default: the
        config's). sampler_options: scalars or [B], as in `sampler.DEFAULTS`; also `sampler.Mode`'s filter_order and
        window. seed: row i draws by seed + i; or one seed a row. n_tokens: ids from there on are never drawn. "lengths"
        are G, but at the end of a "fixed" table; "logits" float32, before any filter. Raises DataError and ConfigError.
        """
        from mesh_transformer import generation

        if eot_id is None and np.size(ctx_length) and np.min(ctx_length) == 0:
            eot_id = generation.end_of_text(self.config)
        return generation.generate(
            self.model, self.mesh, self.weights, context, ctx_length, gen_length, sampler_options, return_logits,
            seed, eot_id, n_tokens,
        )  # fmt: skip

    def whole_params(self) -> Params:
        """The parameters as generation takes them: whole on every replica, gathered where ZeRO cuts them."""
        if self.zero.replicas(self.mesh) == 1:
            return self.state.params
        whole = steps.shardings(self.mesh, parameters.specs(self.model, int(self.mesh.shape[MP])))
        return jax.device_put(self.state.params, whole)

    def load_ckpt(self, path: str | os.PathLike[str], optimizer: bool = True) -> None:
        """Loads a `step_N` folder of any layout, full or slim, written on any mesh.

        `optimizer=False` leaves the moments out, for inference, and so does `early_cast`, which keeps the parameters in
        bfloat16. Raises CheckpointError; `state` is unchanged then.
        """
        from mesh_transformer.checkpoint import formats

        with_moments = optimizer and not self.model.early_cast
        self.state = formats.read_step(
            path, self.model, self.mesh, optimizer=with_moments, dtype=self._param_dtype, zero_stage=self.zero.stage
        )

    def write_ckpt(self, path: str | os.PathLike[str]) -> None:
        """Writes the state as a `step_N` folder, in the layout that `ckpt_format` names."""
        from mesh_transformer.checkpoint import formats

        formats.write_step(path, self.state, self.config)


def settle(config: Config, mesh: Mesh) -> ModelConfig:
    """The model with `compute_dtype` and `remat` decided for the devices of `mesh`. Raises ConfigError."""
    check_interpreter()
    model = config.model
    if mesh.shape[MP] != config.mesh.cores_per_replica:
        raise ConfigError(
            f"the mesh has mp {mesh.shape[MP]}, the config cores_per_replica {config.mesh.cores_per_replica}: "
            "make the mesh with make_mesh(config)"
        )
    device = (mesh.local_devices or mesh.devices.flat)[0]  # a process can ask only its own about their memory
    fused_attention.cudnn_works()
    dtype = model.compute_dtype or ("float32" if device.platform == "cpu" else "bfloat16")
    remat = model.remat
    if remat == "auto":
        limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
        remat = memory.remat_that_fits(config, mesh.shape[DP], mesh.shape[MP], jnp.dtype(dtype).itemsize, limit)
    return dataclasses.replace(model, compute_dtype=dtype, remat=remat)
