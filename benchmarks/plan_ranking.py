"""Does the plan rank ways to train as a CPU does? Every (dp, mp) of 8 simulated devices, remat and accumulation.

    python benchmarks/plan_ranking.py [--model first|second] [--rounds 3]

A small model, 16 sequences an update. Each way is compiled; its steps are timed one after the other, all ways in a
round, so that what else the machine does falls on all alike; the fastest round counts. Writes
docs/measurements/plan-ranking.json: for each way compiled bytes and measured step times, beside which
scripts/plan_docs.py sets what is predicted. What the plan knows of a CPU was not fitted to either model's times, but
what it left out was found on the first one's; the second was measured after that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "docs/measurements/plan-ranking.json"
DEVICES, SEQUENCES = 8, 16
KEYS = ("cores_per_replica", "gradient_accumulation_steps", "per_replica_batch", "remat")
COMMON: dict[str, Any] = {
    "n_heads": 8, "pe_rotary_dims": 32, "lr": 1e-4, "total_steps": 10, "train_set": "x.index", "model_dir": "x",
    "compute_dtype": "float32",
}  # fmt: skip
MODELS = {
    "first": COMMON | {"layers": 4, "d_model": 256, "n_vocab": 4096, "seq": 256},
    "second": COMMON | {"layers": 6, "d_model": 384, "n_vocab": 2048, "seq": 128},
}


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


def predicted(model: str, way: dict[str, Any]) -> tuple[float, float, float]:
    """Bytes of a device and seconds of a step, as the plan has them; and the seconds of a plain roofline, in which
    memory is hidden by products."""
    from mesh_transformer import load_config
    from mesh_transformer.planning import chips
    from mesh_transformer.planning.analytic import analytic
    from mesh_transformer.planning.estimate import time_of

    topology = chips.topology(f"cpu:{DEVICES}")
    config = load_config(MODELS[model] | {key: way[key] for key in KEYS})
    estimate = analytic(config, topology, way["remat"])
    plain = dataclasses.replace(topology.chip, one_engine=False, fresh_bandwidth=math.inf)
    roofline = time_of(estimate, dataclasses.replace(topology, chip=plain))
    return estimate.peak, time_of(estimate, topology).in_turn, roofline.in_turn


class Way:
    """One way to train, compiled."""

    def __init__(self, model: str, keys: dict[str, Any]) -> None:
        import jax
        import numpy as np

        from mesh_transformer import load_config, make_mesh, steps
        from mesh_transformer.transformer_shard import train_step
        from mesh_transformer.transformer_zero import network_of

        config = load_config(MODELS[model] | keys)
        network = network_of(config, make_mesh(config, jax.devices()[:DEVICES]))
        A, rows, S = (
            keys["gradient_accumulation_steps"],
            SEQUENCES // keys["gradient_accumulation_steps"],
            config.model.seq,
        )
        ids = np.random.default_rng(0).integers(0, config.model.n_vocab, (A, rows, S + 1)).astype(np.int32)
        batch = steps.Batch(ids[..., :-1], ids[..., 1:], np.ones((A, rows, S), np.float32))
        self._batch = steps.place(network.mesh, steps.BATCH_SPEC, batch)
        self._state = network.state
        step = train_step(network.model, config.optim, network.mesh, network.zero)
        self._step = step.lower(self._state, self._batch).compile()
        memory = self._step.memory_analysis()
        self.found: dict[str, Any] = {
            **keys,
            "compiled_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
            "measured_seconds": float("inf"),
        }
        self.step()

    def step(self) -> float:
        import jax

        began = time.perf_counter()
        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - began


def correlation(predictions: Sequence[float], measurements: Sequence[float]) -> float:
    """Spearman's: 1 where the predicted order is the measured one, 0 where they have nothing in common. Equal times
    share the mean of their ranks."""
    import numpy as np

    times = (np.asarray(each)[:, None] for each in (predictions, measurements))
    return float(np.corrcoef(*((each > each.T).sum(1) + (each == each.T).sum(1) / 2 for each in times))[0, 1])


def fresh_rate() -> float:
    """Bytes a second at which memory that is new to this process can be written: the system hands it out by pages."""
    import numpy as np

    count, best = 200_000_000, 0.0
    for _ in range(3):
        new = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        began = time.perf_counter()
        np.frombuffer(new, np.uint8)[:] = 1
        best = max(best, count / (time.perf_counter() - began))
    return best


def results() -> dict[str, dict[str, Any]]:
    """What was measured, by model."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="first", help="which model (default: first)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is timed (default: 3)")
    options = parser.parse_args(arguments)
    from mesh_transformer.mesh import choose_platform

    choose_platform("cpu", DEVICES)
    compiled, fresh = [], round(fresh_rate() / 1e9, 1)
    for keys in ways():
        compiled.append(Way(options.model, keys))
        print(f"compiled {keys}", flush=True)
    load = round(os.getloadavg()[0], 1)
    for _ in range(options.rounds):
        for way in compiled:
            way.found["measured_seconds"] = min(way.found["measured_seconds"], way.step())
    rows = [way.found for way in compiled]
    result = {
        "cores": os.cpu_count(), "load": load, "fresh_gb_per_second": fresh, "rounds": options.rounds, "ways": rows,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(results() | {options.model: result}, indent=1) + "\n", encoding="utf-8")
    found = correlation([predicted(options.model, row)[1] for row in rows], [row["measured_seconds"] for row in rows])
    print(f"rank correlation {found:.2f}; wrote {RESULTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
