"""Model FLOP/s, and their share of what the devices can do at best (MFU)."""

from __future__ import annotations

from mesh_transformer.config import ModelConfig
from mesh_transformer.planning import chips


def peak_flops(device_kind: str) -> float | None:
    """Peak of one device, or None where it is not known (any CPU)."""
    chip = chips.chip_of(device_kind)
    return chip.flops if chip is not None else None


def flops_per_token(model: ModelConfig) -> float:
    """FLOPs of forward and backward for one token, recomputation not counted.

    6 for each weight of a matrix product (attention, feed-forward, output head; the embedding is a look-up), and
    12 L S HK for attention's own two products without the causal saving, as Chowdhery et al. 2022, appendix B, count;
    HK, the width of all heads, is D in version 1. Version 2's feed-forward part has a gate, so a third matrix.
    """
    L, D, S, heads = model.layers, model.d_model, model.seq, model.d_attention
    weights = L * (4 * D * heads + (model.version + 1) * D * model.d_ff) + D * model.n_vocab
    return 6.0 * weights + 12.0 * L * S * heads


def rates(
    model: ModelConfig, tokens: int, seconds: float, device_kind: str | None = None, devices: int = 1
) -> dict[str, float]:
    """Speed metrics of a step that took `seconds` for `tokens` tokens on `devices` devices."""
    seconds = max(seconds, 1e-9)
    flops = flops_per_token(model) * tokens / seconds
    metrics = {
        "train/step_seconds": seconds,
        "train/steps_per_sec": 1.0 / seconds,
        "train/tokens_per_sec": tokens / seconds,
        "train/model_flops_per_sec": flops,
    }
    peak = peak_flops(device_kind) if device_kind else None
    if peak is not None:
        metrics["train/mfu"] = flops / (peak * devices)
    return metrics
