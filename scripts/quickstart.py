"""From nothing to a trained GPT and its first words: what `make quickstart` runs.

python scripts/quickstart.py [--short] [--steps N] [--directory DIR]

Each stage is an ordinary command, printed before it runs; README.md shows them one by one. A stage whose result is
there already is not run again, and training continues where it stopped: interrupt it and run it again.
--short makes everything small, to see in a minute or two that all of it works; it learns next to nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Path("configs/quickstart.json")
SHORT_DIRECTORY = Path("runs/quickstart-short")
MEGABYTES = 5.0
SHORT_STEPS, SHORT_MEGABYTES = 20, 0.6
DEVICES = ("--platform", "cpu", "--devices", "8")
# None ends with a space: that belongs to the token that follows.
PROMPTS = ("def __init__(self", "import", '    """Return the')
EXIT_USER, EXIT_INTERRUPTED = 2, 75


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command of the quickstart. It is not run where `result` exists; None: run it every time."""

    title: str
    command: tuple[str, ...]
    result: Path | None = None


def in_directory(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The same run with its data and its checkpoints under another folder."""
    data = directory / "data"
    return config | {
        "data_dir": str(data),
        "tokenizer": str(data / "tokenizer.json"),
        "model_dir": str(directory / "model"),
    }


def with_steps(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """The same run over another number of steps, its warm-up in proportion, validated and saved at least 4 times."""
    warmup = max(1, steps * config["warmup_steps"] // config["total_steps"])
    period = max(1, min(config["val_every"], steps // 4))
    return config | {
        "total_steps": steps,
        "warmup_steps": warmup,
        "anneal_steps": max(0, steps - warmup),
        "val_every": period,
        "ckpt_every": period,
    }


def stages(config: dict[str, Any], path: Path, megabytes: float, prompts: tuple[str, ...] = PROMPTS) -> list[Stage]:
    """The commands, in order. config: the contents of the file `path`, which they name."""
    data, model = Path(config["data_dir"]), Path(config["model_dir"])
    text, name = data / "text", config["train_set"].removesuffix(".train.index")
    tokenizer, picture = config["tokenizer"], model / "loss.png"
    collect = ("scripts/collect_python_text.py", "--output-dir", str(text), "--max-mb", f"{megabytes:g}")
    tokenize = ("scripts/train_tokenizer.py", str(text), "--output", tokenizer, "--vocab-size", str(config["n_vocab"]))
    records = (
        "create_finetune_tfrecords.py", str(text), name, "--output-dir", str(data), "--config", str(path),
        "--val-fraction", "0.05", "--split-by", "file", "--index",
    )  # fmt: skip
    train = ("device_train.py", "--config", str(path), *DEVICES)
    plot = ("scripts/plot_loss.py", str(model / "metrics.jsonl"), "--output", str(picture), "--title", config["name"])
    sample = ("device_sample.py", "--config", str(path), "--max-tokens", "64", "--seed", "1", *DEVICES)
    return [
        Stage("text: the sources of Python's own standard library", collect, text),
        Stage(f"a byte-level BPE tokenizer of {config['n_vocab']} tokens", tokenize, Path(tokenizer)),
        Stage("records for training and validation, split by file", records, data / config["train_set"]),
        Stage(f"training, {config['total_steps']} steps on 8 simulated devices", train),
        Stage("the loss curve", plot),
        *(Stage("a sample", (*sample, "--prompt", prompt)) for prompt in prompts),
    ]


def run(stage: Stage, number: int, count: int) -> int:
    """Print the stage's command, run it, and return its exit status; 0 at once where its result exists."""
    python = Path(sys.executable)
    shown = python.relative_to(ROOT) if python.is_relative_to(ROOT) else python
    print(f"\n[{number}/{count}] {stage.title}\n$ {shlex.join([str(shown), *stage.command])}", flush=True)
    if stage.result is not None and (ROOT / stage.result).exists():
        print(f"{stage.result} is there already", flush=True)
        return 0
    start = time.monotonic()
    child = subprocess.Popen([sys.executable, *stage.command], cwd=ROOT)
    # Ctrl-C reaches the child too, which saves and exits; leaving before it would cut that short. SIGTERM is passed on.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: child.terminate()),
    }
    try:
        status = child.wait()
    finally:
        for number_of, handler in before.items():
            signal.signal(number_of, handler)
    print(f"({time.monotonic() - start:.0f} s)", flush=True)
    return status


def closing(config: dict[str, Any], path: Path) -> str:
    """What a person can do next, as commands."""
    return f"""
Done. Checkpoints, metrics and the loss curve are in {config["model_dir"]}.

Write more with it:       python device_sample.py --config {path} {" ".join(DEVICES)}
Train it for longer:      raise total_steps in {path}, and run the training command again: it continues
Start over:               python device_train.py --config {path} {" ".join(DEVICES)} --new
Train on your own text:   README.md, "Your own data"
"""


def prepare(options: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """The config that the options ask for, and the file that holds it: the shipped one, or one made from it."""
    config = json.loads((ROOT / CONFIG).read_text(encoding="utf-8"))
    if options.directory is None and options.steps is None:
        return config, CONFIG
    directory = options.directory or Path(f"runs/quickstart-{options.steps}")
    config = in_directory(config, directory)
    if options.steps is not None:
        config = with_steps(config, options.steps)
    path = directory / "config.json"
    (ROOT / directory).mkdir(parents=True, exist_ok=True)
    (ROOT / path).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config, path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_STEPS} steps on {SHORT_MEGABYTES} MB of text")
    parser.add_argument("--steps", type=int, help="steps to train instead of the config's")
    parser.add_argument("--directory", type=Path, help="folder for everything instead of the config's")
    options = parser.parse_args(arguments)
    if options.short:
        options.steps = options.steps or SHORT_STEPS
        options.directory = options.directory or SHORT_DIRECTORY
    if options.steps is not None and options.steps < 1:
        print(f"error: --steps is {options.steps}; it must be 1 or more", file=sys.stderr)
        return EXIT_USER
    config, path = prepare(options)
    megabytes, prompts = (SHORT_MEGABYTES, PROMPTS[:1]) if options.short else (MEGABYTES, PROMPTS)
    todo = stages(config, path, megabytes, prompts)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    for number, stage in enumerate(todo, start=1):
        status = run(stage, number, len(todo))
        if status == EXIT_INTERRUPTED:
            print("interrupted and saved: run the same command again to continue")
        if status:
            return status
    print(closing(config, path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
