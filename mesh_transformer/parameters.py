"""THE table of parameters of both versions: one record per kind, from which everything else is derived.

Initialisation, placement on the mesh, weight decay, checkpoint reading and writing, re-sharding, Hugging Face names
and parameter counts all read `kinds()`. In memory a parameter is whole (its shape does not depend on the mesh), and
the L layers are stacked on a leading axis. In the published layout (2021) it is cut into M parts, one per
model-parallel shard, and each layer stands alone; `published_leaves()` lists those in their order on disk.

Where a parameter lives and where it computes are two placements. `specs`: its `split` axis over `mp`.
`storage_specs`: with ZeRO its `zero` axis over `dp` as well; gathering over `dp` is the step between the two.

Logical axes: layers L, vocab V, model D, heads H*K (D in version 1), ff 4D, seq S, head H, buckets (of t5), shards M.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh_transformer.errors import CheckpointError

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from mesh_transformer.config import ModelConfig

PREFIX = "causal_transformer_shard/~/"
EMBEDDING = PREFIX + "embedding_shard"
LAYERS = PREFIX + "transformer_layer_shard"
PROJECTION = PREFIX + "projection_shard"
RELATIVE = PREFIX + "relative_position_embs"

T5_BUCKETS = 32


class Combine(enum.Enum):
    """How the M copies or parts in the published layout make the whole tensor."""

    CONCAT = "concatenate along the split axis"
    SUM = "sum: every shard added its copy, so the effective bias is the sum"
    FIRST = "shard 0's copy: the others kept their initial values for ever"
    MEAN = "mean of copies that were trained alike"
    PER_SHARD = "every shard keeps its own; the whole tensor has a leading axis of M"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of parameter.

    `axes` are the logical axes of one layer's whole tensor; `stacked` kinds have a leading `layers` axis in memory.
    `split` is the logical axis cut over `mp` (None: every shard holds the whole), `zero` the one that ZeRO cuts over
    `dp` (None for vectors, which are not worth a collective). `init` is a constant, or the
    standard deviation of a normal truncated at two deviations when `random`. `hf_name` is the name in Hugging Face's
    GPTJ, `hf_transposed` whether its matrix is stored [out, in]; kinds without one have no place there.
    """

    module: str
    name: str
    axes: tuple[str, ...]
    split: str | None
    zero: str | None
    combine: Combine
    init: float
    random: bool
    decay: bool
    published_module: str
    published_name: str
    stacked: bool = False
    hf_name: str | None = None
    hf_transposed: bool = False
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def path(self) -> tuple[str, str]:
        return self.module, self.name

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Whole shape of one layer's tensor (of the tensor itself where it is not stacked)."""
        return tuple(self.sizes[a] for a in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Whole shape in memory: [L, ...] for layers."""
        return ((self.sizes["layers"],) if self.stacked else ()) + self.layer_shape

    @property
    def split_axis(self) -> int | None:
        """Index of the axis cut over mp, in one layer's tensor."""
        return None if self.split is None else self.axes.index(self.split)

    @property
    def zero_axis(self) -> int | None:
        """Index of the axis that ZeRO cuts over dp, in one layer's tensor."""
        return None if self.zero is None else self.axes.index(self.zero)

    def spec(self, over_replicas: bool = False) -> PartitionSpec:
        """Placement in memory: the split axis over `mp`, and `over_replicas` the zero axis over `dp`."""
        from jax.sharding import PartitionSpec

        from mesh_transformer.mesh import DP, MP

        names = [MP if a == self.split else DP if over_replicas and a == self.zero else None for a in self.axes]
        return PartitionSpec(*([None] if self.stacked else []), *names)

    def local_shape(self, mp: int, dp: int = 1) -> tuple[int, ...]:
        """Shape in memory of one device's block, [L, ...] for layers; `dp` above 1 where ZeRO cuts over replicas."""
        shape = list(self._cut(mp, self.layer_shape))
        if self.zero_axis is not None:
            shape[self.zero_axis] //= dp
        return ((self.sizes["layers"],) if self.stacked else ()) + tuple(shape)

    def shard_shape(self, shards: int) -> tuple[int, ...]:
        """Shape of one layer's part on one of `shards` shards in the published layout."""
        if self.combine is Combine.PER_SHARD:
            return self.layer_shape[1:]
        return self._cut(shards, self.layer_shape)

    def _cut(self, parts: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n // parts if i == self.split_axis else n for i, n in enumerate(shape))

    def split_whole(self, whole: np.ndarray, shards: int, moment: bool = False) -> list[np.ndarray]:
        """Cuts one layer's whole tensor into the `shards` parts of the published layout.

        `moment`: it is an Adam moment. A summed bias's moments are moments of the gradient of the whole bias, equal
        on every shard, so they are copied, never divided. A summed bias itself is divided by M where M is a power of
        two (exact, and what the 2021 code would have written); otherwise shard 0 holds the whole and the others
        zeros, since the sum has to give back every bit.
        """
        if self.combine is Combine.CONCAT:
            return np.split(whole, shards, axis=self.split_axis)  # type: ignore[arg-type]
        if self.combine is Combine.PER_SHARD:
            return [whole[m] for m in range(shards)]
        if self.combine is Combine.SUM and not moment and shards > 1:
            part = (whole / shards).astype(whole.dtype)
            if shards & (shards - 1) == 0 and np.array_equal(part * shards, whole):  # not where it underflows
                return [part] * shards
            return [whole] + [np.zeros_like(whole)] * (shards - 1)
        return [whole] * shards

    def merge_parts(self, parts: Sequence[np.ndarray], moment: bool = False) -> np.ndarray:
        """Makes one layer's whole tensor from its parts, in shard order.

        Sums are taken in float64 (in float32, M copies of b/M would not add up to b) and returned in float32.
        """
        if self.combine is Combine.CONCAT:
            return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.split_axis)
        if self.combine is Combine.PER_SHARD:
            return np.stack(parts)
        if self.combine is Combine.FIRST or len(parts) == 1 or (self.combine is Combine.SUM and moment):
            return parts[0]
        total = np.sum([p.astype(np.float64) for p in parts], axis=0)
        return (total / len(parts) if self.combine is Combine.MEAN else total).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter tensor of the published layout: a kind, in layer `layer` (None outside the layers)."""

    kind: Kind
    layer: int | None
    module: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.module}/{self.name}"


def kinds(model: ModelConfig, shards: int) -> tuple[Kind, ...]:
    """The parameters of a model.

    `shards` (M, model-parallel size) matters only to `layernorm-desync`, whose norms belong to their shard.
    """
    d = model.d_model
    sizes = {
        "layers": model.layers, "vocab": model.n_vocab, "model": d, "heads": model.d_attention, "ff": model.d_ff,
        "seq": model.seq, "head": model.n_heads, "buckets": T5_BUCKETS, "shards": shards,
    }  # fmt: skip
    fan_in, residual = 1 / math.sqrt(d), (2 / model.layers) / math.sqrt(d)
    found: list[Kind] = []

    def add(module: str, name: str, axes: str, split: str | None, init: float, random: bool, published: str,
            hf: str | None = None, combine: Combine | None = None, decay: bool | None = None) -> None:  # fmt: skip
        published_module, published_name = published.rsplit("/", 1)
        names = tuple(axes.split())
        combine = combine or (Combine.CONCAT if split else Combine.FIRST)
        # Decay follows the role, a matrix on its shard, since ranks change when layers or shards are stacked (T12).
        decay = random if decay is None else decay
        hf = hf if model.version == 1 else None  # no layer of Hugging Face's computes what version 2's do
        transposed = bool(hf and decay and module != EMBEDDING)
        zero = next((a for a in names if a in ("model", "seq") and a != split), None) if random else None
        found.append(Kind(module, name, names, split, zero, combine, init, random, decay, PREFIX + published_module,
                          published_name, module == LAYERS, hf, transposed, sizes))  # fmt: skip

    def add_norm(module: str, published: str, hf: str) -> None:
        for name, init, hf_name in (
            ("norm_offset", 0.0, hf + ".bias"),
            ("norm_scale", _scale_init(model), hf + ".weight"),
        ):
            if name == "norm_offset" and model.norm in ("rmsnorm", "scalenorm"):
                continue
            layout = _norm_layout(model.norm)
            add(module, name, layout.axes, layout.split, init, False, f"{published}/{layout.module}/{name[5:]}",
                hf_name if model.norm == "layernorm" else None, layout.combine)  # fmt: skip

    hf = "transformer.h.{i}."
    add(
        EMBEDDING,
        "w",
        "vocab model",
        "vocab",
        1 / math.sqrt(model.n_vocab),
        True,
        "embedding_shard/~/linear/w",
        "transformer.wte.weight",
    )  # noqa: E501
    add(EMBEDDING, "b", "model", None, 0, False, "embedding_shard/~/linear/b", combine=Combine.SUM)
    if model.pe == "fixed":
        add(EMBEDDING, "pos_embs", "seq model", "model", 0.02, True, "embedding_shard/pos_embs")
    layer = "layer_{i}/~"
    add(LAYERS, "q", "model heads", "heads", fan_in, True, f"{layer}/linear/w", hf + "attn.q_proj.weight")
    add(LAYERS, "v", "model heads", "heads", fan_in, True, f"{layer}/linear_1/w", hf + "attn.v_proj.weight")
    add(LAYERS, "k", "model heads", "heads", fan_in, True, f"{layer}/linear_2/w", hf + "attn.k_proj.weight")
    add(LAYERS, "o", "heads model", "heads", residual, True, f"{layer}/linear_3/w", hf + "attn.out_proj.weight")
    add(LAYERS, "w1", "model ff", "ff", fan_in, True, f"{layer}/linear_4/w", hf + "mlp.fc_in.weight")
    add(LAYERS, "b1", "ff", "ff", 0, False, f"{layer}/linear_4/b", hf + "mlp.fc_in.bias")
    add(LAYERS, "w2", "ff model", "ff", residual, True, f"{layer}/linear_5/w", hf + "mlp.fc_out.weight")
    add(LAYERS, "b2", "model", None, 0, False, f"{layer}/linear_5/b", hf + "mlp.fc_out.bias", Combine.SUM)
    if model.version == 2:
        add(LAYERS, "w_gate", "model ff", "ff", fan_in, True, f"{layer}/linear_6/w")
        add(LAYERS, "b_gate", "ff", "ff", 0, False, f"{layer}/linear_6/b")
        for name, linear in (("b_q", "linear"), ("b_v", "linear_1"), ("b_k", "linear_2")):
            add(LAYERS, name, "heads", "heads", 0, False, f"{layer}/{linear}/b")
    add_norm(LAYERS, layer, hf + "ln_1")
    add(PROJECTION, "w", "model vocab", "vocab", fan_in, True, "projection_shard/~/linear/w", "lm_head.weight")
    add(PROJECTION, "b", "vocab", "vocab", 0, False, "projection_shard/~/linear/b", "lm_head.bias")
    add_norm(PROJECTION, "projection_shard/~", "transformer.ln_f")
    if model.pe == "t5":
        add(RELATIVE, "rel_embedding", "head buckets", "head", 0.02, True, "relative_position_embs/rel_embedding")
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _NormLayout:
    module: str
    axes: str
    split: str | None
    combine: Combine


def _norm_layout(norm: str) -> _NormLayout:
    """Where a norm's vectors live: copies of one vector, except `layernorm-desync`, which has one per shard."""
    if norm == "layernorm-desync":
        return _NormLayout("layer_norm", "shards model", "shards", Combine.PER_SHARD)
    if norm.startswith("layernorm"):
        return _NormLayout("replicated_layer_norm", "model", None, Combine.FIRST)
    return _NormLayout("rms_norm", "model" if norm.startswith("rmsnorm") else "", None, Combine.MEAN)


def _scale_init(model: ModelConfig) -> float:
    return 1.0 if model.norm.startswith("layernorm") else math.sqrt(model.d_model)


def published_leaves(model: ModelConfig, shards: int) -> tuple[Leaf, ...]:
    """The parameter tensors of the published layout in JAX's tree order.

    Module names are sorted as strings (`layer_10` before `layer_2`), then parameter names.
    """
    leaves = []
    for kind in kinds(model, shards):
        for i in range(model.layers) if kind.stacked else (None,):
            module = kind.published_module.replace("{i}", str(i))
            leaves.append(Leaf(kind, i, module, kind.published_name))
    return tuple(sorted(leaves, key=lambda leaf: (leaf.module, leaf.name)))


def tree(values: Iterable[tuple[Kind, Any]]) -> dict[str, dict[str, Any]]:
    """Two-level Haiku dict {module: {name: value}} from (kind, value) pairs."""
    out: dict[str, dict[str, Any]] = {}
    for kind, value in values:
        out.setdefault(kind.module, {})[kind.name] = value
    return out


def specs(model: ModelConfig, shards: int) -> dict[str, dict[str, PartitionSpec]]:
    """Where every parameter computes, in the tree of the parameters: split over mp, whole on every replica."""
    return tree((kind, kind.spec()) for kind in kinds(model, shards))


def storage_specs(model: ModelConfig, shards: int, zero_stage: int, moments: bool = False) -> Any:
    """Where every parameter lives between steps, or its Adam `moments`, in the tree of the parameters.

    Stage 0: as it computes. Stage 1: moments are cut over dp too. Stage 3: parameters and gradients as well.
    """
    over_replicas = zero_stage == 3 or (zero_stage == 1 and moments)
    return tree((kind, kind.spec(over_replicas)) for kind in kinds(model, shards))


def decay_mask(model: ModelConfig, shards: int, vectors: bool = False) -> dict[str, dict[str, bool]]:
    """Which parameters weight decay applies to, in the tree of the parameters.

    QUIRK `vectors`: the layers' norms and biases too, which the 2021 library's version 2 took for matrices since they
    are stacked.
    """
    return tree((kind, kind.decay or (vectors and kind.stacked)) for kind in kinds(model, shards))


def count(model: ModelConfig, shards: int = 1) -> int:
    """Number of parameters, each counted once, whatever the mesh (`layernorm-desync` alone grows with `shards`)."""
    return sum(math.prod(kind.shape) for kind in kinds(model, shards))


def check_tree(params: Mapping[str, Mapping[str, Any]], model: ModelConfig, shards: int) -> None:
    """Raises CheckpointError listing every parameter that no record covers, that is missing, or of another shape."""
    expected = {kind.path: kind.shape for kind in kinds(model, shards)}
    found = {(m, n): tuple(np.shape(v)) for m, group in params.items() for n, v in group.items()}
    problems = [f"{m}/{n} is not in the table" for m, n in sorted(found.keys() - expected.keys())]
    problems += [f"{m}/{n} is missing" for m, n in sorted(expected.keys() - found.keys())]
    problems += [
        f"{m}/{n} has shape {found[m, n]}, expected {expected[m, n]}"
        for m, n in sorted(found.keys() & expected.keys())
        if found[m, n] != expected[m, n]
    ]
    if problems:
        raise CheckpointError("parameters do not fit the model: " + "; ".join(problems))
