"""Float types of weights by name, and casts that refuse to turn a finite value into infinity."""

from __future__ import annotations

import numpy as np

from mesh_transformer.checkpoint.npz import BFLOAT16
from mesh_transformer.errors import CheckpointError

FLOAT_TYPES = {
    "f32": np.dtype(np.float32), "fp32": np.dtype(np.float32), "float32": np.dtype(np.float32),
    "f16": np.dtype(np.float16), "fp16": np.dtype(np.float16), "float16": np.dtype(np.float16),
    "bf16": BFLOAT16, "bfloat16": BFLOAT16,
}  # fmt: skip

_LARGEST = {np.dtype(np.float16): 65504.0, BFLOAT16: 3.39e38, np.dtype(np.float32): 3.4e38}
_INFINITE = {np.dtype(np.float16): 0x7C00, BFLOAT16: 0x7F80}  # the bits of infinity; those of NaN are above


def cast(values: np.ndarray, dtype: np.dtype, label: str) -> np.ndarray:
    """`values` in `dtype`, rounded to the nearest; the same array where it has that type already.

    Values too small for float16 become zero or lose bits; infinities and NaN stay. Raises CheckpointError naming
    `label` where a finite value would become infinite.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        out = values.astype(dtype)
    if dtype in _LARGEST and not _all_finite(out):
        lost = np.isfinite(values.astype(np.float32)) & ~np.isfinite(out.astype(np.float32))
        if lost.any():
            largest = float(np.abs(values[lost].astype(np.float64)).max())
            raise CheckpointError(
                f"{label} holds {largest:.6g}, and {dtype.name} ends at {_LARGEST[dtype]:g}: "
                f"{int(lost.sum())} values would become infinite; use {'bf16' if dtype == np.float16 else 'f32'}"
            )
    return out


def _all_finite(values: np.ndarray) -> bool:
    if values.dtype in _INFINITE:  # several times as fast as isfinite, which goes value by value
        bits = values.view(np.uint16) & 0x7FFF
        return int(bits.max(initial=0)) < _INFINITE[values.dtype]
    return bool(np.isfinite(values).all())
