"""Version 2: `CausalTransformerV2`, with gated layers of any head size, its state cut over the whole mesh.

What a shard computes is `transformer_shard.CausalTransformerShard`, of which a version-2 layer differs by its
parameters; how the state is cut over replicas, ZeRO, is the same for both versions.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from mesh_transformer.config import Config, load_config
from mesh_transformer.transformer_shard import CausalTransformer


class CausalTransformerV2(CausalTransformer):
    """The network of version 2 on a mesh: the methods of `CausalTransformer`, on the layers of version 2.

    A layer has one norm, an input projection with biases to queries, keys, values and a gated feed-forward part
    (first half * gelu(second half)), and one output projection. Norm and position encoding are always layernorm and
    rotary; heads are `n_heads` of `d_head`. `v2_merged_heads` and `v2_decay_vectors` reproduce the 2021 library.

    A config of version 1 is taken as one of version 2 of the same sizes.
    """

    def __init__(self, config: Config, mesh: Mesh):
        super().__init__(as_version_2(config), mesh)


def as_version_2(config: Config) -> Config:
    """`config` itself, or with version 2 in it. Raises ConfigError where its sizes do not fit that."""
    if config.version == 2:
        return config
    flat = config.to_dict()
    for key in {"zero_stage", "ckpt_format"} - config.given:
        del flat[key]  # version 2 has its own default
    return dataclasses.replace(load_config(flat, version=2), source=config.source, given=config.given)


def network_of(config: Config, mesh: Mesh) -> CausalTransformer:
    """The network of the config's version."""
    return (CausalTransformerV2 if config.version == 2 else CausalTransformer)(config, mesh)
