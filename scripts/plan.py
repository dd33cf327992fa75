"""Will it fit, how fast will it go, and which mesh is best: plan a run before renting a single chip.

    python scripts/plan.py --config configs/6B_roto_256.json --topology v3-8
    python scripts/plan.py --config F --topology gpu:h100x8 --search --write best.json
    python scripts/plan.py --config F --smallest v5e --search

For one slice of TPUs the very step is compiled on this machine, which needs no TPU (but the extra `plan`, which brings
the compiler), and its memory, arithmetic and traffic are read from the program; otherwise, and with --analytic, they
are worked out. docs/planning.md tells the rest. Exit codes: 0 it fits, 1 it does not, 2 something to correct.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mesh_transformer.command_line import complain, natural, positive
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError

if TYPE_CHECKING:
    from mesh_transformer.config import Config
    from mesh_transformer.planning.chips import Topology
    from mesh_transformer.planning.search import Candidate

REMATS = ("none", "dots", "full")
TASKS = ("train", "eval", "generate")
EXIT_TOO_LARGE = 1
SHOWN = 10


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="JSON config, a path or URL")
    parser.add_argument(
        "--topology", metavar="NAME",
        help="such as v3-8, v4-32, v5e-16, v5e:4x8, gpu:h100x8, cpu:8 (default: v3, by the config's tpu_size)",
    )  # fmt: skip
    parser.add_argument("--task", choices=TASKS, default="train", help="what to plan (default: train)")
    parser.add_argument(
        "--remat", choices=REMATS, help="what the backward pass recomputes (the config's; auto tries dots, then full)"
    )
    parser.add_argument("--analytic", action="store_true", help="by arithmetic alone, though a compiler may be there")
    parser.add_argument(
        "--search", action="store_true", help="training: try every mesh, split of the batch, zero_stage and remat"
    )
    parser.add_argument(
        "--smallest",
        metavar="CHIP",
        help="training: the smallest slice of v3, v4, v5e, v5p, v6e, h100, ... that holds it",
    )
    parser.add_argument(
        "--sequences",
        type=positive,
        metavar="N",
        help="of one update in a search (default: the config's, as it stands)",
    )
    parser.add_argument(
        "--compile", type=natural, default=3, metavar="N", help="with --search: compile the best N (default: 3)"
    )
    parser.add_argument("--write", metavar="OUT.json", help="write the config that was planned, or the search's winner")
    options = parser.parse_args(arguments)
    if options.task != "train" and (options.search or options.smallest):
        parser.error("--search and --smallest are for --task train")
    if options.search and options.remat:
        parser.error("--search tries every remat: leave --remat out")
    if options.sequences and not options.search:
        parser.error("--sequences is for --search")
    if options.smallest and options.topology:
        parser.error("--smallest finds the topology: leave --topology out")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from mesh_transformer.config import load_config
    from mesh_transformer.planning import chips

    try:
        config = load_config(options.config)
        if options.remat:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=options.remat))
        if options.smallest:
            return _smallest(options, config)
        topology = chips.topology(_default_topology(config) if options.topology is None else options.topology)
        return _search(options, config, topology) if options.search else _one(options, config, topology)
    except MeshTransformerError as error:
        return complain(error)


def _default_topology(config: Config) -> str:
    return f"v3-{config.mesh.tpu_size or max(8, config.mesh.cores_per_replica)}"


def _compiles(options: argparse.Namespace, topology: Topology) -> bool:
    """Whether to compile; says why not where it was not asked to leave it."""
    from mesh_transformer.planning import exact

    if options.analytic or not topology.is_tpu or topology.slices > 1:
        return False
    if exact.library() is None:
        print(
            "note: by arithmetic alone, since the compiler for TPUs is not here: pip install 'mesh-transformer[plan]', "
            f"or name its libtpu.so in {exact.LIBRARY}", file=sys.stderr,
        )  # fmt: skip
        return False
    return True


def _one(options: argparse.Namespace, config: Config, topology: Topology) -> int:
    """The plan of the config as it stands."""
    from mesh_transformer.planning import analytic, exact, report

    chosen = config.model.remat
    tried = ("dots", "full") if chosen == "auto" else (chosen,)
    compiles = _compiles(options, topology)
    for remat in tried if options.task == "train" else tried[:1]:
        try:
            how = exact.exact if compiles else analytic.analytic
            estimate = how(config, topology, remat, options.task)
        except exact.TooLargeError as error:
            print(f"remat {remat}: does not fit {topology}: {error}")
            estimate = analytic.analytic(config, topology, remat, options.task)
            print(report.text(config, topology, estimate), end="")
            continue
        print(report.text(config, topology, estimate), end="")
        if estimate.peak <= topology.chip.usable:
            _write(options.write, config, {"remat": remat, "tpu_size": topology.devices})
            return EXIT_DONE
        print(f"remat {remat}: does not fit {topology}\n")
    print(report.advice(config, topology, options.task))
    return EXIT_TOO_LARGE


def _search(options: argparse.Namespace, config: Config, topology: Topology) -> int:
    from mesh_transformer.planning import exact, report
    from mesh_transformer.planning.search import by_key, search, why

    sequences = options.sequences or _sequences(config, topology)
    compile_ = exact.exact if _compiles(options, topology) and options.compile else None
    found = search(config, topology, sequences, compile_, options.compile)
    fitting = [each for each in found if each.fits]
    print(
        f"{config.source or 'config'} on {topology}, {sequences} sequences an update: {len(found)} ways, "
        f"{len(fitting)} fit\n"
    )
    _table(found[: max(SHOWN, 1)])
    best = found[0]
    print("\nwhy not another value of a key (the best with it):")
    for key, value, loser in by_key(found):
        print(f"  {key} {value}: {why(loser, best)}")
    if not best.fits:
        print(f"\nnothing fits; {report.advice(best.config, topology)}")
        return EXIT_TOO_LARGE
    print(f"\nbest: {report.settings(best.config)}\n")
    print(report.text(best.config, topology, best.estimate), end="")
    _write(options.write, config, {**best.keys, "tpu_size": topology.devices})
    return EXIT_DONE


def _table(found: Sequence[Candidate]) -> None:
    from mesh_transformer.planning.chips import GIB
    from mesh_transformer.planning.estimate import time_of

    print(f"{'dp x mp':>9} {'batch x acc.':>12} zero remat  {'peak GiB':>8} {'tokens/s':>14}  {'MFU':>4}  limit    how")
    for each in found:
        estimate, mesh = each.estimate, each.config.mesh
        time = time_of(estimate, each.topology)
        rates = f"{estimate.tokens / time.in_turn:,.0f}-{estimate.tokens / time.overlapped:,.0f}"
        mfu = estimate.model_flops / each.topology.chip.flops / time.in_turn
        how = "compiled" if estimate.exact else "arithmetic"
        print(
            f"{estimate.dp:>4} x {estimate.mp:<3} {mesh.per_replica_batch:>5} x {mesh.gradient_accumulation_steps:<4} "
            f"{mesh.zero_stage:>4} {estimate.remat:<5} {estimate.peak / GIB:>8.2f} {rates:>14}  {mfu:>4.0%}  "
            f"{time.limit if each.fits else 'too large':<8} {how}"
        )  # fmt: skip


def _smallest(options: argparse.Namespace, config: Config) -> int:
    from mesh_transformer.planning import chips, exact, report
    from mesh_transformer.planning.search import smallest

    slices = chips.smallest_first(options.smallest)
    sequences = (options.sequences or _sequences(config, slices[0])) if options.search else None
    compile_ = exact.exact if _compiles(options, slices[0]) and options.compile else None
    found = smallest(config, options.smallest, sequences, compile_)
    if found is None:
        print(f"no slice of {options.smallest}, up to {slices[-1]}, holds it; {report.advice(config, slices[-1])}")
        return EXIT_TOO_LARGE
    print(f"the smallest: {found.topology}, {report.settings(found.config)}\n")
    print(report.text(found.config, found.topology, found.estimate), end="")
    _write(options.write, config, {**found.keys, "tpu_size": found.topology.devices})
    return EXIT_DONE


def _sequences(config: Config, topology: Topology) -> int:
    """Of one update, with the config's own mesh on this topology; at least one for every replica."""
    return config.sequences_per_step(max(1, topology.devices // config.mesh.cores_per_replica))


def _write(path: str | None, config: Config, keys: dict[str, object]) -> None:
    """The config's own keys, with these instead."""
    if path is None:
        return
    import json

    from mesh_transformer import storage

    own = {key: value for key, value in config.to_dict().items() if key in config.given}
    with storage.open_file(path, "wb") as file:
        file.write((json.dumps(own | keys, indent=2) + "\n").encode())
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
