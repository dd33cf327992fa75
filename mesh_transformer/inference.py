"""Networks for inference: trained weights alone, in as few bits as they compute with, on any mesh."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer import steps, storage
from mesh_transformer.checkpoint import formats, manifest
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.store import CheckpointStore, Which, find_step
from mesh_transformer.config import Config, check_interpreter, differences, mesh_notice
from mesh_transformer.data.tokenizer import Tokenizer, is_other
from mesh_transformer.errors import CheckpointError, ConfigError
from mesh_transformer.mesh import choose_platform, describe, find_devices, make_mesh
from mesh_transformer.state import TrainState
from mesh_transformer.transformer_shard import CausalTransformer, init_params
from mesh_transformer.transformer_zero import network_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What a checkpoint's own run must share, or its weights would compute something else and nobody would notice.
_AGREED = ("pe", "norm", "n_heads", "pe_rotary_dims", "version")


def choose_steps(config: Config, ckpt: str | None, which: Which, random_init: bool, strict: bool = False) -> list[str]:
    """The step folders to read, of which the first good one counts: `ckpt`'s, or `which` of the config's model_dir.

    `ckpt`: a step_N folder, or a model_dir. Where the newest step is meant, the older ones stand behind it, in case it
    is damaged; not with `strict`. Empty for random weights, which have to be asked for: a network with no checkpoint is
    refused. Needs no device. Raises CheckpointError where there is none, all are damaged or it is of another model,
    ConfigError for what contradicts.
    """
    if random_init:
        if ckpt is not None or which != "latest":
            raise ConfigError("--random-init draws new weights, so a checkpoint cannot be named: leave one of them out")
        return []
    run = config.run
    store = CheckpointStore(run.directory, run.keep_n, run.keep_every, run.keep_best)
    if ckpt is not None:
        path = find_step(ckpt)
        if path == storage.normalise(ckpt):
            _check(path, config)
            return [path]
        store = CheckpointStore(ckpt)
    elif not store.steps():
        raise CheckpointError(
            f"{store.model_dir} (model_dir) holds no complete checkpoint: train first, name one with --ckpt PATH, "
            "or pass --random-init to use weights that were never trained"
        )
    chosen = store.resolve(which)
    older = [step for step in store.steps() if step < chosen] if which == "latest" and not strict else []
    paths = [store.path(step) for step in (chosen, *reversed(older))]
    return first_good(paths, lambda path: _check(path, config))[1]


def first_good(paths: Sequence[str], use: Callable[[str], T]) -> tuple[T, list[str]]:
    """What `use` gives for the first path that it does not find damaged, and the paths from there on.

    Logs a warning for each that is passed over. Raises the first one's DamagedError where all are damaged.
    """
    first: DamagedError | None = None
    for number, path in enumerate(paths):
        try:
            found = use(path)
        except DamagedError as error:
            first = first or error
            if path != paths[-1]:
                logger.warning("passing over %s: %s", path, error)
            continue
        if first is not None:
            logger.warning("%s is used instead", path)
        return found, list(paths[number:])
    raise first or CheckpointError("there is no checkpoint to read")


def _check(path: str, config: Config) -> None:
    """Raises CheckpointError where the step is not of the config's model, DamagedError where files are missing."""
    described = formats.check(path, config.model, config.mesh.cores_per_replica)
    theirs = described.details.get("agreement", {}) if described is not None else {}
    mine = config.agreement()
    different = differences({k: theirs[k] for k in _AGREED if k in theirs}, {k: mine[k] for k in _AGREED})
    if different:
        raise CheckpointError(f"{path} is of another model: {'; '.join(different)}. Use the config it was trained with")


def check_tokenizer(step_dir: str, config: Config, tokenizer: Tokenizer) -> None:
    """Logs a warning where the step says that it was trained with another tokenizer than the config's, `tokenizer`.

    By the hash that the training data told; where they told none, by the name in the run's config.
    """
    described = manifest.read(step_dir)
    if described is None:  # of the 2021 library, which noted nothing
        return
    position = described.details.get("aux", {}).get("train_loader", {})
    agreement = described.details.get("agreement", {})
    trained_with = position.get("tokenizer_hash") or agreement.get("tokenizer_hash")
    if trained_with is not None:
        is_other(tokenizer, {"tokenizer_hash": trained_with})
        return
    mine = config.agreement()["tokenizer"]
    if agreement.get("tokenizer", mine) != mine:
        logger.warning(
            "%s was trained with the tokenizer %s, and the config names %s: with another vocabulary the text is noise",
            step_dir, agreement["tokenizer"], mine,
        )  # fmt: skip


def start_mesh(config: Config, platform: str | None, devices: int | None) -> jax.sharding.Mesh:
    """The mesh of this machine's devices; how many replicas there are need not be what training had."""
    check_interpreter()
    choose_platform(platform, devices)
    found = find_devices(platform, devices)
    mesh = make_mesh(config, found)
    logger.info("%s", describe(mesh))
    notice = mesh_notice(config, len(found))
    if notice:
        logger.info("%s", notice)
    return mesh


def load_network(config: Config, mesh: jax.sharding.Mesh, step_dirs: Sequence[str]) -> CausalTransformer:
    """The network of `load_step` alone."""
    return load_step(config, mesh, step_dirs)[0]


def load_step(
    config: Config, mesh: jax.sharding.Mesh, step_dirs: Sequence[str], masters: bool = False
) -> tuple[CausalTransformer, str | None]:
    """The network with the weights of the first step that is good, and that step; or with random weights, and None.

    step_dirs: as from `choose_steps`, one run's; a damaged one is passed over with a warning while there are others.
    Random weights, where there are no steps, are those of the config's seed.
    There is no optimizer state, and weights are kept in the compute dtype, a quarter of training's memory at most; with
    `early_cast` in bfloat16 whatever that is; with `masters` in float32, as training has them.
    """
    # Weights alone are whole on every replica: what ZeRO cuts is the training state.
    network = network_of(dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, zero_stage=0)), mesh)
    dtype = jnp.dtype(jnp.bfloat16 if config.model.early_cast else network.model.compute_dtype)
    if masters:
        dtype = jnp.dtype(jnp.float32)
    if step_dirs:

        def read(path: str) -> TrainState:
            if path != step_dirs[0]:  # `choose_steps` has looked at the first alone
                _check(path, config)
            return formats.read_step(path, network.model, mesh, optimizer=False, dtype=dtype)

        network.state, (path, *_) = first_good(step_dirs, read)
        logger.info("weights from %s", path)
        return network, path
    params = jax.tree.map(lambda x: x.astype(dtype), init_params(network.model, mesh, config.run.seed))
    network.state = TrainState(params, None, steps.place(mesh, jax.sharding.PartitionSpec(), np.int32(0)))
    logger.info("random weights: what follows is noise")
    return network, None
