"""The grids on which plans are fitted, checked and shown, and what the compiler found for them.

    python benchmarks/plan_cases.py              # what is missing, and how far arithmetic is off
    python benchmarks/plan_cases.py --compile    # compile what is missing: minutes a case, hours in all

FIT: what the constants of `planning.footprint` and `planning.accesses` were chosen on. CHECK: what they were not. What
the compiler found is kept in docs/measurements/plans.json, from which scripts/plan_docs.py writes the pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from mesh_transformer.config import Config
    from mesh_transformer.planning.estimate import Estimate

RESULTS = ROOT / "docs/measurements/plans.json"
SMALL: dict[str, Any] = {
    "layers": 8, "d_model": 1024, "n_heads": 8, "n_vocab": 32000, "seq": 512, "per_replica_batch": 4,
    "gradient_accumulation_steps": 2, "norm": "layernorm", "pe": "rotary", "pe_rotary_dims": 64, "lr": 1e-4,
    "total_steps": 10, "train_set": "x.index", "model_dir": "x",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A config, or the small one above, with these keys instead, on a topology."""

    topology: str
    remat: str
    file: str | None = None
    keys: tuple[tuple[str, Any], ...] = ()
    task: str = "train"

    @property
    def name(self) -> str:
        keys = ", ".join(f"{key} {json.dumps(value)}" for key, value in self.keys)
        how = f"remat {self.remat}" if self.task == "train" else f"to {self.task}"
        return f"{self.file or 'small'} on {self.topology}, {how}" + (f", {keys}" if keys else "")

    def config(self) -> Config:
        from mesh_transformer import load_config

        source: Any = SMALL if self.file is None else ROOT / "configs" / self.file
        return load_config(source, **dict(self.keys))

    def analytic(self) -> Estimate:
        from mesh_transformer.planning import analytic, chips

        return analytic.analytic(self.config(), chips.topology(self.topology), self.remat, self.task)

    def exact(self, found: dict[str, Any]) -> Estimate:
        """The estimate of what the compiler `found`."""
        from mesh_transformer.planning import chips, exact

        return exact.estimate_of(self.config(), chips.topology(self.topology), self.remat, self.task, found)


def small(topology: str, remat: str, mp: int, **keys: Any) -> Case:
    return Case(topology, remat, None, (("cores_per_replica", mp), *keys.items()))


def shipped(file: str, topology: str, remat: str, **keys: Any) -> Case:
    return Case(topology, remat, file, tuple(keys.items()))


FIT = (
    small("v5e:2x4", "none", 1, seq=1024, per_replica_batch=2),
    small("v5e:2x4", "dots", 4),
    small("v5e:2x4", "full", 4),
    small("v5e:2x4", "dots", 1),
    small("v5e:2x4", "dots", 4, per_replica_batch=16),
    small("v5e:2x4", "full", 1, zero_stage=3),
    small("v5e:2x4", "none", 4, version=2, early_collect=False, zero_stage=0),
    shipped("6B_roto_256.json", "v3:2x2", "dots"),
)
CHECK = (
    shipped("6B_roto_256.json", "v4:2x2x1", "full", cores_per_replica=4),
    shipped("6B_roto_256.json", "v5e:4x4", "dots", cores_per_replica=8, zero_stage=1),
    small("v5e:2x4", "dots", 1, zero_stage=1),
    shipped("20B_v1.json", "v4:2x2x4", "dots", zero_stage=3),
    shipped("40B_v1.json", "v4:2x4x4", "full"),
    shipped("175B_v1.json", "v4:4x4x8", "full"),
    shipped("175B_v1.json", "v4:4x8x8", "full"),
    shipped("6B_roto_256.json", "v5e:16x16", "dots", cores_per_replica=8),
    small("v5e:2x4", "full", 1, per_replica_batch=16, gradient_accumulation_steps=1),
    shipped("13B_v1.json", "v4:4x4x4", "full"),
    shipped("13B_v2.json", "v4:2x4x4", "full"),
    small("v5e:2x4", "dots", 2, version=2, zero_stage=3, early_collect=True),
    small("v5e:2x4", "full", 2, version=2, zero_stage=3, early_collect=True, layers=4, gradient_accumulation_steps=1),
    dataclasses.replace(shipped("6B_roto_256.json", "v5e:2x4", "dots"), task="eval"),
    dataclasses.replace(shipped("6B_roto_256.json", "v5e:2x4", "dots"), task="generate"),
)


def results() -> dict[str, dict[str, Any]]:
    """What the compiler found, by the names of the cases; none where nothing was compiled yet."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def keep(case: Case, found: dict[str, Any], seconds: float) -> None:
    """Adds a case to the file; of collectives that are alike, how often they run."""
    alike: dict[str, dict[str, Any]] = {}
    for one in found["collectives"]:
        key = json.dumps([one["kind"], one["axis"], one["devices"], one["bytes"]])
        alike.setdefault(key, {**one, "runs": 0})["runs"] += one["runs"]
    versions = {"jax": metadata.version("jax"), "libtpu": _libtpu()}
    kept = results() | {
        case.name: {**found, "collectives": list(alike.values()), **versions, "seconds": round(seconds)}
    }
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _libtpu() -> str:
    from mesh_transformer.planning import exact

    path = Path(exact.library() or "")
    infos = list(path.parent.parent.glob("libtpu-*.dist-info"))
    return infos[0].name.removeprefix("libtpu-").removesuffix(".dist-info") if infos else "unknown"


def compile_missing() -> None:
    from mesh_transformer.planning import chips, exact

    for case in (*FIT, *CHECK):
        if case.name in results():
            continue
        print(case.name, flush=True)
        began = time.monotonic()
        topology = chips.topology(case.topology)
        found = exact.compiled(exact.request_of(case.config(), topology, case.remat, case.task))
        keep(case, found, time.monotonic() - began)


def errors(case: Case, found: dict[str, Any]) -> tuple[float, float, float]:
    """Arithmetic over what the compiler found, less 1: of the peak, FLOPs, and bytes accessed."""
    ours, theirs = case.analytic(), case.exact(found)
    return ours.peak / theirs.peak - 1, ours.flops / theirs.flops - 1, ours.accessed / theirs.accessed - 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the cases that were not compiled yet")
    if parser.parse_args(arguments).compile:
        compile_missing()
    known = results()
    for title, cases in (("fit", FIT), ("check", CHECK)):
        for case in cases:
            off = [f"{error:+.1%}" for error in errors(case, known[case.name])] if case.name in known else ["missing"]
            print(f"{title:<6} {case.name}: {' '.join(off)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
