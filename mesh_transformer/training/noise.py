"""Gradient noise scale: how much batch size the gradient's noise would bear."""

from __future__ import annotations

import dataclasses
import math

LARGE_SQUARED_NORM = 2.0


@dataclasses.dataclass
class NoiseScale:
    """Unbiased estimates of |G|^2 and tr(Sigma) and their averages over steps.

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1. The small batch is one
    replica's microbatch of `per_replica_batch` sequences, the large one the whole step. The averages decay by `alpha`
    a step; they are part of what a resume restores.
    """

    alpha: float
    G_average: float | None = None
    S_average: float | None = None

    def update(self, small: int, large: int, small_squared: float, large_squared: float) -> dict[str, float]:
        """Takes one step's norms and returns the `noise/...` metrics; nothing where the two batch sizes are equal.

        small, large: batch sizes in sequences.  small_squared: mean of the squared norms of the small batches'
        gradients.  large_squared: squared norm of the whole step's mean gradient.
        """
        if small >= large or not (math.isfinite(small_squared) and math.isfinite(large_squared)):
            return {}
        G_noise = (large * large_squared - small * small_squared) / (large - small)
        S_noise = (small_squared - large_squared) / (1.0 / small - 1.0 / large)
        # As the original does: the large gradients of the first steps would take long to wash out of the averages.
        if large_squared < LARGE_SQUARED_NORM:
            self.G_average = self._average(self.G_average, G_noise)
            self.S_average = self._average(self.S_average, S_noise)
        metrics = {"noise/G_noise": G_noise, "noise/S_noise": S_noise}
        if self.G_average is not None and self.S_average is not None:
            metrics["noise/G_noise_avg"] = self.G_average
            metrics["noise/S_noise_avg"] = self.S_average
            if self.G_average != 0.0:
                metrics["noise/B_simple"] = self.S_average / self.G_average
        return metrics

    def _average(self, average: float | None, value: float) -> float:
        return value if average is None else (1.0 - self.alpha) * average + self.alpha * value
