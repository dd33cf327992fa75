"""Where a run starts from, decided from what lies in its model_dir; nothing is written and no weights are read."""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
from collections.abc import Mapping
from typing import Any

from mesh_transformer import storage
from mesh_transformer.checkpoint import layout, manifest
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import Config, differences
from mesh_transformer.errors import CheckpointError, ConfigError
from mesh_transformer.training.run_state import RunState

logger = logging.getLogger(__name__)

# What follows from total_steps where the config does not say it.
SCHEDULE_KEYS = ("warmup_steps", "anneal_steps")


class Origin(enum.Enum):
    """The sources of a run's first state, in the order in which they are tried."""

    RESUME = "the newest good checkpoint in model_dir, unless --new"
    TUNE = "the checkpoint of --tune-model-path"
    FRESH = "the seed"


@dataclasses.dataclass(frozen=True)
class Start:
    """`config` is that of the command, with what an existing run has settled; `step` where it stands, 0 for a new run.

    agreement: what `config` says of itself towards other runs of the same model_dir.
    """

    origin: Origin
    config: Config
    step: int
    agreement: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        return self.origin is Origin.RESUME and self.step >= int(self.config.run.total_steps or 0)


def choose(
    store: CheckpointStore,
    config: Config,
    *,
    dp: int,
    fingerprint: str,
    tokenizer: str | None = None,
    tune_path: str | None = None,
    new: bool = False,
    reset_data: bool = False,
    elastic: bool = False,
) -> Start:
    """Decides the origin (see `Origin`) for `config`, whose training data have `fingerprint`.

    tokenizer: the hash of the one that made the data, where they tell.  elastic: a run that was begun with another dp
    keeps its sequences a step, by other gradient_accumulation_steps.

    Raises CheckpointError where model_dir holds a run that this is not, naming the keys that differ, and ConfigError
    where --tune-model-path lies in model_dir.
    """
    if tune_path is not None:
        _refuse_own_folder(tune_path, store.model_dir)
    newest = None if new else _newest_details(store)
    if newest is None:
        origin = Origin.FRESH if tune_path is None else Origin.TUNE
        return Start(origin, config, 0, config.agreement(dp, tokenizer, fingerprint))
    step, details = newest
    if tune_path is not None:
        _refuse_other_run(store, step, details, tune_path)
    theirs = details.get("agreement", {})
    config = keep_schedule(config, theirs)
    if elastic:
        config = keep_batch(config, theirs, dp)
    mine = config.agreement(dp, tokenizer, fingerprint)
    different = differences(theirs, mine if not reset_data else {k: v for k, v in mine.items() if k != "data"})
    if different:
        remedy = (
            "use that run's config, choose another model_dir (with --tune-model-path to begin at this run's weights), "
            "or pass --new to delete it and start over"
        )
        if all(line.startswith("data ") for line in different):
            remedy = "put the files of that run back, or pass --reset-data to go on at the beginning of these"
        raise CheckpointError(f"{store.model_dir} holds a run that differs: {'; '.join(different)}; {remedy}")
    return Start(Origin.RESUME, config, step, mine)


def keep_schedule(config: Config, agreement: Mapping[str, Any]) -> Config:
    """`config` with the run's own warmup_steps and anneal_steps where they are only defaults.

    They follow total_steps, and a run may be made longer or shorter; its schedule must not change under it.
    """
    kept = {
        key: agreement[key]
        for key in SCHEDULE_KEYS
        if key not in config.given and key in agreement and agreement[key] != getattr(config.optim, key)
    }
    if not kept:
        return config
    settled = ", ".join(f"{key} {value}" for key, value in kept.items())
    logger.info("the run keeps the schedule that it began with: %s", settled)
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, **kept))


def keep_batch(config: Config, agreement: Mapping[str, Any], dp: int) -> Config:
    """`config` with the gradient_accumulation_steps that keep the run's sequences a step with this dp.

    Raises ConfigError, with the arithmetic, where no number of them does.
    """
    wanted, mesh = agreement.get("sequences_per_step"), config.mesh
    if not isinstance(wanted, int) or wanted == config.sequences_per_step(dp):
        return config
    at_once = mesh.per_replica_batch * dp
    arithmetic = f"per_replica_batch {mesh.per_replica_batch} x dp {dp} = {at_once}"
    if wanted % at_once:
        raise ConfigError(
            f"the run takes {wanted} sequences a step, which {arithmetic} at a time do not make up ({wanted} / "
            f"{at_once} = {wanted / at_once:.3g} gradient_accumulation_steps): use another number of hosts, or another "
            "per_replica_batch"
        )
    steps = wanted // at_once
    logger.info(
        "the run keeps its %d sequences a step: %s, times %d gradient_accumulation_steps (the config has %d)",
        wanted, arithmetic, steps, mesh.gradient_accumulation_steps,
    )  # fmt: skip
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, gradient_accumulation_steps=steps))


def restored_run(aux: Mapping[str, Any], step: int, sequences: int, tokens: int, run_id: str) -> RunState:
    """The run's record in a checkpoint; for one of the 2021 library, which kept none, what its step tells.

    sequences, tokens: of one step.
    """
    found = aux.get("run")
    if found is not None:
        return RunState.from_json(found)
    logger.info("the checkpoint is of the 2021 library: sequences and tokens so far are worked out from its step")
    return RunState(run_id, step=step, sequences=step * sequences, tokens=step * tokens)


def absolute(path: str) -> str:
    """The same path whatever the working directory."""
    path = storage.normalise(path)
    return path if storage.is_url(path) else os.path.realpath(path)


def _newest_details(store: CheckpointStore) -> tuple[int, dict[str, Any]] | None:
    """The newest step whose manifest can be read (restoring may pass over further ones), and what it says."""
    steps = store.steps()
    damage: DamagedError | None = None
    for step in reversed(steps):
        try:
            found = manifest.read(store.path(step))
            if found is not None and all(leaf.name != layout.COUNT for leaf in found.leaves):
                raise CheckpointError(
                    f"{store.path(step)} is slim: it holds no optimizer state, so its run cannot go on from it; choose "
                    f"another model_dir, and begin at these weights with --tune-model-path {store.path(step)}"
                )
            return step, found.details if found is not None else {}
        except DamagedError as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return None


def _refuse_own_folder(tune_path: str, model_dir: str) -> None:
    source, target = absolute(tune_path), absolute(model_dir)
    if source == target or source.startswith(target + "/"):
        raise ConfigError(
            f"--tune-model-path {tune_path} lies in model_dir ({model_dir}), where the new run would write: choose "
            "another model_dir, or leave --tune-model-path out to continue that run"
        )


def _refuse_other_run(store: CheckpointStore, step: int, details: Mapping[str, Any], tune_path: str) -> None:
    origin = details.get("aux", {}).get("run", {}).get("tuned_from")
    if origin == absolute(tune_path):
        return
    began = f"fine-tuned from {origin}" if origin else "trained from its own start"
    raise CheckpointError(
        f"{store.model_dir} holds a run at step {step} that was {began}, not from {tune_path}: choose another "
        "model_dir, leave --tune-model-path out to continue it, or pass --new to start over"
    )
