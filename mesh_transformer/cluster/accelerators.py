"""What a TPU's accelerator name says, by the rule that names follow, so that types to come need no new line here."""

from __future__ import annotations

import dataclasses
import re

from mesh_transformer.errors import ConfigError
from mesh_transformer.planning.chips import CHIPS

_NAME = re.compile(r"((?:v|tpu)\d+[a-z]*)-(\d+)")
# What the Cloud API calls them, where that is not the name that people use.
_GENERATIONS = {"v5litepod": "v5e", "v5lite": "v5e"}
_API_NAMES = {"v5e": "v5litepod", "v5lite": "v5litepod"}
# The image of a family. A later one's is `v2-alpha-tpuGENERATION`, as v6e's is.
_RUNTIMES = {
    "v2": "tpu-ubuntu2204-base", "v3": "tpu-ubuntu2204-base", "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5",
}  # fmt: skip
ONE_HOST_CHIPS = 8  # v5e and v6e: slices up to this many chips are one machine, larger ones have HOST_CHIPS a machine
HOST_CHIPS = 4


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A TPU type. `name`: as the API takes it; `generation`: v2 to v6e or later; `size`: the number in the name."""

    name: str
    generation: str
    size: int

    @property
    def devices_per_chip(self) -> int:
        """JAX devices: both cores of a v2 or v3 chip are one each, and later chips are one."""
        chip = CHIPS.get(self.generation)
        return chip.devices if chip else 1

    @property
    def devices(self) -> int | None:
        """JAX devices of the whole slice, None for a family that is not known: what its number counts is not either."""
        chip = CHIPS.get(self.generation)
        return self.size // chip.suffix * chip.devices if chip else None

    @property
    def usual_hosts(self) -> int:
        """How many machines such a slice usually has: what a dry run shows. The API says how many there are."""
        chip = CHIPS.get(self.generation)
        chips = self.size // (chip.suffix if chip else 1)
        one = ONE_HOST_CHIPS if chip and chip.suffix == 1 else HOST_CHIPS
        return 1 if chips <= one else -(-chips // HOST_CHIPS)

    @property
    def runtime(self) -> str:
        """The image that such machines usually start from."""
        return _RUNTIMES.get(self.generation, f"v2-alpha-tpu{self.generation.removeprefix('tpu')}")


def accelerator(name: str) -> Accelerator:
    """The type of `v3-8`, `v4-32`, `v5e-16`, `v5litepod-16`, `v5p-128`, `v6e-64` and later ones of this form.

    Raises ConfigError for any other form. Whether a zone has it, the API says.
    """
    found = _NAME.fullmatch(name.strip().lower())
    if found is None or int(found.group(2)) < 1:
        raise ConfigError(
            f"TPU type {name!r}: expected a generation and a size, such as v3-8, v4-32, v5litepod-16, v5p-128 or v6e-64"
        )
    family, size = found.group(1), int(found.group(2))
    generation = _GENERATIONS.get(family, family)
    chip = CHIPS.get(generation)
    if chip and size % chip.suffix:
        raise ConfigError(
            f"TPU type {name!r}: the number after {family} counts cores, {chip.suffix} a chip: not {size}"
        )
    return Accelerator(f"{_API_NAMES.get(family, family)}-{size}", generation, size)
