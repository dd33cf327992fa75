"""Train, fine-tune, sample and evaluate GPT-J-class language models, split over a (dp, mp) device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_transformer.config import load_config as load_config
    from mesh_transformer.mesh import make_mesh as make_mesh
    from mesh_transformer.transformer_shard import CausalTransformer as CausalTransformer
    from mesh_transformer.transformer_zero import CausalTransformerV2 as CausalTransformerV2

__version__ = "0.1.0"
__all__ = ["CausalTransformer", "CausalTransformerV2", "load_config", "make_mesh"]

# Loaded on first use: a config error or --help need not wait for JAX.
_HOMES = {
    "load_config": "config",
    "make_mesh": "mesh",
    "CausalTransformer": "transformer_shard",
    "CausalTransformerV2": "transformer_zero",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
