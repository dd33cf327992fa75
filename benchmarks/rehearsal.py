"""Rehearse conversions at full size: write a GPT-J-6B-shaped slim checkpoint, re-shard it, export it to Hugging Face.

    python benchmarks/rehearsal.py --folder /data/rehearsal --table docs/measurements/2021-06-30-rehearsal.md
    python benchmarks/rehearsal.py --layers 2 --d-model 512 --n-heads 8 --n-vocab 4096     # a small one

Each stage runs in a process of its own, which reports its peak resident memory, and is compared with a plain copy of
the same files, made in the same run. Everything is flushed to the disk within the time, and read from the disk, not
from the cache. Beside each peak stands what is promised: two of the largest tensors and 300 MB. Needs room for two
checkpoints (25 GB for 6B): what a stage has written goes when it is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHARDS = 8
STAGES = ("write", "copy", "reshard to 1", "reshard to 16", "slim to f16", "export to Hugging Face")
BLOCK = 1 << 24  # random values drawn at a time


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--d-model", type=int, default=4096)
    parser.add_argument("--n-heads", type=int, default=16)
    parser.add_argument("--n-vocab", type=int, default=50400)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16", help="of the checkpoint")
    parser.add_argument("--folder", help="where to write (default: a temporary folder, removed)")
    parser.add_argument("--table", metavar="FILE", help="also write the table there, in Markdown")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def config_of(options: argparse.Namespace) -> Any:
    """The config of a model of these sizes."""
    from mesh_transformer.config import load_config

    return load_config({
        "layers": options.layers, "d_model": options.d_model, "n_heads": options.n_heads, "n_vocab": options.n_vocab,
        "seq": 2048, "pe_rotary_dims": min(64, options.d_model // options.n_heads), "cores_per_replica": SHARDS,
        "total_steps": 1, "train_set": "none", "model_dir": "none",
    })  # fmt: skip


def random_tensors(model: Any, dtype: str) -> Iterator[Any]:
    """Every parameter, of random values between 2^-7 and 2 with a random sign."""
    from mesh_transformer.checkpoint.casting import FLOAT_TYPES
    from mesh_transformer.checkpoint.streaming import Tensor, tensor_leaves

    rng = np.random.default_rng(0)
    bits_of, kept, forced = {"bf16": (np.uint16, 0x83FF, 0x3C00), "f32": (np.uint32, 0x83FFFFFF, 0x3C000000)}[dtype]
    for leaf in tensor_leaves(model, SHARDS):
        bits = np.empty(leaf.whole_shape, bits_of)
        flat = bits.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            run = flat[start : start + BLOCK]
            # Random signs and mantissas, and exponents of 7 values: drawing normal deviates takes ten times as long.
            run[:] = rng.integers(0, 1 << 8 * bits.itemsize, run.size, bits_of)
            run &= kept
            run |= forced
        yield Tensor(leaf, bits.view(FLOAT_TYPES[dtype]), FLOAT_TYPES[dtype])


def promised(options: argparse.Namespace) -> int:
    """Bytes of memory that a conversion may take: two of the largest tensors and 300 MB."""
    itemsize = {"bf16": 2, "f32": 4}[options.dtype]
    return 2 * itemsize * max(options.n_vocab, 4 * options.d_model) * options.d_model + 300_000_000


def run_stage(options: argparse.Namespace) -> dict[str, float]:
    """One stage in this process: seconds, bytes of what it writes or reads, and peak memory in bytes."""
    folder = Path(options.folder)
    config, source = config_of(options), folder / "source"
    out = folder / options.stage.replace(" ", "_")
    from mesh_transformer.checkpoint import convert as conversion
    from mesh_transformer.checkpoint import huggingface, layout, publish
    from mesh_transformer.checkpoint.casting import FLOAT_TYPES

    stages: dict[str, Callable[[], object]] = {
        "write": lambda: publish.write_weights(
            source, config.model, SHARDS, random_tensors(config.model, options.dtype), {layout.STEP: 1},
            {"config": config.to_dict(), "agreement": config.agreement()},
        ),
        "copy": lambda: copy(source, out),
        "reshard to 1": lambda: conversion.reshard(source, out, 1),
        "reshard to 16": lambda: conversion.reshard(source, out, 16),
        "slim to f16": lambda: conversion.slim(source, out, FLOAT_TYPES["f16"]),
        "export to Hugging Face": lambda: huggingface.convert(source, config, out, dtype=options.dtype, tokenizer=None),
    }  # fmt: skip
    forget(source)
    began = time.monotonic()
    stages[options.stage]()
    written = source if options.stage == "write" else out
    sync(written)
    seconds = time.monotonic() - began
    return {"seconds": seconds, "bytes": size(written), "peak": peak_memory()}


def copy(source: Path, out: Path) -> None:
    shutil.copytree(source, out)


def sync(folder: Path) -> None:
    """Flush all files of a folder; those that are on the disk already cost nothing."""
    for path in files(folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def forget(folder: Path) -> None:
    """Drop the cached pages of all files of a folder, so that they are read from the disk."""
    for path in files(folder):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def peak_memory() -> int:
    """The most resident memory that this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def rehearse(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All stages, each in a process of its own; rows of the table."""
    rows: list[dict[str, Any]] = []
    keys = ("layers", "d_model", "n_heads", "n_vocab", "dtype")
    sizes = [f"--{key.replace('_', '-')}={getattr(options, key)}" for key in keys]
    for stage in STAGES:
        command = [sys.executable, __file__, *sizes, "--folder", str(folder), "--stage", stage]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        rows.append({"stage": stage, **json.loads(done.stdout.splitlines()[-1])})
        print(json.dumps(rows[-1]), flush=True)
        if stage != "write":
            shutil.rmtree(folder / stage.replace(" ", "_"))
    return rows


def table(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    speed = {row["stage"]: row["bytes"] / row["seconds"] / 1e6 for row in rows}
    lines = [
        f"{options.layers} layers, d_model {options.d_model}, n_vocab {options.n_vocab}, {SHARDS} shards, "
        f"{options.dtype}: {rows[0]['bytes'] / 1e9:.2f} GB, on {os.cpu_count()} cores, by "
        "`python benchmarks/rehearsal.py`.",
        "",
        "| stage | written, GB | seconds | MB/s | of the copy's MB/s | peak memory, GB | promised, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stage = row["stage"]
        lines.append(
            f"| {stage} | {row['bytes'] / 1e9:.2f} | {row['seconds']:.1f} | {speed[stage]:.0f} | "
            f"{speed[stage] / speed['copy']:.2f} | {row['peak'] / 1e9:.2f} | {promised(options) / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.stage:
        print(json.dumps(run_stage(options)))
        return 0
    with tempfile.TemporaryDirectory(prefix="rehearsal-", dir=options.folder) as folder:
        text = table(options, rehearse(options, Path(folder)))
    print(text)
    if options.table:
        heading = f"# Conversions at full size, {datetime.date.today()}\n\n"
        Path(options.table).write_text(heading + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
