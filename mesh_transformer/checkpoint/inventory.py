"""What a step's files hold, found without devices and before any array is read, and whether that fits a config.

Files of the 2021 library carry no names: which model they belong to is inferred from counts and shapes alone, and only
for messages. All problems are reported at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mesh_transformer import storage
from mesh_transformer.checkpoint import layout, manifest, survey
from mesh_transformer.checkpoint.layout import FILES, StateLeaf
from mesh_transformer.checkpoint.npz import Header, NpzReader
from mesh_transformer.config_fields import fields_of
from mesh_transformer.config_groups import NORMS, POSITIONS, ModelConfig
from mesh_transformer.errors import CheckpointError

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.manifest import Manifest

_RECORDED = ("layers", "d_model", "n_heads", "n_vocab", "seq", "norm", "pe")


@dataclasses.dataclass(frozen=True)
class Inventory:
    """A step whose files are all there: M shards, each with `leaves` arrays; `headers` are shard 0's, in leaf order."""

    path: str
    shards: int
    headers: tuple[Header, ...]
    manifest: Manifest | None

    @property
    def leaves(self) -> int:
        return len(self.headers)

    @property
    def full(self) -> bool:
        """Whether it starts with Adam's count, as a state with optimizer does."""
        return self.headers[0].dtype == np.int32


def take(step_dir: storage.PathLike, model: ModelConfig | None = None) -> Inventory:
    """Look at every file of a step. Raises one DamagedError naming all that are missing, empty, corrupt or short.

    `model`, where known, says how many arrays are expected in files that have no manifest.
    """
    path = storage.normalise(step_dir)
    described = manifest.read(path)
    shards = described.shards if described else survey.count_shards(path)
    survey.check_files(path, shards, described, model)
    headers: list[Header] = []
    for file in range(FILES):
        reader = NpzReader(layout.shard_file(path, 0, file))
        headers += [reader.header(number) for number in range(len(reader))]
        reader.close()
    if described is not None:
        survey.check_described(path, described, headers)
    return Inventory(path, shards, tuple(headers), described)


def match(found: Inventory, model: ModelConfig, mesh_shards: int) -> tuple[StateLeaf, ...]:
    """The leaves of the files, in order. Raises CheckpointError listing config against checkpoint if they differ."""
    expected = layout.state_leaves(model, found.shards, found.full)
    shapes = [leaf.shard_shape(found.shards) for leaf in expected]
    fits = shapes == [header.shape for header in found.headers] and all(
        leaf.fits(header.dtype) for leaf, header in zip(expected, found.headers, strict=True)
    )
    told = recorded(found.manifest)
    if told is not None and any(getattr(told, key) != getattr(model, key) for key in ("norm", "pe")):
        fits = False  # kinds of norm can have equal shapes
    if not fits:
        raise CheckpointError(_mismatch(found, model, expected))
    if model.norm == "layernorm-desync" and found.shards != mesh_shards:
        raise CheckpointError(
            f"{found.path} has {found.shards} shards, the config cores_per_replica {mesh_shards}: with norm "
            f"'layernorm-desync' each shard has its own norms, so they must be equal: set it to {found.shards}"
        )
    return expected


def candidates(found: Inventory) -> list[ModelConfig]:
    """Every model whose leaves have the shapes found, most usual first; n_heads is known only with pe t5."""
    told = recorded(found.manifest)
    if told is not None:
        return [told]
    params = (found.leaves - 3) // 3 if found.full else found.leaves - 1
    first = 2 * params + 2 if found.full else 0
    headers = found.headers[first : first + params]
    shapes = [header.shape for header in found.headers]
    out = []
    for pe, norm in itertools.product(POSITIONS, NORMS):
        model = _candidate(headers, found.shards, norm, pe)
        if model is not None:
            leaves = layout.state_leaves(model, found.shards, found.full)
            if [leaf.shard_shape(found.shards) for leaf in leaves] == shapes:
                out.append(model)
    return out


def _candidate(headers: Sequence[Header], shards: int, norm: str, pe: str) -> ModelConfig | None:
    """The only model with this norm and pe that could have so many leaves, sized by its first ones."""
    vectors = 1 if norm in ("rmsnorm", "scalenorm") else 2
    layers, rest = divmod(len(headers) - 4 - vectors - (pe != "rotary"), 8 + vectors)
    if rest or layers < 1:
        return None
    skip = pe == "fixed"  # its table of positions sorts before the embedding
    bias, weight = headers[skip].shape, headers[skip + 1].shape
    if len(bias) != 1 or len(weight) != 2 or (skip and len(headers[0].shape) != 2):
        return None
    d_model, heads = bias[0], headers[-1].shape[0] * shards if pe == "t5" and headers[-1].shape else shards
    if d_model < 1 or heads < 1 or d_model % heads:
        return None
    seq = headers[0].shape[0] if skip else 1
    return ModelConfig(
        layers=layers, d_model=d_model, n_heads=heads, n_vocab=weight[0] * shards, seq=seq, norm=norm, pe=pe
    )


def recorded(described: Manifest | None) -> ModelConfig | None:
    """The model of a manifest, if it says."""
    config = described.details.get("config") if described else None
    if not isinstance(config, dict) or any(key not in config for key in _RECORDED):
        return None
    wanted = (*_RECORDED, "version", "d_head", "pe_rotary_dims", "v2_merged_heads")
    known = {key: field for key, (field, _) in fields_of(ModelConfig).items() if key in wanted and key in config}
    fields = {field: config[key] for key, field in known.items()}
    if fields.get("head_size") == fields["d_model"] // fields["n_heads"]:
        del fields["head_size"]  # it says nothing that the others do not, as in configs
    return ModelConfig(**fields)


def _mismatch(found: Inventory, model: ModelConfig, expected: Sequence[StateLeaf]) -> str:
    """The text of the error: config against checkpoint, key by key, and the first leaf that differs."""
    guesses = candidates(found)
    lines = []
    if guesses:
        keys = ["layers", "d_model", "n_vocab", "norm", "pe"]
        if found.manifest or guesses[0].pe == "t5":
            keys.insert(2, "n_heads")
        if guesses[0].pe == "fixed" and model.pe == "fixed":
            keys.append("seq")
        if guesses[0].version != model.version:
            keys.insert(0, "version")
        for key in keys:
            wanted = getattr(model, key)
            has = list(dict.fromkeys(getattr(guess, key) for guess in guesses))
            verdict = "" if wanted in has else " (differs)"
            lines.append(f"{key} {wanted} in the config, {' or '.join(map(str, has))} in the checkpoint{verdict}")
    lines.append(f"shards {found.shards} in the checkpoint (any number is read)")
    return (
        f"{found.path} does not hold the config's model: {'; '.join(lines)}; "
        f"first leaf that differs: {_first_difference(found, guesses, expected)}. Use the config it was trained with"
    )


def _first_difference(found: Inventory, guesses: Sequence[ModelConfig], expected: Sequence[StateLeaf]) -> str:
    want = {leaf.label: leaf.shard_shape(found.shards) for leaf in expected}
    if guesses:
        leaves = layout.state_leaves(guesses[0], found.shards, found.full)
        have = {leaf.label: header.shape for leaf, header in zip(leaves, found.headers, strict=True)}
        for label in sorted(want.keys() | have.keys(), key=_natural):
            if label not in have:
                return f"{label} is expected, and not there"
            if label not in want:
                return f"{label} is there, and not expected"
            if want[label] != have[label]:
                return f"{label} is {list(have[label])} on a shard, expected {list(want[label])}"
    for leaf, header in zip(expected, found.headers, strict=False):
        if want[leaf.label] != header.shape or not leaf.fits(header.dtype):
            return f"{leaf.label} is {header.dtype}{list(header.shape)} on a shard, expected {list(want[leaf.label])}"
    if len(expected) != found.leaves:
        return f"there are {found.leaves} leaves, expected {len(expected)}"
    return "none by shape; the norm or position encoding differs"


def _natural(label: str) -> list[str | int]:
    """Sorts layer_2 before layer_10."""
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", label)]
