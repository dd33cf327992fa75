"""This project's side of `generate.py`. Arguments: shape (JSON), simulated devices, which split the model (mp)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from worker import serve  # noqa: E402

from mesh_transformer import CausalTransformer, load_config, make_mesh  # noqa: E402
from mesh_transformer.checkpoint import huggingface  # noqa: E402
from mesh_transformer.generation import Stream  # noqa: E402
from mesh_transformer.mesh import simulate_devices  # noqa: E402
from mesh_transformer.sampler import sampler_of  # noqa: E402


def prompts_of(shape: dict[str, int], batch: int) -> list[list[int]]:
    """The same ids in both workers."""
    return np.random.default_rng(batch).integers(0, shape["n_vocab"], (batch, shape["prompt"])).tolist()


def main() -> None:
    shape, devices = json.loads(sys.argv[1]), int(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    simulate_devices(devices)
    config = load_config({
        "layers": shape["layers"], "d_model": shape["d_model"], "n_heads": shape["n_heads"], "seq": shape["seq"],
        "n_vocab": shape["n_vocab"], "pe_rotary_dims": shape["rotary"], "per_replica_batch": 1, "lr": 1e-4,
        "cores_per_replica": devices, "total_steps": 100, "compute_dtype": "float32", "train_set": "none.index",
    })  # fmt: skip
    network = CausalTransformer(config, make_mesh(config))
    network.state = network.state._replace(opt_state=None)

    def generate(batch: int, count: int) -> dict[str, Any]:
        prompts = prompts_of(shape, batch)
        start = time.perf_counter()
        work = Stream(
            network.model, network.mesh, network.weights, prompts, [count] * batch, sampler_of({"temp": 0}, batch),
            [()] * batch,
        )  # fmt: skip
        pieces = [next(work)]
        first = time.perf_counter() - start
        pieces += work
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "first": first,
            "tokens": [sum((p.tokens[i] for p in pieces), []) for i in range(batch)],
        }

    def export() -> dict[str, Any]:
        folder = Path(sys.argv[3])
        network.write_ckpt(folder / "step_1")
        huggingface.convert(folder / "step_1", config, folder / "hf", dtype="fp32")
        return {"folder": str(folder / "hf")}

    counts = {"generate": shape["count"]}
    requests = {
        f"{name} {batch}": lambda batch=batch, count=count: generate(batch, count)
        for name, count in counts.items()
        for batch in (1, 8)
    }
    versions = {"python": sys.version.split()[0], "jax": jax.__version__}
    serve(lambda: None, {**requests, "export": export, "versions": lambda: versions})


if __name__ == "__main__":
    main()
