"""The fastest way to train one config on one topology, at its global batch; and the smallest slice that trains it.

Every mesh, split of the batch, zero_stage and remat is estimated by arithmetic; the best few are compiled where that is
possible, and what the compiler says counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from mesh_transformer.config import Config, check_mesh, load_config
from mesh_transformer.errors import ConfigError
from mesh_transformer.planning.analytic import analytic
from mesh_transformer.planning.chips import Topology, size, smallest_first
from mesh_transformer.planning.estimate import Estimate, time_of
from mesh_transformer.planning.exact import TooLargeError

REMATS = ("none", "dots", "full")
KEYS = ("cores_per_replica", "per_replica_batch", "gradient_accumulation_steps", "zero_stage", "remat")

Compile = Callable[[Config, Topology, str], Estimate]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train: the config with its keys, what it takes, and the compiler's words where it does not fit."""

    config: Config
    topology: Topology
    estimate: Estimate
    refused: str | None = None

    @property
    def fits(self) -> bool:
        return self.refused is None and self.estimate.peak <= self.topology.chip.usable

    @property
    def seconds(self) -> float:
        """Of a step whose collectives overlap nothing."""
        return time_of(self.estimate, self.topology).in_turn

    @property
    def keys(self) -> dict[str, object]:
        """What a search changes, by the config's keys."""
        flat = self.config.to_dict()
        return {key: flat[key] for key in KEYS}


def candidates(config: Config, topology: Topology, sequences: int) -> Iterator[Candidate]:
    """Every way to train with updates of `sequences` sequences on all devices of a topology, by arithmetic."""
    flat = config.to_dict()
    for mp in _divisors(topology.devices):
        dp = topology.devices // mp
        if sequences % dp:
            continue
        for stage in (0, 1, 3) if dp > 1 else (0,):
            keys = {"cores_per_replica": mp, "zero_stage": stage}
            try:
                meshed = dataclasses.replace(load_config({**flat, **keys}), source=config.source)
                check_mesh(meshed, topology.devices)
            except ConfigError:
                continue  # heads, vocabulary or width cannot be cut so
            for rows in _divisors(sequences // dp):
                for remat in REMATS:
                    yield _candidate(meshed, topology, rows, sequences // dp // rows, remat)


def _candidate(config: Config, topology: Topology, rows: int, microbatches: int, remat: str) -> Candidate:
    mesh = dataclasses.replace(config.mesh, per_replica_batch=rows, gradient_accumulation_steps=microbatches)
    model = dataclasses.replace(config.model, remat=remat)
    changed = dataclasses.replace(config, mesh=mesh, model=model)
    return Candidate(changed, topology, analytic(changed, topology, remat))


def search(
    config: Config, topology: Topology, sequences: int, compile_: Compile | None = None, best: int = 3
) -> list[Candidate]:
    """All candidates, the best first: what fits by time, then what does not by its peak.

    compile_: estimates a candidate exactly; the `best` first ones that fit are asked for. Raises ConfigError where no
    mesh can take `sequences` sequences.
    """
    found = sorted(candidates(config, topology, sequences), key=_rank)
    if not found:
        raise ConfigError(
            f"updates of {sequences} sequences cannot be split over {topology}: no number of replicas that divides its "
            "devices divides them; choose another --sequences"
        )
    tried: list[Candidate] = []
    left = found
    while compile_ is not None and left and left[0].fits and sum(each.fits for each in tried) < best:
        first, left = left[0], left[1:]
        try:
            tried.append(dataclasses.replace(first, estimate=compile_(first.config, topology, first.estimate.remat)))
        except TooLargeError as error:
            tried.append(dataclasses.replace(first, refused=str(error)))
    # What was compiled stands first, since estimates by arithmetic are not to be compared with it to the percent.
    compiled_ = sorted((each for each in tried if each.fits), key=_rank)
    return compiled_ + sorted(left + [each for each in tried if not each.fits], key=_rank)


def _rank(candidate: Candidate) -> tuple[bool, float, float]:
    fits = candidate.fits
    return not fits, candidate.seconds if fits else candidate.estimate.peak, candidate.estimate.peak


def why(loser: Candidate, winner: Candidate) -> str:
    """Why a candidate is not the one to take."""
    if loser.refused is not None:
        return "the compiler says that it does not fit"
    if not loser.fits:
        held = loser.estimate
        return (
            f"needs {size(held.peak)} of {size(loser.topology.chip.usable)}: state {size(held.state)}, copies "
            f"{size(held.copies)}, activations {size(held.activations)}, temporaries {size(held.temporaries)}"
        )
    if winner.estimate.exact and not loser.estimate.exact:  # like with like
        worked_out = analytic(winner.config, winner.topology, winner.estimate.remat)
        winner = dataclasses.replace(winner, estimate=worked_out)
    ours, best = time_of(loser.estimate, loser.topology), time_of(winner.estimate, winner.topology)
    parts = {
        "compute": ours.compute - best.compute, "HBM": ours.memory - best.memory, "ICI": ours.links - best.links,
        "DCN": ours.network - best.network,
    }  # fmt: skip
    slower = loser.seconds / winner.seconds - 1
    most = max(parts, key=lambda name: parts[name])
    if slower < 0.005:
        return f"as fast, with {size(loser.estimate.peak)} a device"
    return (
        f"{slower:.0%} slower, {most} by {parts[most] * 1e3:,.3g} ms" if slower > 0 else "faster, by arithmetic alone"
    )


def by_key(found: Sequence[Candidate]) -> list[tuple[str, object, Candidate]]:
    """For each value of each key that the winner does not have, the best candidate that has it."""
    winner, rows = found[0], []
    for key in KEYS:
        values = dict.fromkeys(each.keys[key] for each in found)
        for value in sorted((v for v in values if v != winner.keys[key]), key=str):
            rows.append((key, value, next(each for each in found if each.keys[key] == value)))
    return rows


def smallest(
    config: Config, family: str, sequences: int | None = None, compile_: Compile | None = None
) -> Candidate | None:
    """The first slice of a chip's, by size, on which the config trains; None where none is large enough.

    sequences: of one update, then mesh, split, zero_stage and remat may change; without, the config stays as it is, but
    for remat where it leaves that open.
    """
    for topology in smallest_first(family):
        for each in _fitting(config, topology, sequences):
            if compile_ is None or topology.slices > 1:
                return each
            try:
                return dataclasses.replace(each, estimate=compile_(each.config, topology, each.estimate.remat))
            except TooLargeError:
                continue
    return None


def _fitting(config: Config, topology: Topology, sequences: int | None) -> list[Candidate]:
    """Candidates that fit, at most three, the fastest first."""
    if sequences is not None:
        return sorted((c for c in candidates(config, topology, sequences) if c.fits), key=_rank)[:3]
    chosen = config.model.remat
    mesh = config.mesh
    try:
        check_mesh(config, topology.devices)
    except ConfigError:
        return []
    tried = (
        _candidate(config, topology, mesh.per_replica_batch, mesh.gradient_accumulation_steps, remat)
        for remat in (("dots", "full") if chosen == "auto" else (chosen,))
    )
    return [each for each in tried if each.fits]


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]
