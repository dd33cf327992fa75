"""Networks for inference: trained weights alone, in the compute dtype, on any mesh."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

from mesh_transformer import steps
from mesh_transformer.checkpoint import inventory, shards
from mesh_transformer.checkpoint.store import CheckpointStore, Which, find_step
from mesh_transformer.config import Config, differences, mesh_notice
from mesh_transformer.errors import CheckpointError, ConfigError
from mesh_transformer.mesh import choose_platform, describe, find_devices, make_mesh
from mesh_transformer.state import TrainState
from mesh_transformer.transformer_shard import CausalTransformer, init_params

logger = logging.getLogger(__name__)

# What a checkpoint's own run must share, or its weights would compute something else and nobody would notice.
_AGREED = ("pe", "norm", "n_heads", "pe_rotary_dims", "version")


def choose_step(config: Config, ckpt: str | None, which: Which, random_init: bool) -> str | None:
    """The step folder to read: `ckpt` (a step_N folder or a model_dir), or `which` of the config's model_dir.

    None for random weights, which have to be asked for: a network with no checkpoint is refused. Needs no device.
    Raises CheckpointError where there is none or it is of another model, ConfigError for what contradicts.
    """
    if config.version != 1:
        raise ConfigError(f"version {config.version} (the ZeRO-style network) cannot generate yet; leave version out")
    if random_init:
        if ckpt is not None or which != "latest":
            raise ConfigError("--random-init draws new weights, so a checkpoint cannot be named: leave one of them out")
        return None
    if ckpt is not None:
        path = find_step(ckpt)
    else:
        run = config.run
        store = CheckpointStore(run.directory, run.keep_n, run.keep_every, run.keep_best)
        if not store.steps():
            raise CheckpointError(
                f"{store.model_dir} (model_dir) holds no complete checkpoint: train first, name one with --ckpt PATH, "
                "or pass --random-init to use weights that were never trained"
            )
        path = store.path(store.resolve(which))
    _check(path, config)
    return path


def _check(path: str, config: Config) -> None:
    """Raises CheckpointError where the step is damaged or not of the config's model."""
    found = inventory.take(path, config.model)
    theirs = found.manifest.details.get("agreement", {}) if found.manifest is not None else {}
    mine = config.agreement()
    different = differences({k: theirs[k] for k in _AGREED if k in theirs}, {k: mine[k] for k in _AGREED})
    if different:
        raise CheckpointError(f"{path} is of another model: {'; '.join(different)}. Use the config it was trained with")
    inventory.match(found, config.model, config.mesh.cores_per_replica)
    if theirs.get("tokenizer", mine["tokenizer"]) != mine["tokenizer"]:
        logger.warning(
            "%s was trained with the tokenizer %s, and the config names %s: with another vocabulary the text is noise",
            path, theirs["tokenizer"], mine["tokenizer"],
        )  # fmt: skip


def start_mesh(config: Config, platform: str | None, devices: int | None) -> jax.sharding.Mesh:
    """The mesh of this machine's devices; how many replicas there are need not be what training had."""
    choose_platform(platform, devices)
    found = find_devices(platform, devices)
    mesh = make_mesh(config, found)
    logger.info("%s", describe(mesh))
    notice = mesh_notice(config, len(found))
    if notice:
        logger.info("%s", notice)
    return mesh


def load_network(config: Config, mesh: jax.sharding.Mesh, step_dir: str | None) -> CausalTransformer:
    """The network with the weights of `step_dir`, or with random ones from the config's seed (None).

    There is no optimizer state, and weights are kept in the compute dtype: a quarter of training's memory at most.
    """
    network = CausalTransformer(config, mesh)
    if step_dir is not None:
        dtype = jnp.dtype(network.model.compute_dtype)
        network.state = shards.read_step(step_dir, network.model, mesh, optimizer=False, dtype=dtype)
        logger.info("weights from %s", step_dir)
    else:
        zero = steps.place(mesh, jax.sharding.PartitionSpec(), jnp.zeros([], jnp.int32))
        network.state = TrainState(init_params(network.model, mesh, config.run.seed), None, zero)
        logger.info("random weights: what follows is noise")
    return network
