"""What a config means, in words and figures: `python -m mesh_transformer.config FILE [--devices N]`.

Weights are not read and no accelerator is started: JAX, which the schedule needs, is kept on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mesh_transformer.command_line import complain
from mesh_transformer.config import GROUPS, Config, check_mesh, load_config, mesh_notice, resolve_epochs
from mesh_transformer.config_fields import Spec, fields_of, specs_of
from mesh_transformer.config_records import count_records
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError

if TYPE_CHECKING:
    from mesh_transformer.parameters import Kind

F32, BF16 = 4, 2  # bytes of a number
ZERO = {
    0: "every replica holds all of it",
    1: "moments are cut over the replicas",
    3: "weights, gradients and moments are cut over the replicas",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes that one device holds through a whole run; activations come on top, see `activation_lines`."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def device_bytes(config: Config, dp: int = 1) -> DeviceBytes:
    """What one device of `dp` replicas holds of the training state: its blocks of what is cut, the whole of others.

    With zero_stage 1 moments are cut over the replicas too, with 3 weights and gradients as well.
    """
    mp, stage = config.mesh.cores_per_replica, config.mesh.zero_stage
    whole, cut = (sum(math.prod(kind.local_shape(mp, parts)) for kind in _kinds(config)) for parts in (1, dp))
    return DeviceBytes(
        weights=(cut if stage == 3 else whole) * (BF16 if config.model.early_cast else F32),
        gradients=(cut if stage == 3 else whole) * F32,
        optimizer=2 * (cut if stage else whole) * (BF16 if config.optim.bf16_optimizer else F32),
    )


def activations(config: Config) -> str:
    """About what one device needs for the activations of one microbatch, as the config or the platform decides."""
    from mesh_transformer.memory import activation_bytes

    model, mesh = config.model, config.mesh
    dtype = model.compute_dtype or "bfloat16"
    itemsize = F32 if dtype == "float32" else BF16
    tokens = mesh.per_replica_batch * model.seq
    choices = ("dots", "full") if model.remat == "auto" else (model.remat,)
    needed = {remat: activation_bytes(model, mesh.cores_per_replica, tokens, remat, itemsize) for remat in choices}
    about = " or ".join(f"about {size(count, exact=False)} with remat {remat}" for remat, count in needed.items())
    # XLA computes bfloat16 in float32 on a CPU, and keeps it so.
    twice = "" if itemsize == F32 else "; on a CPU twice as much"
    return f"{about}, in {dtype}{twice}"


def collected_bytes(config: Config) -> int:
    """What `early_collect` adds on one device: the weights of all layers, whole over the replicas, for a whole step."""
    mp, layers = config.mesh.cores_per_replica, [kind for kind in _kinds(config) if kind.stacked and kind.zero]
    width = F32 if config.model.compute_dtype == "float32" else BF16
    return width * sum(math.prod(kind.local_shape(mp)) for kind in layers)


def _zero_lines(config: Config, dp: int) -> list[str]:
    """What zero_stage does to the bytes of a device, beside the other stages; nothing to say of one replica."""
    if dp == 1:
        return []
    totals = {
        stage: device_bytes(
            dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, zero_stage=stage)), dp
        ).total
        for stage in ZERO
    }
    stage = config.mesh.zero_stage
    others = ", ".join(f"stage {other} {size(total, exact=False)}" for other, total in totals.items() if other != stage)
    lines = [f"zero_stage {stage}      {ZERO[stage]}, dp {dp}; with {others} a device"]
    if stage == 3 and config.version == 2 and config.run.early_collect:
        lines.append(f"early_collect     holds all layers' weights besides: {size(collected_bytes(config))}")
    return lines


def _kinds(config: Config) -> tuple[Kind, ...]:
    from mesh_transformer import parameters

    return parameters.kinds(config.model, config.mesh.cores_per_replica)


def report(config: Config, n_devices: int | None = None) -> str:
    """The whole report. n_devices: default tpu_size, or else one replica. Raises ConfigError where they do not fit."""
    from mesh_transformer import parameters

    assumed = config.mesh.tpu_size or config.mesh.cores_per_replica if n_devices is None else n_devices
    dp, mp = check_mesh(config, assumed)
    records = count_records(config.data.train_path)
    if records:
        config = resolve_epochs(config, records, dp)
    held = device_bytes(config, dp)
    desync = config.model.norm == "layernorm-desync"
    lines = [config.source or "config", f"checkpoints and metrics go to {config.run.directory}", ""]
    lines += _keys(config)
    notice = mesh_notice(config, assumed)
    lines += [
        "",
        f"devices           {assumed}"
        + ("" if n_devices is not None else " (assumed; --devices N for another number)"),
        *([f"                  {notice}"] if notice else []),
        f"mesh              dp {dp} x mp {mp}: {_some(dp, 'replica')} of {_some(mp, 'device')}, "
        f"{_some(config.heads_per_shard, 'head')} on each device",
        f"update            {_batch(config, dp)}",
        f"parameters        {parameters.count(config.model, mp):,}"
        + (f" (each of the {mp} parts has its own norms)" if desync else " (the same on every mesh)"),
        f"per device        {size(held.total)}, and activations on top",
        f"  weights         {size(held.weights)}",
        f"  gradients       {size(held.gradients)}",
        f"  optimizer       {size(held.optimizer)}",
        f"  activations     {activations(config)}",
        *_zero_lines(config, dp),
        "",
        *schedule_lines(config, dp, records),
    ]
    warnings = advice(config, dp)
    if warnings:
        lines += ["", "This departs from the advice for fine-tuning (from scratch, larger rates are usual):"]
        lines += [f"  warning: {warning}" for warning in warnings]
    return "\n".join(lines) + "\n"


def _keys(config: Config) -> list[str]:
    """Every key with its value, and whether it was given or comes from a default."""
    flat = config.to_dict()
    lines = []
    for group_name, group in GROUPS.items():
        lines.append(f"[{group_name}]")
        for key, (_, spec) in fields_of(group).items():
            value = flat[key] if isinstance(flat[key], str) else json.dumps(flat[key])
            lines.append(f"  {key:<28}{value}{'' if key in config.given else _origin(spec)}")
    return lines


def _some(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _origin(spec: Spec) -> str:
    return f"  (default: {spec.derived})" if spec.derived else "  (default)"


def _batch(config: Config, dp: int) -> str:
    mesh = config.mesh
    return (
        f"{config.tokens_per_step(dp):,} tokens = {config.sequences_per_step(dp)} sequences "
        f"({mesh.gradient_accumulation_steps} microbatches x {mesh.per_replica_batch} x dp {dp}) of {config.model.seq}"
    )


def schedule_lines(config: Config, dp: int, records: int | None) -> list[str]:
    """The learning rate at the steps where it turns, in steps and epochs."""
    total = config.run.total_steps
    if total is None:
        return [
            f"learning rate     not known: epochs ({config.data.epochs:g}) needs the number of records, "
            f"and {config.data.train_path} or the files that it lists cannot be counted here"
        ]
    from mesh_transformer.mesh import choose_platform
    from mesh_transformer.optimizer import schedule

    choose_platform("cpu")
    rate = schedule(config.optim)
    warm, anneal = config.optim.warmup_steps, config.optim.anneal_steps
    turns: dict[int, str] = {0: "first update"}
    names = ((warm, "warm-up ends"), (warm + anneal // 2, "half annealed"), (warm + anneal, "annealing ends"))
    for step, name in (*names, (total, "run ends")):
        turns[step] = f"{turns[step]}, {name}" if step in turns else name
    per_step = config.sequences_per_step(dp) / records if records else None
    lines = [f"{total:,} steps" + (f" = {total * per_step:.2f} epochs of {records:,} sequences" if per_step else "")]
    lines += [f"{'step':>10}  {'epoch':>8}  learning rate"]
    for step in sorted(turns):
        epoch = f"{step * per_step:.2f}" if per_step else "?"
        beyond = " (beyond the run)" if step > total else ""
        lines.append(f"{step:>10}  {epoch:>8}  {float(rate(step)):.4g}  {turns[step]}{beyond}")
    if not per_step:
        lines.append(f"epochs are not known: the records of {config.data.train_path} cannot be counted here")
    return lines


def advice(config: Config, dp: int) -> list[str]:
    """One line for each departure from the fine-tuning guide."""
    optim, total = config.optim, config.run.total_steps
    found = []
    if not 1e-5 <= optim.lr <= 5e-5:
        found.append(f"lr ({optim.lr:g}) is outside 1e-5 to 5e-5")
    if not optim.lr / 10 * 0.999 <= optim.end_lr <= optim.lr / 5 * 1.001:
        found.append(f"end_lr ({optim.end_lr:g}) is outside lr/10 to lr/5 ({optim.lr / 10:g} to {optim.lr / 5:g})")
    if optim.weight_decay != 0.1:
        found.append(f"weight_decay ({optim.weight_decay:g}) is not 0.1")
    if total is not None:
        warm, rest = optim.warmup_steps, total - optim.warmup_steps
        # A whole number of steps cannot always be within 5 to 10 %, so one step on either side is no departure.
        if not math.floor(total * 0.05) <= warm <= math.ceil(total * 0.1):
            share = f"{warm / total:.1%} of total_steps ({total})"
            found.append(
                f"warmup_steps ({warm}) is {share}; advised are 5 to 10 %, {total * 0.05:.0f} to {total * 0.1:.0f}"
            )
        if optim.anneal_steps != rest:
            effect = (
                "the run ends before annealing does"
                if optim.anneal_steps > rest
                else "the rest of the run stays at end_lr"
            )
            found.append(f"anneal_steps ({optim.anneal_steps}) is not total_steps - warmup_steps ({rest}); {effect}")
    return found + _advice_on_validation(config, dp)


def _advice_on_validation(config: Config, dp: int) -> list[str]:
    batch = config.mesh.per_replica_batch * dp * config.data.val_batch_multiplier
    found = []
    for name, path in config.data.val_paths.items():
        records = count_records(path)
        needed = math.ceil(records / batch) if records else 0
        if records and config.data.val_batches < needed:
            covered = config.data.val_batches * batch
            found.append(
                f"val_batches ({config.data.val_batches}) reads {covered} of the {records} sequences of {name}; "
                f"{needed} batches of {batch} read all"
            )
    return found


def size(count: int, exact: bool = True) -> str:
    """Bytes for people, in binary units; `exact`: and as they are."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, _ = value / 1024, units.pop(0)
    rounded = f"{count} B" if units[0] == "B" else f"{value:.2f} {units[0]}"
    return f"{rounded} ({count:,} bytes)" if exact and units[0] != "B" else rounded


def markdown() -> str:
    """The tables of docs/config.md: every key with type, default, unit and meaning."""
    tables = {name: specs_of(group) for name, group in GROUPS.items()}
    lines = []
    for name, specs in tables.items():
        lines += [f"## {name}", "", "| key | value | default | unit | meaning |", "|---|---|---|---|---|"]
        for key, spec in specs.items():
            default = "**required**" if spec.required else spec.derived or f"`{json.dumps(spec.default)}`"
            lines.append(f"| `{key}` | {spec.rule} | {default} | {spec.unit} | {spec.meaning} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report of a config file; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mesh_transformer.config", description="Print what a config means, without starting a device."
    )
    parser.add_argument("file", nargs="?", help="the config, a path or URL")
    parser.add_argument("--devices", type=int, help="number of devices (default: tpu_size, or one replica)")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/config.md instead")
    options = parser.parse_args(arguments)
    if options.markdown:
        sys.stdout.write(markdown())
        return EXIT_DONE
    if options.file is None:
        parser.error("the following arguments are required: file")
    try:
        sys.stdout.write(report(load_config(options.file), options.devices))
    except MeshTransformerError as error:
        return complain(error)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
