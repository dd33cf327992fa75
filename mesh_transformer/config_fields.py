"""What a config key is: its type, default, range, unit and meaning, and the one check of a value against them.

The dataclasses of `config_groups` declare their fields with `key(...)`; validation, defaults, `docs/config.md` and the
resume check all read the `Spec` that it leaves in the field's metadata, so nothing about a key is said twice.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

INT, FLOAT, BOOL, STRING, STRINGS, MAPPING = (
    "integer",
    "number",
    "true or false",
    "string",
    "list of strings",
    "mapping of strings",
)

MOST = 2**31 - 1  # of an integer without a bound of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The rules of one key.

    default: the value of a missing key; `REQUIRED` where there is none.  derived: in words, how a missing key is worked
    out from others; its default is None until it is.  null: what JSON null stands for; `REQUIRED` where it is refused.
    blank: whether an empty string counts as null, as in a config that was filled in halfway.
    low, high: bounds that are allowed themselves.  above, below: bounds that are not.
    agrees: whether two runs must have the same value for one to resume the other.
    """

    kind: str
    default: Any
    meaning: str
    name: str = ""  # the JSON key, where it is not the field's name
    unit: str = ""
    derived: str = ""
    null: Any
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | tuple[int, ...] = ()
    blank: bool = False
    example: str = ""
    agrees: bool = False

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def rule(self) -> str:
        """The type and range in words, as errors and the documentation give them."""
        article = {INT: "an integer", FLOAT: "a number", STRING: "a string", STRINGS: "a list of strings"}
        words = article.get(self.kind, self.kind)
        if self.kind == MAPPING:
            words = "a mapping from name to path"
        if self.choices:
            words = ("a list of " if self.kind == STRINGS else "one of ") + ", ".join(map(str, self.choices))
        bounds = ((">=", self.low), (">", self.above), ("<=", self.high), ("<", self.below))
        limits = " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
        if self.low is not None and self.low == self.high:
            words, limits = str(self.low), ""
        return f"{words} {limits}".strip() + (", or null" if self.null is not REQUIRED else "")


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


def key(kind: str, default: Any, meaning: str, **rules: Any) -> Any:
    """A dataclass field that is a config key; `rules` are the further fields of `Spec`.

    A default of None makes null allowed, meaning the same as leaving the key out.
    """
    rules.setdefault("null", None if default is None else REQUIRED)
    spec = Spec(kind=kind, default=default, meaning=meaning, **rules)
    if spec.required:
        return dataclasses.field(metadata={"spec": spec})
    if kind == MAPPING:
        # A dict cannot be hashed, and a config is used as a static argument; equality still compares it.
        return dataclasses.field(default_factory=dict, hash=False, metadata={"spec": spec})
    return dataclasses.field(default=default, metadata={"spec": spec})


def specs_of(group: type) -> dict[str, Spec]:
    """JSON key to `Spec`, in the order of the dataclass `group`."""
    return {name: spec for name, (_, spec) in fields_of(group).items()}


def fields_of(group: type) -> dict[str, tuple[str, Spec]]:
    """JSON key to (field name, `Spec`), in the order of the dataclass `group`."""
    found = {}
    for field in dataclasses.fields(group):
        if "spec" in field.metadata:
            spec = field.metadata["spec"]
            found[spec.name or field.name] = (field.name, spec)
    return found


def check_value(name: str, value: Any, spec: Spec) -> tuple[Any, str | None]:
    """The value in its Python type and None, or anything and one line that says what is wrong with it."""
    if spec.blank and value == "":
        value = None
    if value is None:
        return spec.null, None if spec.null is not REQUIRED else _wrong(name, value, spec)
    given = value
    if spec.kind in (INT, FLOAT):
        good, value = _number(value, spec.kind)
    elif spec.kind == STRINGS:
        good = isinstance(value, list | tuple) and all(isinstance(item, str) and item.strip() for item in value)
        value = tuple(value) if good else value
    elif spec.kind == MAPPING:
        good = isinstance(value, Mapping)
        value = dict(value) if good else value
    else:
        good = isinstance(value, bool) if spec.kind == BOOL else isinstance(value, str) and bool(value.strip())
    if not good or not _within(value, spec):
        return value, _wrong(name, given, spec)
    if spec.kind == INT and spec.high is None and value > MOST:
        return value, f"{name} is {shorten(repr(given))}; it must be at most {MOST}, since devices count in 32 bits"
    return value, _wrong_item(name, value) if spec.kind == MAPPING else None


def _number(value: Any, kind: str) -> tuple[bool, Any]:
    """Whether `value` is a finite number of that kind, and the number. 1e5, a float to JSON, is an integer too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False, value
    try:
        number = float(value)
    except OverflowError:
        return False, value
    if not math.isfinite(number) or (kind == INT and value != int(value)):
        return False, value
    return True, int(value) if kind == INT else number


def _within(value: Any, spec: Spec) -> bool:
    if spec.choices:
        return set(value if spec.kind == STRINGS else [value]).issubset(spec.choices)
    if spec.kind not in (INT, FLOAT):
        return True
    return (
        (spec.low is None or value >= spec.low)
        and (spec.above is None or value > spec.above)
        and (spec.high is None or value <= spec.high)
        and (spec.below is None or value < spec.below)
    )


def _wrong(name: str, value: Any, spec: Spec) -> str:
    found = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    example = f", e.g. {spec.example}" if spec.example else ""
    line = f"{name} is {shorten(found)}; it must be {spec.rule}{example} ({spec.meaning})"
    if spec.choices and isinstance(value, str) and spec.kind == STRING:
        line += f"; did you mean {nearest(value, map(str, spec.choices))!r}?"
    if spec.kind in (INT, FLOAT) and isinstance(value, str):
        line += "; write numbers without quotes"
    return line


def _wrong_item(name: str, mapping: Mapping[Any, Any]) -> str | None:
    for item, path in mapping.items():
        if not (isinstance(item, str) and item and isinstance(path, str) and path.strip()):
            return f"{name} has {item!r}: {shorten(repr(path))}; names and paths must be strings that are not empty"
    return None


def shorten(text: str, width: int = 80) -> str:
    """`text` on one line of at most `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`, whatever the distance."""
    names = sorted(known)
    wanted = name.lower().replace("-", "_").replace(" ", "_")
    return difflib.get_close_matches(wanted, names, n=1, cutoff=0.0)[0]
