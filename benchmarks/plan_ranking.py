"""Does the plan rank ways to train as a CPU does? Every (dp, mp) of 8 simulated devices, remat and accumulation.

    python benchmarks/plan_ranking.py [--rounds 3]

A small model, 16 sequences an update. Each way is compiled; its steps are timed one after the other, all ways in a
round, so that what else the machine does falls on all alike; the fastest round counts. Writes
docs/measurements/plan-ranking.json: for each way predicted and compiled bytes, and predicted and measured step
times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "docs/measurements/plan-ranking.json"
DEVICES, SEQUENCES = 8, 16
MODEL: dict[str, Any] = {
    "layers": 4, "d_model": 256, "n_heads": 8, "n_vocab": 4096, "seq": 256, "pe_rotary_dims": 32, "lr": 1e-4,
    "total_steps": 10, "train_set": "x.index", "model_dir": "x", "compute_dtype": "float32",
}  # fmt: skip


def ways() -> list[dict[str, Any]]:
    """The declared grid, as keys of the config."""
    found = []
    for mp in (1, 2, 4, 8):
        for microbatches in (1, 2):
            for remat in ("none", "dots", "full"):
                rows = SEQUENCES * mp // DEVICES // microbatches
                found.append({"cores_per_replica": mp, "gradient_accumulation_steps": microbatches,
                              "per_replica_batch": rows, "remat": remat})  # fmt: skip
    return found


class Way:
    """One way to train, compiled."""

    def __init__(self, keys: dict[str, Any]) -> None:
        import jax
        import numpy as np

        from mesh_transformer import load_config, make_mesh, steps
        from mesh_transformer.planning import chips
        from mesh_transformer.planning.analytic import analytic
        from mesh_transformer.planning.estimate import time_of
        from mesh_transformer.transformer_shard import train_step
        from mesh_transformer.transformer_zero import network_of

        config = load_config({**MODEL, **keys})
        network = network_of(config, make_mesh(config, jax.devices()[:DEVICES]))
        A, rows = keys["gradient_accumulation_steps"], SEQUENCES // keys["gradient_accumulation_steps"]
        ids = np.random.default_rng(0).integers(0, MODEL["n_vocab"], (A, rows, MODEL["seq"] + 1)).astype(np.int32)
        batch = steps.Batch(ids[..., :-1], ids[..., 1:], np.ones((A, rows, MODEL["seq"]), np.float32))
        self._batch = steps.place(network.mesh, steps.BATCH_SPEC, batch)
        self._state = network.state
        step = train_step(network.model, config.optim, network.mesh, network.zero)
        self._step = step.lower(self._state, self._batch).compile()
        memory = self._step.memory_analysis()
        topology = chips.topology(f"cpu:{DEVICES}")
        estimate = analytic(config, topology, keys["remat"])
        self.found: dict[str, Any] = {
            **keys,
            "predicted_bytes": round(estimate.peak),
            "compiled_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
            "predicted_seconds": time_of(estimate, topology).in_turn,
            "measured_seconds": float("inf"),
        }
        self.step()

    def step(self) -> float:
        import jax

        began = time.perf_counter()
        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - began


def correlation(rows: list[dict[str, Any]]) -> float:
    """Spearman's: 1 where the predicted order is the measured one, 0 where they have nothing in common."""
    import numpy as np

    ranks = [np.argsort(np.argsort([row[key] for row in rows])) for key in ("predicted_seconds", "measured_seconds")]
    return float(np.corrcoef(*ranks)[0, 1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is timed (default: 3)")
    rounds = parser.parse_args(arguments).rounds
    from mesh_transformer.mesh import choose_platform

    choose_platform("cpu", DEVICES)
    compiled = []
    for keys in ways():
        compiled.append(Way(keys))
        print(f"compiled {keys}", flush=True)
    loads = [os.getloadavg()[0]]
    for _ in range(rounds):
        for way in compiled:
            way.found["measured_seconds"] = min(way.found["measured_seconds"], way.step())
        loads.append(os.getloadavg()[0])
    rows = [way.found for way in compiled]
    result = {"cores": os.cpu_count(), "load": [round(load, 1) for load in loads], "rounds": rounds, "ways": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"rank correlation {correlation(rows):.2f}; wrote {RESULTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
