"""`tf.train.Example` messages with integer and float features, encoded and decoded with numpy alone.

The wire format (protocol buffers): Example.features = 1, Features.feature = 1 (a map: key = 1, value = 2),
Feature.float_list = 2, Feature.int64_list = 3, and in each list value = 1, packed (one run of bytes) or not.
Integers are varints: 7 bits a byte, low bits first, the high bit set on every byte but the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mesh_transformer.errors import DataError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT_LIST, _INT64_LIST = 2, 3


class MalformedExampleError(ValueError):
    """The bytes are not a tf.train.Example; whoever knows the file and offset turns this into a DataError."""


def encode(features: Mapping[str, np.ndarray]) -> bytes:
    """Serialise features [N] as one Example: integers (and booleans) as int64, floats as float32.

    Equal features give equal bytes (keys are sorted). Raises DataError for any other type.
    """
    entries = b""
    for key in sorted(features):
        values = np.asarray(features[key])
        if values.dtype.kind in "iub":
            feature = _field(_INT64_LIST, _field(1, encode_varints(values)))
        elif values.dtype.kind == "f":
            feature = _field(_FLOAT_LIST, _field(1, values.astype("<f4").tobytes()))
        else:
            raise DataError(f"feature `{key}` is of type {values.dtype}; expected integers or floats")
        entries += _field(1, _field(1, key.encode()) + _field(2, feature))
    return _field(1, entries)


def decode(message: bytes) -> dict[str, np.ndarray]:
    """Features of one Example: int64 [N] for an integer list, float32 [N] for a float list.

    Lists of byte strings are left out. Raises MalformedExampleError.
    """
    features: dict[str, np.ndarray] = {}
    for number, block in _fields(message):
        if number != 1 or not isinstance(block, bytes):
            continue
        for entry_number, entry in _fields(block):
            if entry_number == 1 and isinstance(entry, bytes):
                _decode_entry(entry, features)
    return features


def encode_varints(values: np.ndarray) -> bytes:
    """Integers [N] as consecutive varints; negative ones take ten bytes, as protocol buffers have it."""
    numbers = np.ascontiguousarray(values).astype(np.uint64)
    if not numbers.size:
        return b""
    width = max(1, -(-int(numbers.max()).bit_length() // 7))
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    groups = numbers[:, None] >> shifts  # [N, width]; column k holds what is left after k groups of 7 bits
    more = (numbers[:, None] >> (shifts + np.uint64(7))) > 0 if width < 10 else _more_groups(groups)
    octets = (groups & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7)
    used = groups > 0
    used[:, 0] = True
    return octets[used].tobytes()


def decode_varints(packed: bytes) -> np.ndarray:
    """Consecutive varints as int64 [N]; ten-byte ones are negative numbers, as protocol buffers have it."""
    octets = np.frombuffer(packed, dtype=np.uint8)
    if not octets.size:
        return np.zeros(0, dtype=np.int64)
    ends = np.flatnonzero(octets < 0x80)
    if not ends.size or ends[-1] != octets.size - 1:
        raise MalformedExampleError("the last integer of a list is cut off")
    starts = np.empty_like(ends)
    starts[0], starts[1:] = 0, ends[:-1] + 1
    widths = ends - starts + 1
    widest = int(widths.max())
    if widest > 10:
        raise MalformedExampleError(f"an integer of {widest} bytes, of which 10 are possible")
    values = (octets[starts] & 0x7F).astype(np.uint64)
    for k in range(1, widest):
        longer = np.flatnonzero(widths > k)
        values[longer] |= (octets[starts[longer] + k] & 0x7F).astype(np.uint64) << np.uint64(7 * k)
    return values.astype(np.int64)


def _more_groups(groups: np.ndarray) -> np.ndarray:
    more = np.zeros(groups.shape, dtype=bool)
    more[:, :-1] = groups[:, 1:] > 0
    return more


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    octets = bytearray()
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The value of the varint at a position, and the position after it."""
    value = shift = 0
    while at < len(message) and shift < 70:
        octet = message[at]
        value |= (octet & 0x7F) << shift
        at += 1
        if octet < 0x80:
            return value, at
        shift += 7
    raise MalformedExampleError("a length or tag is cut off")


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(field number, content) of each field: bytes, or the value of a varint."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _read_varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise MalformedExampleError(f"wire type {kind}, which protocol buffers do not have")
        if at + length > len(message):
            raise MalformedExampleError(f"a field of {length} bytes where {len(message) - at} are left")
        yield number, message[at : at + length]
        at += length


def _decode_entry(entry: bytes, features: dict[str, np.ndarray]) -> None:
    """One entry of the map: key and feature."""
    parts = dict(_fields(entry))
    key, feature = parts.get(1, b""), parts.get(2, b"")
    if not isinstance(key, bytes) or not isinstance(feature, bytes):
        raise MalformedExampleError("a feature has no name or no value")
    for kind, content in _fields(feature):
        if not isinstance(content, bytes):
            continue
        if kind == _INT64_LIST:
            features[key.decode("utf-8", "replace")] = _decode_integers(content)
        elif kind == _FLOAT_LIST:
            features[key.decode("utf-8", "replace")] = _decode_floats(content)


def _decode_integers(content: bytes) -> np.ndarray:
    runs: list[np.ndarray] = []
    single: list[int] = []
    for number, value in _fields(content):
        if number == 1 and isinstance(value, bytes):
            runs.append(decode_varints(value))
        elif number == 1 and isinstance(value, int):  # written unpacked, as older writers do
            single.append(value)
    if single:
        runs.append(np.array(single, dtype=np.uint64).astype(np.int64))
    return runs[0] if len(runs) == 1 else np.concatenate([np.zeros(0, np.int64), *runs])


def _decode_floats(content: bytes) -> np.ndarray:
    joined = b"".join(value for number, value in _fields(content) if number == 1 and isinstance(value, bytes))
    if len(joined) % 4:
        raise MalformedExampleError("a list of floats whose length is not a multiple of 4 bytes")
    return np.frombuffer(joined, dtype="<f4").astype(np.float32)
