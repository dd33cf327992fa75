"""What a row asks of its tokens, checked at the door: temperature, filters, penalties, bias, seed, log-probabilities.

Letters: B rows, V vocabulary, E entries of a bias. `sampling` applies what is described here, on the devices.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from mesh_transformer.errors import ConfigError

# A jax.Array inside a computation, numpy's on the way there, a PartitionSpec where placements have the same tree.
Leaf: TypeAlias = Any

NO_TOP_K = np.iinfo(np.int32).max
NO_LOGPROBS = -1
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
ORDERS = ("reference", "huggingface")
WINDOWS = ("full", "reference")
DEFAULTS: dict[str, Any] = {
    "temp": 1.0, "top_p": 1.0, "top_k": None, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "logit_bias": None, "logprobs": None,
}  # fmt: skip
_SEED_BITS = 64
_FLOAT32 = np.finfo(np.float32)


class Mode(NamedTuple):
    """What compiled functions are made for: a part of the key by which they are kept.

    `order`: of the filters, see `sampling`. `window`: `full`, past the context a token attends to the newest `seq`
    positions, or `reference`, one fewer, as the 2021 library. What rows may ask for; a row that does not costs next to
    nothing, and what is off costs nothing at all: `penalties`, `bias` (entries of a row's logit_bias at most),
    `logprobs` (how many of the most probable tokens; -1 is off, 0 the drawn token's alone), `logits` (all of them).
    """

    order: str = "reference"
    window: str = "full"
    penalties: bool = False
    bias: int = 0
    logprobs: int = NO_LOGPROBS
    logits: bool = False


PLAIN = Mode()


class Penalties(NamedTuple):
    """Float32 [B]: `repetition` (1 is off), `presence` and `frequency` (0 is off)."""

    repetition: Leaf
    presence: Leaf
    frequency: Leaf


class Bias(NamedTuple):
    """What is added to logits: `ids` int32 [B, E] (-1 is filler) and `values` float32 [B, E]."""

    ids: Leaf
    values: Leaf


class Sampler(NamedTuple):
    """How each row's tokens are drawn.

    `temp` float32 [B], 0 is greedy; `top_p` float32 [B] in [0, 1]; `top_k` int32 [B], NO_TOP_K is off; `min_p` float32
    [B] in [0, 1], 0 is off; `seed` uint32 [B, 2], the two words of a 64-bit seed. None where the mode has them off:
    `penalties`, `bias`, and `logprobs` int32 [B], how many the row asks for (NO_LOGPROBS: none).
    """

    temp: Leaf
    top_p: Leaf
    top_k: Leaf
    min_p: Leaf
    seed: Leaf
    penalties: Penalties | None = None
    bias: Bias | None = None
    logprobs: Leaf | None = None


def sampler_of(
    options: Mapping[str, Any] | None, rows: int, seed: int | Sequence[int] = 0, mode: Mode | None = None
) -> Sampler:
    """Checks sampler options (scalars or one entry a row, see DEFAULTS) and spreads them over `rows` rows.

    What is left out or None: temp 1, top_p 1, everything else off. logit_bias: {token id: what is added to its logit}.
    A single seed s gives row i the seed s + i, so that equal prompts get different texts; a sequence gives each row its
    own. With a `mode` the sampler has what the mode has, and asking for more is refused; without one, what the options
    ask for (see `mode_of`). Host arrays. Raises ConfigError naming the option.
    """
    options = dict(options or {})
    for name in options:
        if name not in DEFAULTS:
            nearest = difflib.get_close_matches(str(name), DEFAULTS, 1, 0.0)[0]
            raise ConfigError(f"sampler option {name!r} is unknown; the nearest is {nearest!r}")
    values = {name: _spread(name, options.get(name), rows) for name in DEFAULTS}

    def floats(name: str, low: float, high: float) -> np.ndarray:
        return np.array([min(_number(name, x, low, high), float(_FLOAT32.max)) for x in values[name]], np.float32)

    penalties = Penalties(
        np.array([_repetition(x) for x in values["repetition_penalty"]], np.float32),
        floats("presence_penalty", -2, 2), floats("frequency_penalty", -2, 2),
    )  # fmt: skip
    bias = [_bias(x) for x in values["logit_bias"]]
    logprobs = np.array([_logprobs(x) for x in values["logprobs"]], np.int32)
    wanted = Mode(
        penalties=bool((penalties.repetition != 1).any() or penalties.presence.any() or penalties.frequency.any()),
        bias=max((len(each) for each in bias), default=0),
        logprobs=int(max(logprobs, default=NO_LOGPROBS)),
    )
    if mode is None:
        mode = wanted
    _check_mode(wanted, mode)
    return Sampler(
        floats("temp", 0, math.inf),
        floats("top_p", 0, 1),
        np.array([_top_k(x) for x in values["top_k"]], np.int32),
        floats("min_p", 0, 1),
        seed_words(seed, rows),
        penalties if mode.penalties else None,
        _entries(bias, mode.bias) if mode.bias else None,
        logprobs if mode.logprobs > NO_LOGPROBS else None,
    )


def mode_of(sampler: Sampler, order: str = "reference", window: str = "full", logits: bool = False) -> Mode:
    """The mode that this sampler needs; the number of log-probabilities read from it, so its arrays must be numpy's.

    Raises ConfigError for an order or window that does not exist.
    """
    for name, value, known in (("filter order", order, ORDERS), ("window", window, WINDOWS)):
        if value not in known:
            raise ConfigError(f"{name} {value!r} is unknown: choose one of {', '.join(known)}")
    return Mode(
        order, window, sampler.penalties is not None, 0 if sampler.bias is None else sampler.bias.ids.shape[1],
        NO_LOGPROBS if sampler.logprobs is None else int(sampler.logprobs.max()), logits,
    )  # fmt: skip


def _check_mode(wanted: Mode, mode: Mode) -> None:
    if wanted.penalties and not mode.penalties:
        raise ConfigError("penalties were asked for where the batch was made without them")
    if wanted.bias > mode.bias:
        raise ConfigError(f"logit_bias has {wanted.bias} entries, expected at most {mode.bias}")
    if wanted.logprobs > mode.logprobs:
        raise ConfigError(f"logprobs ({wanted.logprobs}) must be at most {mode.logprobs}")


def seed_words(seed: int | Sequence[int], rows: int) -> np.ndarray:
    """uint32 [rows, 2] of one seed (row i: seed + i) or one seed a row; any integers, taken modulo 2^64."""
    each = list(np.asarray(seed, object).reshape(-1))
    if np.ndim(seed) == 0:
        each = [each[0] + i if _is_integer(each[0]) else each[0] for i in range(rows)]
    _check_rows("seed", len(each), rows)
    for value in each:
        if not _is_integer(value):
            raise ConfigError(f"seed ({value!r}) must be an integer")
    wrapped = [int(value) % 2**_SEED_BITS for value in each]
    return np.array([[value >> 32, value & 0xFFFFFFFF] for value in wrapped], np.uint32).reshape(rows, 2)


def filler(sampler: Sampler, rows: int) -> Sampler:
    """A sampler of `rows` greedy rows that ask for nothing, of the same mode as `sampler`."""
    zeros = jax.tree.map(lambda x: np.zeros((rows, *x.shape[1:]), x.dtype), sampler)
    return zeros._replace(
        top_k=np.full(rows, NO_TOP_K, np.int32),
        penalties=zeros.penalties and zeros.penalties._replace(repetition=np.ones(rows, np.float32)),
        bias=zeros.bias and zeros.bias._replace(ids=zeros.bias.ids - 1),
        logprobs=None if zeros.logprobs is None else zeros.logprobs + NO_LOGPROBS,
    )


def _spread(name: str, value: Any, rows: int) -> list[Any]:
    """One entry a row of a scalar or sequence; None becomes the default."""
    entries = [value] * rows if value is None or np.ndim(value) == 0 else list(np.asarray(value, object).reshape(-1))
    _check_rows(name, len(entries), rows)
    return [DEFAULTS[name] if entry is None else entry for entry in entries]


def _check_rows(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise ConfigError(f"{name} has {found} entries for {rows} rows: give one number, or one for each row")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral | np.integer) and not isinstance(value, bool | np.bool_)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.ndarray | jax.Array) and np.ndim(value) == 0 else value


def _number(name: str, value: Any, low: float, high: float) -> float:
    value = _plain(value)
    real = isinstance(value, numbers.Real | np.floating | np.integer) and not isinstance(value, bool | np.bool_)
    if not real or not low <= float(value) <= high or not math.isfinite(float(value)):
        rule = f"a number from {low} to {high}" if math.isfinite(high) else f"a finite number of at least {low}"
        raise ConfigError(f"{name} ({value!r}) must be {rule}")
    return float(value)


def _repetition(value: Any) -> float:
    number = _number("repetition_penalty", value, 0, math.inf)
    if not _FLOAT32.tiny <= number <= float(_FLOAT32.max):
        raise ConfigError(f"repetition_penalty ({value!r}) must be above 0, and finite; 1 is off")
    return number


def _top_k(value: Any) -> int:
    value = _plain(value)
    if value is None:
        return NO_TOP_K
    if not _is_integer(value) or value < 1:
        raise ConfigError(f"top_k ({value!r}) must be an integer of at least 1; leave it out, or null, to turn it off")
    return min(int(value), NO_TOP_K)


def _logprobs(value: Any) -> int:
    value = _plain(value)
    if value is None:
        return NO_LOGPROBS
    if not _is_integer(value) or not 0 <= value <= MAX_LOGPROBS:
        raise ConfigError(f"logprobs ({value!r}) must be an integer from 0 to {MAX_LOGPROBS}; null is off")
    return int(value)


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias ({value!r}) must give a number for each of its token ids, {{id: number}}")
    found: dict[int, float] = {}
    for key, number in value.items():
        if not _is_integer(key) or not 0 <= key <= np.iinfo(np.int32).max:
            raise ConfigError(f"logit_bias has the key {key!r}, which is no token id")
        found[int(key)] = _number(f"logit_bias of {key}", number, -MAX_BIAS, MAX_BIAS)
    return found


def _entries(bias: Sequence[Mapping[int, float]], width: int) -> Bias:
    ids, values = np.full((len(bias), width), -1, np.int32), np.zeros((len(bias), width), np.float32)
    for i, each in enumerate(bias):
        ids[i, : len(each)], values[i, : len(each)] = list(each.keys()), list(each.values())
    return Bias(ids, values)
