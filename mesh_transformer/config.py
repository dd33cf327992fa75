"""A run's config: JSON in, frozen dataclasses out, everything wrong with it reported at once.

    python -m mesh_transformer.config FILE [--devices N]

prints what a config means. Nothing here imports jax or touches a device, so a mistake shows within a second.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from mesh_transformer import storage
from mesh_transformer.config_fields import MOST, Spec, check_value, fields_of, nearest, shorten, specs_of
from mesh_transformer.config_groups import DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig
from mesh_transformer.config_rules import derive, relations
from mesh_transformer.errors import ConfigError

__all__ = ["Config", "DataConfig", "MeshConfig", "ModelConfig", "OptimConfig", "RunConfig", "load_config"]

GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "mesh": MeshConfig,
    "optim": OptimConfig,
    "data": DataConfig,
    "run": RunConfig,
}
SPECS: dict[str, Spec] = {name: spec for group in GROUPS.values() for name, spec in specs_of(group).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A config that has passed `load_config`: every default filled in, every derived value worked out.

    Only total_steps, warmup_steps and anneal_steps may still be None, until `resolve_epochs` knows the records.
    """

    model: ModelConfig
    mesh: MeshConfig
    optim: OptimConfig
    data: DataConfig
    run: RunConfig
    source: str | None = dataclasses.field(default=None, compare=False)
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False)  # keys not defaulted

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON keys and values; `load_config` of it gives an equal config."""
        flat: dict[str, Any] = {}
        for group_name, group in GROUPS.items():
            values = getattr(self, group_name)
            for key, (field, _) in fields_of(group).items():
                value = values.d_head if key == "d_head" else getattr(values, field)
                flat[key] = list(value) if isinstance(value, tuple) else value
        return flat

    @property
    def version(self) -> int:
        """Which network: 1, the Megatron-style, or 2, the ZeRO-style."""
        return self.model.version

    @property
    def heads_per_shard(self) -> int:
        return self.model.n_heads // self.mesh.cores_per_replica

    def sequences_per_step(self, dp: int) -> int:
        """Sequences of one update: A * per_replica_batch * dp."""
        return self.mesh.gradient_accumulation_steps * self.mesh.per_replica_batch * dp

    def tokens_per_step(self, dp: int) -> int:
        return self.sequences_per_step(dp) * self.model.seq

    def agreement(self, dp: int | None = None, tokenizer: str | None = None, data: str | None = None) -> dict[str, Any]:
        """What two runs must share for one to resume the other, flat.

        dp: adds the sequences of one update, however they are split over A, per_replica_batch and dp.
        tokenizer: the hash of the one that made the data; without one, the last part of the config's tokenizer's path
            or name, since folders may differ. A hash and a name are not compared with each other.
        data: the training data's fingerprint; without one, nothing is said about the data.
        """
        flat = self.to_dict()
        agreed = {key: flat[key] for key, spec in SPECS.items() if spec.agrees}
        if tokenizer is not None:
            agreed["tokenizer_hash"] = tokenizer
        else:
            agreed["tokenizer"] = PurePosixPath(self.data.tokenizer).name
        if self.model.norm == "layernorm-desync":  # each shard has its own norm, so the mesh is part of the model
            agreed["cores_per_replica"] = self.mesh.cores_per_replica
        if dp is not None:
            agreed["sequences_per_step"] = self.sequences_per_step(dp)
        if data is not None:
            agreed["data"] = data
        return agreed


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """One line per key whose values differ between two agreements: `a` of the existing run, `b` of this config.

    Keys that only one of them has are not compared, so that runs of older versions still resume.
    """
    lines = []
    for key in sorted(a.keys() & b.keys()):
        if a[key] != b[key]:
            line = f"{key} was {a[key]!r} in the run and is {b[key]!r} in this config"
            if key in ("warmup_steps", "anneal_steps"):
                line += f' (it follows total_steps unless it is given: "{key}": {a[key]})'
            lines.append(line)
    return lines


def load_config(source: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> Config:
    """Reads and checks a config: a JSON file (a path, or any URL that storage reads) or a dict of its keys.

    `overrides` are keys that count instead of the file's, such as those of a script's flags; None leaves the file's.
    Raises ConfigError with one line per problem, all problems at once. Whether files exist is not checked here.
    """
    chosen = {key: value for key, value in overrides.items() if value is not None}
    if isinstance(source, Mapping):
        return _build({**source, **chosen}, [], None)
    path = os.fspath(source)
    raw, problems = _read(path)
    return _build({**raw, **chosen}, problems, path)


def _read(path: str) -> tuple[dict[str, Any], list[str]]:
    """The keys of a JSON file, and a line for each key that it gives twice."""
    try:
        with storage.open_file(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise ConfigError(f"{path}: the config cannot be read: {reason}") from error
    problems: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                problems.append(
                    f"{key} is given twice: {shorten(repr(seen[key]))} and {shorten(repr(value))}; keep one"
                )
            seen[key] = value
        return seen

    try:
        raw = json.loads(text, object_pairs_hook=pairs)
    except ValueError as error:
        raise ConfigError(f"{path}: this is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a config is one JSON object of keys and values, not {shorten(repr(raw))}")
    return raw, problems


def _build(raw: dict[str, Any], problems: list[str], source: str | None) -> Config:
    problems = problems + [
        f"{key} is not a known key; the nearest is {nearest(str(key), SPECS)!r}" for key in raw if key not in SPECS
    ]
    values, good = {}, set()
    for key, spec in SPECS.items():
        values[key] = spec.default
        if key in raw:
            values[key], problem = check_value(key, raw[key], spec)
        else:
            problem = f"{key} is missing; it must be {spec.rule} ({spec.meaning})" if spec.required else None
        problems += [problem] if problem else []
        good |= set() if problem else {key}
    problems += relations(values, good, raw)
    if problems:
        name = source or "config"
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    values = derive(values, raw, source)
    groups = {
        group_name: group(**{field: values[key] for key, (field, _) in fields_of(group).items()})
        for group_name, group in GROUPS.items()
    }
    return Config(**groups, source=source, given=frozenset(raw))


def resolve_epochs(config: Config, n_records: int, dp: int) -> Config:
    """`config` with total_steps worked out of epochs; unchanged where total_steps is given.

    total_steps = ceil(epochs * n_records / sequences of one update): batches run on across the end of an epoch, and
    only the last step may begin another pass. One epoch is the guide's ceil(sequences / (A * per_replica_batch * dp)).
    """
    if config.data.epochs is None:
        return config
    if n_records < 1:
        raise ConfigError(f"epochs ({config.data.epochs:g}) needs a train_set with records, found {n_records}")
    values = config.to_dict()
    steps = math.ceil(config.data.epochs * n_records / config.sequences_per_step(dp))
    if steps > MOST:
        raise ConfigError(f"epochs ({config.data.epochs:g}) of {n_records} records are {steps:g} steps, above {MOST}")
    values.update(total_steps=steps, epochs=None)
    values = derive(values, values, config.source)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, epochs=None),
        run=dataclasses.replace(config.run, total_steps=steps),
        optim=dataclasses.replace(
            config.optim, warmup_steps=values["warmup_steps"], anneal_steps=values["anneal_steps"]
        ),
    )


def check_mesh(config: Config, n_devices: int) -> tuple[int, int]:
    """(dp, mp) on `n_devices` devices. Raises ConfigError naming both numbers where they do not fit."""
    mp = config.mesh.cores_per_replica
    if n_devices < 1:
        raise ConfigError(f"{n_devices} devices were asked for; a replica takes cores_per_replica ({mp})")
    if n_devices % mp:
        fewer = n_devices // mp * mp
        use = f"use {fewer} of them with --devices {fewer}, or " if fewer else ""
        noun = "device" if n_devices == 1 else "devices"
        raise ConfigError(
            f"{n_devices} {noun} cannot be split into replicas of cores_per_replica ({mp}): {use}"
            f"set cores_per_replica to a divisor of {n_devices} (any checkpoint loads at any value), "
            f"or simulate {max(mp, fewer + mp)} devices with --platform cpu --devices {max(mp, fewer + mp)}"
        )
    dp, stage = n_devices // mp, config.mesh.zero_stage
    cut = {"d_model": config.model.d_model} | ({"seq": config.model.seq} if config.model.pe == "fixed" else {})
    for key, size in cut.items():
        if stage and size % dp:
            raise ConfigError(
                f"zero_stage {stage} splits {key} ({size}) over the {dp} replicas of {n_devices} devices, which must "
                f"divide it: use another number of devices, a larger cores_per_replica than {mp}, or zero_stage 0"
            )
    return dp, mp


def mesh_notice(config: Config, n_devices: int) -> str | None:
    """A line for people where tpu_size, which decides nothing, is not the number of devices in use."""
    if config.mesh.tpu_size in (None, n_devices):
        return None
    return f"note: tpu_size is {config.mesh.tpu_size}, but {n_devices} devices are used"


def check_training(config: Config) -> None:
    """Raises ConfigError for what is sound without an optimizer and is not in training."""
    lost = (
        "16-bit {0} lose every update below 1/256 of the value (most of them, at fine-tuning rates) to save 2 bytes "
        "per {1}; set it to false, or use compute_dtype bfloat16 for speed"
    )
    problems = []
    if config.model.early_cast:
        problems.append("early_cast cannot be used in training: " + lost.format("master weights", "parameter"))
    if config.optim.bf16_optimizer:
        problems.append("bf16_optimizer cannot be used in training: " + lost.format("Adam moments", "moment"))
    if config.run.eval_only:
        problems.append("eval_only loads no optimizer, so nothing can be trained; set it to false")
    if not storage.can_list(config.run.directory):
        problems.append(
            f"model_dir ({config.run.directory}) is a URL that can only be read; checkpoints go to a local folder or gs://"
        )
    if problems:
        name = config.source or "config"
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))


def check_interpreter() -> None:
    """Raises ConfigError under `python -O`: dm-haiku takes modules off its stack inside of asserts."""
    if not __debug__:
        raise ConfigError(
            "dm-haiku, and so the network, does not work under `python -O` or PYTHONOPTIMIZE: leave them out"
        )


if __name__ == "__main__":
    import runpy  # by name: the report stands above this module, which may not import it

    runpy.run_module("mesh_transformer.config_report", run_name="__main__", alter_sys=True)
