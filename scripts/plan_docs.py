"""Writes the figures of docs/planning.md and docs/scale.md, and their pictures.

python scripts/plan_docs.py           write them anew
python scripts/plan_docs.py --check   say what would change, and exit 1 if anything would

A page's prose stands in the page; what lies between `<!-- begin NAME -->` and `<!-- end NAME -->` is written here, by
arithmetic and from what benchmarks/plan_cases.py compiled and benchmarks/plan_ranking.py measured. It takes a
minute, most of it searches.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from benchmarks.plan_cases import Case
    from mesh_transformer.config import Config
    from mesh_transformer.planning.chips import Topology
    from mesh_transformer.planning.estimate import Estimate

PAGES = {"planning": ROOT / "docs/planning.md", "scale": ROOT / "docs/scale.md"}
IMAGES = ROOT / "docs/images"
SHOWN = ("v3", "v4", "v5e", "v5p", "v6e", "h100")
GPTJ = "6B_roto_256.json"


def row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def table(head: str, rows: Iterator[str]) -> str:
    """`head`: the titles of the columns, between semicolons."""
    titles = head.split("; ")
    return "\n".join([row(*titles), row(*["---"] * len(titles)), *rows])


def load(file: str, **keys: object) -> Config:
    from mesh_transformer import load_config

    return load_config(ROOT / "configs" / file, **keys)


def chip_table() -> str:
    from mesh_transformer.planning.chips import CHIPS, GIB

    return table(
        "chip; memory, usable GiB; bfloat16 TFLOP/s; memory GB/s; a link, GB/s one way; network GB/s; devices a chip; "
        "largest slice",
        (
            row(c.name, f"{c.memory / GIB:.1f}, {c.usable / GIB:.2f}", f"{c.flops / 1e12:g}",
                f"{c.memory_bandwidth / 1e9:g}", f"{c.link_bandwidth / 1e9:g}", f"{c.network_bandwidth / 1e9:g}",
                c.devices, c.largest if c.dims else "-")
            for c in CHIPS.values()
        ),
    )  # fmt: skip


def sources() -> str:
    from mesh_transformer.planning.chips import CHIPS

    found: dict[str, list[str]] = {}
    for chip in CHIPS.values():
        found.setdefault(chip.source, []).append(chip.name)
    return "\n".join(f"- {', '.join(names)}: {source}" for source, names in found.items())


def plan_of(case: Case) -> tuple[Topology, Estimate]:
    """The compiled plan, where there is one, or by arithmetic."""
    from benchmarks.plan_cases import results
    from mesh_transformer.planning import chips

    known = results()
    found = known.get(case.name)
    return chips.topology(case.topology), case.exact(found) if found else case.analytic()


def example() -> str:
    """What scripts/plan.py prints for GPT-J-6B on a v3-8."""
    from benchmarks.plan_cases import shipped
    from mesh_transformer.planning import report

    case = shipped(GPTJ, "v3:2x2", "dots")
    topology, estimate = plan_of(case)
    config = dataclasses.replace(case.config(), source=f"configs/{GPTJ}")
    return f"```\n{report.text(config, topology, estimate)}```"


def search_example() -> str:
    """The head of a search's output."""
    import contextlib
    import io

    from scripts import plan

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        plan.main(["--config", str(ROOT / "configs" / GPTJ), "--topology", "v5e-16", "--search", "--sequences", "64",
                   "--analytic"])  # fmt: skip
    lines = out.getvalue().replace(f"{ROOT}/", "").split("\n\nbest: ")
    best = lines[1].splitlines()[0]
    return f"```\n{lines[0]}\n\nbest: {best}\n```"


def errors(which: str) -> str:
    """Each case of a grid with what arithmetic says too much or too little."""
    from benchmarks import plan_cases
    from mesh_transformer.planning.chips import GIB

    known = plan_cases.results()
    cases = [case for case in {"fit": plan_cases.FIT, "check": plan_cases.CHECK}[which] if case.name in known]
    worst = [max(map(abs, each)) for each in zip(*(plan_cases.errors(c, known[c.name]) for c in cases), strict=True)]

    def rows() -> Iterator[str]:
        for case in cases:
            peak, flops, accessed = plan_cases.errors(case, known[case.name])
            found = known[case.name]
            yield row(case.name, f"{found['peak'] / GIB:.2f} GiB", f"{peak:+.1%}", f"{found['flops'] / 1e12:.2f}",
                          f"{flops:+.2%}", f"{accessed:+.0%}", f"{found['seconds']} s")  # fmt: skip

    head = "case; compiled peak; arithmetic; compiled TFLOP; arithmetic; bytes of memory; to compile"
    return f"{table(head, rows())}\n\nFurthest off: {worst[0]:.1%} of the peak, {worst[1]:.2%} of the FLOPs."


def ranking() -> str:
    from benchmarks import plan_ranking

    known = plan_ranking.results()
    missing = (f"Of the {name} model nothing is measured yet: `python benchmarks/plan_ranking.py --model {name}`."
               for name in plan_ranking.MODELS if name not in known)  # fmt: skip
    return "\n\n".join([*(ranked(name, found) for name, found in known.items()), *missing])


def ranked(model: str, found: dict[str, Any]) -> str:
    """The ways to train one of the ranking's models, in the order that was predicted."""
    from benchmarks import plan_ranking

    ways = [(way, *plan_ranking.predicted(model, way)) for way in found["ways"]]
    measured = [way["measured_seconds"] for way, *_ in ways]
    full, plain = (plan_ranking.correlation([each[place] for each in ways], measured) for place in (2, 3))
    order = sorted(ways, key=lambda each: each[2])
    offs = [size / way["compiled_bytes"] - 1 for way, size, *_ in ways]
    ratios = [seconds / way["measured_seconds"] for way, _, seconds, _ in ways]
    keys = plan_ranking.MODELS[model]
    says = (
        f"The {model} model: {keys['layers']} layers of {keys['d_model']}, {keys['seq']} positions, a vocabulary of "
        f"{keys['n_vocab']:,}. Rank correlation (Spearman) of predicted and measured step times over {len(ways)} ways: "
        f"**{full:.2f}**; of a plain roofline's, {plain:.2f}. The way that was predicted to be the fastest takes "
        f"{order[0][0]['measured_seconds'] / min(measured):.2f} times the fastest one's time. Predicted times are "
        f"{min(ratios):.2f} to {max(ratios):.2f} of the measured ones, predicted bytes of a device {min(offs):+.0%} to "
        f"{max(offs):+.0%} off the compiled program's. {found['cores']} cores, which write "
        f"{found['fresh_gb_per_second']} GB/s of fresh memory; the fastest of {found['rounds']} rounds; load "
        f"{found['load']} when they began, in which the compilation of all ways counts."
    )

    def rows() -> Iterator[str]:
        for place, (way, size, seconds, roofline) in enumerate(order, 1):
            mp = way["cores_per_replica"]
            yield row(place, f"{plan_ranking.DEVICES // mp} x {mp}", way["gradient_accumulation_steps"], way["remat"],
                      f"{seconds * 1e3:.0f}", f"{roofline * 1e3:.0f}", f"{way['measured_seconds'] * 1e3:.0f}",
                      f"{size / 2**20:.0f}", f"{way['compiled_bytes'] / 2**20:.0f}")  # fmt: skip

    head = (
        "place; dp x mp; accumulation; remat; predicted ms; plain roofline ms; measured ms; predicted MiB; compiled MiB"
    )
    return f"{says}\n\n{table(head, rows())}"


def published() -> str:
    """Predictions beside what the 2021 library was reported to reach; nothing is calibrated."""
    from mesh_transformer.planning import chips
    from mesh_transformer.planning.analytic import analytic
    from mesh_transformer.planning.estimate import time_of

    topology = chips.topology("v3-8")
    shape = {"layers": 32, "d_model": 2560, "n_heads": 32, "seq": 2048, "per_replica_batch": 1}
    cases = (("GPT-J-6B fine-tuning", load("example_config.json"), 5000.0, None),
             ("a 2.7B model", load(GPTJ, **shape), None, 2.45e14))  # fmt: skip

    def rows() -> Iterator[str]:
        for name, config, tokens, flops in cases:
            for remat in ("dots", "full"):
                found = analytic(config, topology, remat)
                seconds = time_of(found, topology).in_turn
                rate, speed = found.tokens / seconds, found.model_flops * topology.devices / seconds
                said = f"{tokens:,.0f} tokens/s" if tokens else f"{flops:.3g} FLOP/s"
                ours = f"{rate:,.0f} tokens/s" if tokens else f"{speed:.3g} FLOP/s"
                ratio = rate / tokens if tokens else speed / (flops or 1)
                yield row(name, said, remat, ours, f"{ratio:.2f}", f"{1 / ratio:.0%}")

    return table("on a v3-8; published; remat; predicted; predicted / published; published / predicted", rows())


SCALE = (
    ("GPT-J-6B", GPTJ, "v3-8", {}), ("GPT-J-6B", GPTJ, "v4-8", {"cores_per_replica": 4}),
    ("GPT-J-6B", GPTJ, "v5e-16", {"zero_stage": 1}), ("GPT-J-6B", GPTJ, "v5e-256", {}),
    ("20B", "20B_v1.json", "v4-32", {"zero_stage": 3}), ("40B", "40B_v1.json", "v4-64", {}),
    ("175B", "175B_v1.json", "v4-256", {}),
)  # fmt: skip


@functools.lru_cache(maxsize=1)
def scale_plans() -> list[tuple[str, Topology, Estimate, Estimate]]:
    """Each row of the first table: its name, topology, compiled (or else worked out) and worked-out plan."""
    from benchmarks.plan_cases import CHECK, FIT, shipped

    found = []
    for name, file, slice_, keys in SCALE:
        from mesh_transformer.planning import chips

        topology = chips.topology(slice_)
        cases = (case for case in (*FIT, *CHECK) if case.task == "train")
        known = [case for case in cases if case.file == file and case.topology == topology.name]
        case = known[0] if known else shipped(file, topology.name, "full", **keys)
        _, estimate = plan_of(case)
        found.append((f"{name} on {slice_}", topology, estimate, case.analytic()))
    return found


def scale_table() -> str:
    from mesh_transformer.planning.chips import GIB
    from mesh_transformer.planning.estimate import time_of

    def rows() -> Iterator[str]:
        for name, topology, plan, worked in scale_plans():
            time = time_of(plan, topology)
            rates = f"{plan.tokens / time.in_turn:,.0f} to {plan.tokens / time.overlapped:,.0f}"
            mfu = plan.model_flops / topology.chip.flops / time.in_turn
            yield row(name, f"{plan.dp} x {plan.mp}", plan.remat, "compiled" if plan.exact else "arithmetic",
                      f"{plan.peak / GIB:.2f} of {topology.chip.usable / GIB:.2f} GiB", f"{worked.peak / GIB:.2f} GiB",
                      f"{plan.flops / plan.model_flops:.2f}", rates, f"{mfu:.0%}", time.limit)  # fmt: skip

    head = (
        "model and slice; dp x mp; remat; how; peak of a device; by arithmetic; FLOPs over the model's; tokens/s; MFU; "
        "limit"
    )
    return table(head, rows())


def smallest() -> str:
    """The smallest slice of each chip that holds a config, its mesh and remat free, at 512 sequences an update."""
    from mesh_transformer.planning import search

    def cell(config: Config, chip: str) -> str:
        found = search.smallest(config, chip, 512)
        if found is None:
            return "none"
        mesh = found.config.mesh
        return (
            f"{found.topology.devices}: dp {found.estimate.dp} x mp {mesh.cores_per_replica}, stage {mesh.zero_stage}, "
            + found.estimate.remat
        )

    def rows() -> Iterator[str]:
        for file in (GPTJ, "13B_v1.json", "20B_v1.json", "40B_v1.json", "175B_v1.json", "175B_v2.json"):
            yield row(f"`{file}`", *(cell(load(file), chip) for chip in SHOWN))

    return table("; ".join(("config", *SHOWN)), rows())


def weak(file: str, chip: str, sequences: int) -> str:
    """From 8 to 4096 chips with as many sequences for each chip, the best mesh at each size."""
    from mesh_transformer.planning import chips, search
    from mesh_transformer.planning.estimate import time_of

    config, names = (
        load(file),
        [f"{chip}-{n * chips.CHIPS[chip].suffix}" for n in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)],
    )

    def rows() -> Iterator[str]:
        for name in names:
            topology = chips.topology(name)
            ways = list(search.candidates(config, topology, sequences * topology.devices))
            found = [each for each in ways if each.fits]
            if not found:
                least = f"at least {chips.size(min(each.estimate.peak for each in ways))} a device"
                yield row(name, topology.devices, least, *["-"] * 4, "HBM's size", "-")
                continue
            best = min(found, key=lambda each: each.seconds)
            plan, time, mesh = best.estimate, time_of(best.estimate, topology), best.config.mesh
            yield row(name, topology.devices, f"{plan.dp} x {plan.mp}, stage {mesh.zero_stage}, {plan.remat}",
                      f"{mesh.per_replica_batch} x {mesh.gradient_accumulation_steps}",
                      f"{plan.tokens / time.in_turn:,.0f}", f"{plan.tokens / time.in_turn / topology.devices:,.0f}",
                      f"{plan.model_flops / topology.chip.flops / time.in_turn:.0%}", time.limit,
                      f"{time.compute:.2f}, {time.memory:.2f}, {time.links:.2f}, {time.network:.2f}")  # fmt: skip

    head = (
        "slice; devices; dp x mp, stage, remat; batch x accumulation; tokens/s; a device; MFU; limit; "
        "compute, HBM, ICI, DCN s"
    )
    return table(head, rows())


BLOCKS: dict[str, Callable[[], str]] = {
    "chips": chip_table, "sources": sources, "example": example, "search": search_example,
    "fit": lambda: errors("fit"), "check": lambda: errors("check"), "ranking": ranking, "published": published,
    "scale": scale_table, "smallest": smallest, "weak-6B": lambda: weak(GPTJ, "v5e", 4),
    "weak-175B": lambda: weak("175B_v1.json", "v5p", 4),
}  # fmt: skip


def pictures() -> dict[str, str]:
    from benchmarks import plan_pictures
    from mesh_transformer.planning.chips import CHIPS

    plans: Any = [(name, topology, estimate) for name, topology, estimate, _ in scale_plans()]
    chosen = [CHIPS[name] for name in ("v3", "v4", "v5e", "v5p")]
    return {"plan-memory.svg": plan_pictures.bars(plans), "plan-roofline.svg": plan_pictures.roofline(chosen, plans)}


def page(text: str, only: Callable[[str], bool] = lambda name: True) -> str:
    """A page with its blocks written anew, those that `only` names."""

    def block(found: re.Match[str]) -> str:
        name = found.group(1)
        inside = f"\n{BLOCKS[name]()}\n" if only(name) else found.group(2)
        return f"<!-- begin {name} -->{inside}<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->(.*?)<!-- end \1 -->", block, text, flags=re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something would change")
    check = parser.parse_args(arguments).check
    fresh = {path: page(path.read_text(encoding="utf-8")) for path in PAGES.values()}
    fresh |= {IMAGES / name: drawn for name, drawn in pictures().items()}
    stale = [path for path, new in fresh.items() if not path.exists() or path.read_text(encoding="utf-8") != new]
    for path in stale:
        print(f"{'differs' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(fresh[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
