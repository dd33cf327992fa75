"""What the tests of device_train.py share: tiny records, a run in a folder of its own, a signal at a chosen step."""

import json
import signal
from pathlib import Path

import numpy as np
from conftest import mesh_of

import device_train
from mesh_transformer import CausalTransformer, load_config
from mesh_transformer.checkpoint import formats
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.data.records import RecordWriter

ROOT = Path(__file__).resolve().parent.parent
A, DP, MP, S, V = 2, 2, 4, 16, 64
PER_STEP = A * DP  # sequences
KEYS = {
    "layers": 2, "d_model": 32, "n_heads": 8, "n_vocab": V, "seq": S, "pe_rotary_dims": 4, "compute_dtype": "float32",
    "cores_per_replica": MP, "per_replica_batch": 1, "gradient_accumulation_steps": A,
    "lr": 1e-2, "end_lr": 1e-3, "warmup_steps": 2, "anneal_steps": 6, "total_steps": 6,
    "train_set": "train.index", "val_set": {"v": "val.index"}, "val_batches": 20, "val_batch_multiplier": 2,
}  # fmt: skip


def counting(count, seed):
    """[count, S + 1]: sequences that count upwards in threes, so that there is something to learn."""
    starts = np.random.default_rng(seed).integers(0, V, count)
    return (starts[:, None] + 3 * np.arange(S + 1)) % V


def write_file(path, count, seed):
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for tokens in counting(count, seed):
            writer.write({"text": tokens})


def write_masked_file(path, count, seed, bad):
    """As `write_file`, with a mask: 1, and infinity in the records `bad`, so that their loss is not finite."""
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for number, tokens in enumerate(counting(count, seed)):
            writer.write({"text": tokens, "mask": np.full(S + 1, np.inf if number in bad else 1.0)})


def make_data(folder):
    """train.index: files of 12 (three steps exactly) and 20 records; val.index: 10 records."""
    for name, count, seed in (("a", 12, 0), ("b", 20, 1), ("v", 10, 2)):
        write_file(folder / f"{name}.tfrecords", count, seed)
    (folder / "train.index").write_text("a.tfrecords\nb.tfrecords\n")
    (folder / "val.index").write_text("v.tfrecords\n")
    return folder


def straight_run(folder, data):
    """Six steps without a stop, validated and saved every second step."""
    run = Run(folder, data, val_every=2, ckpt_every=2)
    assert run() == 0
    return run


class Run:
    """A run in a folder of its own: its config, its commands, and what it left."""

    def __init__(self, folder, data_dir, devices=DP * MP, **keys):
        self.folder, self.devices = folder, devices
        self.model_dir = folder / "model"
        self.keys = {**KEYS, "data_dir": str(data_dir), "model_dir": str(self.model_dir), "name": "tiny", **keys}

    def arguments(self, *more, **keys):
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "config.json"
        path.write_text(json.dumps(self.keys | keys))
        return ["--config", str(path), "--platform", "cpu", "--devices", str(self.devices), *more]

    def __call__(self, *more, **keys):
        return device_train.main(self.arguments(*more, **keys))

    @property
    def lines(self):
        return [json.loads(line) for line in (self.model_dir / "metrics.jsonl").read_text().splitlines()]

    def lines_so_far(self):
        """How many lines a run that may not have begun has written."""
        path = self.model_dir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    @property
    def trace(self):
        """What must be the same bit for bit however the run was cut: everything but the times."""
        timed = (
            "time",
            "train/step_seconds",
            "train/steps_per_sec",
            "train/tokens_per_sec",
            "train/model_flops_per_sec",
        )
        return [{key: value for key, value in line.items() if key not in timed} for line in self.lines]

    @property
    def store(self):
        return CheckpointStore(self.model_dir)

    def tensors(self, step):
        """Every array of a saved step, by file and number."""
        folder = self.model_dir / f"step_{step}"
        found = {}
        for path in sorted(folder.glob("shard_*/*.npz")):
            with np.load(path) as arrays:
                found |= {f"{path.relative_to(folder)}/{name}": arrays[name] for name in arrays.files}
        return found

    def files(self):
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in self.model_dir.rglob("*")
        }

    def config(self, **changes):
        return load_config(self.keys | changes)

    @property
    def mesh(self):
        return mesh_of(DP, MP)

    def state(self, step):
        return formats.read_step(self.model_dir / f"step_{step}", self.config().model, self.mesh)


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def interrupt_at(monkeypatch, call, number=signal.SIGTERM):
    """A signal arrives while update number `call` of this process is being dispatched."""
    real, calls = CausalTransformer.train, []

    def train(self, batch):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(number)
        return real(self, batch)

    monkeypatch.setattr(CausalTransformer, "train", train)
