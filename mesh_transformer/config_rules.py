"""What involves several config keys: contradictions between them, and defaults worked out of others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from mesh_transformer.config_fields import nearest, shorten

WARMUP_SHARE = 0.05  # of total_steps; the fine-tuning guide says 5 to 10 %
END_LR_SHARE = 0.1  # of lr; the guide says a fifth or a tenth
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*[a-z0-9]")

Values = Mapping[str, Any]
Have = Callable[..., bool]


def relations(values: Values, good: set[str], raw: Values) -> list[str]:
    """One line per contradiction between keys. Only keys in `good`, each sound by itself, are looked at."""

    def have(*keys: str) -> bool:
        return good.issuperset(keys)

    rules = (_shards, _heads, _merged_heads, _rotary, _schedule, _length, _places, _sets)
    return [problem for rule in rules for problem in rule(values, have, raw)]


def _shards(values: Values, have: Have, raw: Values) -> Iterator[str]:
    for key, per in (("n_heads", "head"), ("n_vocab", "row of the vocabulary"), ("d_model", "dimension")):
        if have(key, "cores_per_replica") and values[key] % values["cores_per_replica"]:
            yield (
                f"{key} ({values[key]}) must be divisible by cores_per_replica ({values['cores_per_replica']}), "
                f"since every {per} lives on one shard; change one of the two"
            )
    if (
        have("tpu_size", "cores_per_replica")
        and values["tpu_size"]
        and values["tpu_size"] % values["cores_per_replica"]
    ):
        yield (
            f"tpu_size ({values['tpu_size']}) must be divisible by cores_per_replica ({values['cores_per_replica']}); "
            "leave tpu_size out to use whatever devices there are"
        )


def _heads(values: Values, have: Have, raw: Values) -> Iterator[str]:
    if not have("d_model", "n_heads", "d_head", "version"):
        return
    d_model, n_heads, d_head = values["d_model"], values["n_heads"], values["d_head"]
    if d_head is None and d_model % n_heads:
        yield f"d_model ({d_model}) must be divisible by n_heads ({n_heads}); change one of the two"
    if d_head is not None and d_head * n_heads != d_model and values["version"] == 1:
        yield (
            f"d_head ({d_head}) must be d_model / n_heads ({d_model / n_heads:g}); "
            'leave d_head out, or set "version": 2, whose heads may have any size'
        )


def _merged_heads(values: Values, have: Have, raw: Values) -> Iterator[str]:
    if not have("v2_merged_heads", "version", "n_heads") or values["v2_merged_heads"] is None:
        return
    merged, n_heads = values["v2_merged_heads"], values["n_heads"]
    if values["version"] == 1 and "version" in raw:
        yield f'v2_merged_heads ({merged}) belongs to version 2; leave it out, or set "version": 2'
    if n_heads % merged:
        yield (
            f"n_heads ({n_heads}) must be divisible by v2_merged_heads ({merged}), the cores_per_replica that the "
            "reference checkpoint was trained with"
        )


def _rotary(values: Values, have: Have, raw: Values) -> Iterator[str]:
    # Version 2 is always rotary, whatever pe says.
    if not have("pe", "version", "d_model", "n_heads", "d_head", "pe_rotary_dims"):
        return
    if values["pe"] != "rotary" and values["version"] == 1:
        return
    if values["d_head"] is None and values["d_model"] % values["n_heads"]:
        return  # said by _heads
    d_head, dims = values["d_head"] or values["d_model"] // values["n_heads"], values["pe_rotary_dims"]
    if dims is None and d_head % 2:
        yield f"the head size ({d_head}) is odd and rotary turns pairs; set an even pe_rotary_dims below it"
    if dims is not None and dims > d_head:
        yield (
            f"pe_rotary_dims ({dims}) must be at most the head size ({d_head} = d_model / n_heads); "
            "lower it, or leave it out to turn the whole head"
        )
    if dims is not None and dims % 2:
        yield f"pe_rotary_dims ({dims}) must be even, since rotary turns pairs; use {dims - 1} or {dims + 1}"


def _schedule(values: Values, have: Have, raw: Values) -> Iterator[str]:
    if have("lr", "end_lr") and values["end_lr"] is not None and values["end_lr"] > values["lr"]:
        yield (
            f"end_lr ({values['end_lr']:g}) must be at most lr ({values['lr']:g}), since the rate is annealed from lr "
            f"down to end_lr; a tenth of lr is {values['lr'] / 10:g}"
        )


def _length(values: Values, have: Have, raw: Values) -> Iterator[str]:
    if not have("total_steps", "epochs"):
        return
    if values["total_steps"] is None and values["epochs"] is None:
        yield "total_steps is missing; it must be an integer >= 1 (updates of the run), or give epochs instead"
    if values["total_steps"] is not None and values["epochs"] is not None:
        yield (
            f"total_steps ({values['total_steps']}) and epochs ({values['epochs']:g}) both say how long to train; "
            "keep one of the two"
        )


def _places(values: Values, have: Have, raw: Values) -> Iterator[str]:
    if not have("bucket", "model_dir") or values["bucket"] is None:
        return
    bucket, model_dir = values["bucket"], values["model_dir"]
    if not BUCKET.fullmatch(bucket):
        yield (
            f"bucket is {shorten(repr(bucket))}; it must be a bucket's bare name, without gs:// or slashes; "
            "leave it out to keep model_dir as it stands"
        )
    if model_dir is not None and ("://" in model_dir or model_dir.startswith("/")):
        yield (
            f"model_dir ({shorten(model_dir)}) is absolute, so it cannot lie in bucket ({bucket}); "
            "leave bucket out, or make model_dir relative"
        )


def _sets(values: Values, have: Have, raw: Values) -> Iterator[str]:
    if have("val_set", "keep_best") and values["keep_best"] is not None:
        best, names = values["keep_best"], values["val_set"]
        if not names:
            yield f"keep_best is {best!r}, but val_set is empty; add it to val_set, or leave keep_best out"
        elif best not in names:
            yield f"keep_best is {best!r}, which is not in val_set; did you mean {nearest(best, names)!r}?"
    if have("wandb_mode", "trackers") and raw.get("wandb_mode") == "online" and "wandb" not in values["trackers"]:
        yield 'wandb_mode is "online", but trackers does not name wandb; add "wandb" to trackers'


def derive(values: Values, raw: Values, source: str | None) -> dict[str, Any]:
    """`values` with every default filled in that follows from other keys.

    Steps stay None while total_steps is not known. The result does not depend on the machine.
    """
    found = dict(values)
    found["val_set"] = dict(found["val_set"])
    if found["v2_merged_heads"] is not None:
        found["version"] = 2
    if found["version"] == 2:  # as in the reference, whose configs were those of version 1
        found["norm"], found["pe"] = "layernorm", "rotary"
    if found["zero_stage"] is None:
        found["zero_stage"] = 3 if found["version"] == 2 else 0
    if found["ckpt_format"] is None:
        found["ckpt_format"] = "orbax" if found["version"] == 2 else "shards"
    if found["d_head"] is not None and found["d_head"] * found["n_heads"] == found["d_model"]:
        found["d_head"] = None  # it says nothing that d_model / n_heads does not
    if found["end_lr"] is None:
        found["end_lr"] = found["lr"] * END_LR_SHARE
    total = found["total_steps"]
    if total is not None:
        if found["warmup_steps"] is None:
            found["warmup_steps"] = round(total * WARMUP_SHARE)
        if found["anneal_steps"] is None:
            found["anneal_steps"] = max(total - found["warmup_steps"], 0)
    if found["name"] is None:
        found["name"] = PurePosixPath(source).stem if source else "run"
    if found["model_dir"] is None:
        found["model_dir"] = f"runs/{found['name']}"
    if "eval_every" not in raw:
        found["eval_every"] = found["val_every"]
    if found["keep_best"] is None and found["val_set"]:
        found["keep_best"] = next(iter(found["val_set"]))
    if "jsonl" not in found["trackers"]:
        found["trackers"] = ("jsonl", *found["trackers"])
    return found
