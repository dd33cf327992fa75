"""A look at every file of a step before any array is read: what is missing, empty, corrupt, short or odd, at once."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from mesh_transformer import storage
from mesh_transformer.checkpoint import layout
from mesh_transformer.checkpoint.damage import DamagedError
from mesh_transformer.checkpoint.layout import FILES
from mesh_transformer.checkpoint.npz import Header, NpzReader
from mesh_transformer.errors import CheckpointError

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.manifest import Manifest
    from mesh_transformer.config import ModelConfig

_WORKERS = 8


def check_files(path: str, shards: int, described: Manifest | None, model: ModelConfig | None) -> None:
    """Raises one DamagedError naming all files of a step that are missing, empty, corrupt, short or unlike the others.

    `model`, where known, says how many arrays are expected in files that have no manifest.
    """
    sizes, problems = _open_all(path, shards, described)
    counts = {place: len(members) for place, members in sizes.items()}
    expected = len(described.leaves) if described else _expected_leaves(counts, shards, model)
    lengths = layout.runs(expected)
    problems += [
        f"shard_{shard}/{file}.npz holds {count} arrays, expected {lengths[file]}"
        for (shard, file), count in sorted(counts.items())
        if count != lengths[file]
    ]
    if described is None:  # otherwise checksums tell which of two files that differ is the damaged one
        problems += _unlike_shard_0(path, sizes, _labels(expected, shards, model))
    if problems:
        raise DamagedError(
            f"{path} is not complete: {'; '.join(problems)}. Expected {shards} x {FILES} files: shard_0 to "
            f"shard_{shards - 1}, each with 0.npz to {FILES - 1}.npz; copy the step again, or use another",
            problems,
        )


def check_described(path: str, described: Manifest, headers: Sequence[Header]) -> None:
    """Raises DamagedError where arrays are not what the manifest says, such as 2-byte values that are not bfloat16."""
    problems = [
        f"{leaf.name} is {header.dtype}{list(header.shape)}, in the manifest {leaf.dtype}{list(leaf.shard_shape)}"
        for leaf, header in zip(described.leaves, headers, strict=True)
        if (leaf.dtype, leaf.shard_shape) != (str(header.dtype), header.shape)
    ]
    if problems:
        raise DamagedError(f"{path} was altered: {'; '.join(problems)}; copy the step again, or use another", problems)


def count_shards(path: str) -> int:
    """How many shards a step has that has no manifest. Raises CheckpointError saying what is there instead of one."""
    if not storage.can_list(path):
        found = next(m for m in itertools.count() if not storage.exists(layout.shard_file(path, m, 0)))
        if found == 0:
            raise DamagedError(f"{path} holds no checkpoint step; expected shard_0/0.npz there")
        return found
    names = storage.listdir(path)
    numbers = [int(name[6:]) for name in names if re.fullmatch(r"shard_\d+", name)]
    if numbers:
        return max(numbers) + 1
    if not names:
        raise DamagedError(f"{path} does not exist, or is empty; expected a folder with shard_0, shard_1, ...")
    steps = [name for name in names if re.fullmatch(r"step_\d+", name)]
    if steps:
        raise CheckpointError(f"{path} is a folder of steps; name one of them: {', '.join(steps[-5:])}")
    if "params" in names:
        raise CheckpointError(
            f"{path} holds a checkpoint of version 2; expected version 1's, with shard_0, shard_1, ..."
        )
    raise DamagedError(f"{path} holds no checkpoint step; expected shard_0, shard_1, ..., found {', '.join(names[:8])}")


def _open_all(path: str, shards: int, described: Manifest | None) -> tuple[dict[tuple[int, int], list[int]], list[str]]:
    """(shard, file) -> bytes of each array, of the files that can be opened; and what is wrong with the others."""
    present = {shard: _names(storage.join(path, f"shard_{shard}")) for shard in range(shards)}
    problems = []

    def look(place: tuple[int, int]) -> tuple[tuple[int, int], list[int] | str]:
        shard, file = place
        name = f"shard_{shard}/{file}.npz"
        if f"{file}.npz" not in present[shard]:
            return place, f"{name} is missing"
        entry = described.files.get(name) if described else None
        try:
            with contextlib.closing(NpzReader(layout.shard_file(path, shard, file))) as reader:
                if entry is not None and reader.size != entry.bytes:
                    return place, f"{name} has {reader.size} bytes, expected {entry.bytes}"
                return place, reader.member_sizes()
        except DamagedError as error:
            return place, str(error).removeprefix(f"{path}/")

    sizes = {}
    with ThreadPoolExecutor(_WORKERS) as pool:
        for place, result in pool.map(look, itertools.product(range(shards), range(FILES))):
            if isinstance(result, str):
                problems.append(result)
            else:
                sizes[place] = result
    for shard in range(shards):
        if not present[shard]:
            problems = [line for line in problems if not line.startswith(f"shard_{shard}/")]
            problems.append(f"shard_{shard} is missing with all its files")
    return sizes, problems


def _names(shard_dir: str) -> set[str]:
    """The files of a shard; all that are expected, where none can be listed and opening has to tell."""
    if storage.can_list(shard_dir):
        return set(storage.listdir(shard_dir))
    return {f"{file}.npz" for file in range(FILES)}


def _unlike_shard_0(path: str, sizes: dict[tuple[int, int], list[int]], labels: Sequence[str]) -> list[str]:
    """Arrays whose sizes differ from those of shard 0: all shards' parts are alike."""
    names = dict(zip(layout.places(len(labels)), labels, strict=True))

    def header(shard: int, file: int, number: int) -> str:
        with contextlib.closing(NpzReader(layout.shard_file(path, shard, file))) as reader:
            found = reader.header(number)
        return f"{found.dtype}{list(found.shape)}"

    problems = []
    for (shard, file), members in sorted(sizes.items()):
        for number, (found, expected) in enumerate(zip(members, sizes.get((0, file), members), strict=False)):
            if found != expected:
                label = f" ({names[file, number]})" if (file, number) in names else ""
                both = f"{header(shard, file, number)}, in shard_0 {header(0, file, number)}"
                problems.append(f"shard_{shard}/{file}.npz: arr_{number}{label} is {both}")
    return problems


def _labels(count: int, shards: int, model: ModelConfig | None) -> list[str]:
    """The names of `count` leaves of the model; none where it is not known, or has another number."""
    if model is None:
        return []
    orders = [layout.state_leaves(model, shards, full) for full in (True, False)]
    return next(([leaf.label for leaf in leaves] for leaves in orders if len(leaves) == count), [])


def _expected_leaves(counts: dict[tuple[int, int], int], shards: int, model: ModelConfig | None) -> int:
    """The number of leaves that agrees with most files: a shard's own total, or what the model has."""
    totals = {sum(counts.get((shard, file), 0) for file in range(FILES)) for shard in range(shards)}
    if model is not None:
        totals |= {len(layout.state_leaves(model, shards, full)) for full in (True, False)}
    # Files that are missing or short make totals that are too small: on a tie the larger is right.
    return max(totals | _totals_from_runs(counts), key=lambda total: (_agreeing(counts, total), total))


def _totals_from_runs(counts: dict[tuple[int, int], int]) -> set[int]:
    """Totals that explain the file sizes seen, whichever single file is short."""
    if not counts:
        return set()
    longest = max(counts.values())
    return {FILES * (longest - 1) + more for more in range(1, FILES + 1)}


def _agreeing(counts: dict[tuple[int, int], int], total: int) -> int:
    lengths = layout.runs(max(total, 0))
    return sum(count == lengths[file] for (_, file), count in counts.items())
