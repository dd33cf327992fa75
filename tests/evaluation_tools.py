"""A small model, trained for some seconds on Python's standard library: its checkpoint, config and tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import json
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from conftest import mesh_of, tiny

from mesh_transformer import CausalTransformer, load_config
from mesh_transformer.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TASKS = {name: str(ROOT / f"data/eval/python_{name}.yaml") for name in ("order", "word", "text", "line")}
SEQ, VOCAB = 64, 2048
STEPS, BATCH = 300, 16
SIZES = {
    "layers": 2, "d_model": 64, "n_heads": 4, "n_vocab": VOCAB, "seq": SEQ, "pe_rotary_dims": 8,
    "per_replica_batch": BATCH, "lr": 1e-2, "end_lr": 1e-3, "warmup_steps": 10, "anneal_steps": STEPS - 10,
    "total_steps": STEPS,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trained:
    """A folder with tokenizer.json and step_1, the config that fits them, and the last training loss."""

    folder: Path
    config: dict[str, Any]
    loss: float

    @property
    def step_dir(self) -> str:
        return str(self.folder / "step_1")

    @property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.config["tokenizer"])

    def config_file(self, mp: int) -> str:
        path = self.folder / f"mp{mp}.json"
        path.write_text(json.dumps(self.config | {"cores_per_replica": mp}))
        return str(path)

    def network(self, dp: int, mp: int) -> CausalTransformer:
        net = CausalTransformer(load_config(self.config | {"cores_per_replica": mp}), mesh_of(dp, mp))
        net.load_ckpt(self.step_dir, optimizer=False)
        return net


@functools.cache
def trained() -> Trained:
    """Trained on packages of the library whose modules the example tasks do not use, which are at its top."""
    folder = Path(tempfile.mkdtemp(prefix="evaluation-"))
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = ("asyncio", "email", "json", "logging", "http", "unittest", "xml", "concurrent", "importlib")
    files = [path for name in packages for path in sorted((library / name).rglob("*.py")) if "test" not in path.parts]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    tokenizer = train_tokenizer(texts[:60], VOCAB, str(folder / "tokenizer.json"))
    ids = np.concatenate(tokenizer.encode_batch(["<|endoftext|>" + text for text in texts]))
    config = tiny(**SIZES, tokenizer=str(folder / "tokenizer.json"), model_dir=str(folder), name="trained")
    net = CausalTransformer(load_config(config), mesh_of(1, 1))
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = random.integers(0, len(ids) - SEQ - 1, BATCH)
        rows = ids[starts[:, None] + np.arange(SEQ + 1)].astype(np.int32)[None]
        metrics = net.train({"obs": rows[..., :-1], "target": rows[..., 1:]})
    net.write_ckpt(folder / "step_1")
    (folder / "meta.json").write_text('{"step": 1, "checkpoints": [1], "aux": {"1": {}}}')
    return Trained(folder, config, float(jax.device_get(metrics["cross_entropy"])))
