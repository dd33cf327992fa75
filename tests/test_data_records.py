"""Record files: the wire format against other implementations, and every kind of damage named by file and offset."""

from __future__ import annotations

import gzip
import re
import struct
import zlib

import numpy as np
import pytest
import zstandard
from data_tools import number_files, numbered, read_numbers, write_index, write_records

from mesh_transformer.data import example
from mesh_transformer.data.loader import RecordLoader
from mesh_transformer.data.records import OFFSETS_SUFFIX, RecordFile, encode_offsets
from mesh_transformer.errors import DataError

# tf.train.Example with `text` = [0, 1, 127, 128, 50256], as TensorFlow 2 serialises it, and its TFRecord frame.
TENSORFLOW_EXAMPLE = bytes.fromhex("0a160a140a0474657874120c1a0a0a0800017f8001d08803")
TENSORFLOW_RECORD_HEAD = "1800000000000000"


def contents(path):
    return [features["text"].tolist() for _, features in RecordFile(str(path)).records_from(0, 0)]


def test_example_bytes_are_tensorflows():
    ids = np.array([0, 1, 127, 128, 50256])
    assert example.encode({"text": ids}) == TENSORFLOW_EXAMPLE
    assert example.decode(TENSORFLOW_EXAMPLE)["text"].tolist() == ids.tolist()


def test_frame_is_tensorflows(tmp_path):
    path = write_records(tmp_path / "a", [[0, 1, 127, 128, 50256]])
    content = path.read_bytes()
    assert content[:8].hex() == TENSORFLOW_RECORD_HEAD and content[12:-4] == TENSORFLOW_EXAMPLE
    # The checksum, worked out bit by bit: CRC-32C (Castagnoli), rotated right by 15 bits, plus a constant.
    for checked, stored in ((content[:8], content[8:12]), (content[12:-4], content[-4:])):
        crc = 0xFFFFFFFF
        for octet in checked:
            crc ^= octet
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        crc ^= 0xFFFFFFFF
        assert struct.unpack("<I", stored)[0] == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_example_matches_protobuf():
    """The message class that protocol buffers build from the format's description reads and writes the same."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    numbers = file.message_type.add(name="Int64List")
    numbers.field.add(name="value", number=1, label=3, type=3)
    floats = file.message_type.add(name="FloatList")
    floats.field.add(name="value", number=1, label=3, type=2)
    feature = file.message_type.add(name="Feature")
    feature.field.add(name="float_list", number=2, label=1, type=11, type_name=".t.FloatList")
    feature.field.add(name="int64_list", number=3, label=1, type=11, type_name=".t.Int64List")
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".t.Feature")
    features.field.add(name="feature", number=1, label=3, type=11, type_name=".t.Features.FeatureEntry")
    whole = file.message_type.add(name="Example")
    whole.field.add(name="features", number=1, label=1, type=11, type_name=".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    make = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))

    rng = np.random.default_rng(0)
    for size in (0, 1, 300):
        values = (rng.integers(0, 2**63, size, dtype=np.uint64) >> rng.integers(0, 63, size).astype(np.uint64)).astype(
            np.int64
        )
        negative, weights = -values, rng.random(size)
        ours = make.FromString(example.encode({"text": values, "negative": negative, "weights": weights}))
        assert list(ours.features.feature["text"].int64_list.value) == values.tolist()
        assert list(ours.features.feature["negative"].int64_list.value) == negative.tolist()
        assert list(ours.features.feature["weights"].float_list.value) == weights.astype(np.float32).tolist()
        theirs = make()
        theirs.features.feature["text"].int64_list.value.extend([*values.tolist(), -1, -(2**63)])
        theirs.features.feature["weights"].float_list.value.extend([0.5, 1.0])
        decoded = example.decode(theirs.SerializeToString())
        assert decoded["text"].tolist() == [*values.tolist(), -1, -(2**63)]
        assert decoded["weights"].tolist() == [0.5, 1.0]


def test_fractions_stay_fractions_and_other_types_are_refused():
    assert example.decode(example.encode({"mask": np.array([0.5, 0.0])}))["mask"].tolist() == [0.5, 0.0]
    assert example.decode(example.encode({"mask": np.array([True, False])}))["mask"].tolist() == [1, 0]
    with pytest.raises(DataError, match="feature `text` is of type <U1; expected integers or floats"):
        example.encode({"text": np.array(["a"])})


def test_unpacked_integers_are_read():
    unpacked = bytes.fromhex("080108d08803")  # two fields of wire type 0, as writers before packing did
    feature = b"\x1a" + bytes([len(unpacked)]) + unpacked
    entry = b"\x0a\x04text\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert example.decode(b"\x0a" + bytes([len(features)]) + features)["text"].tolist() == [1, 50256]


def test_flipped_byte_names_file_record_and_offset(tmp_path):
    path = write_records(tmp_path / "a.tfrecords", numbered(0, 5))
    good = path.read_bytes()
    offsets = RecordFile(str(path)).offsets.tolist()
    for number in (0, 3):
        for inside, what in ((0, "length"), (14, "checksum")):
            if number == 0 and inside == 0:
                continue  # then the file does not look like a record file at all
            broken = bytearray(good)
            broken[offsets[number] + inside] ^= 1
            path.write_bytes(broken)
            message = rf"{re.escape(str(path))}: record {number} at byte offset {offsets[number]} is corrupt.*{what}"
            with pytest.raises(DataError, match=message):
                contents(path)


@pytest.mark.parametrize("cut", [3, 14, -1])
def test_truncation_is_named_at_its_offset(tmp_path, cut):
    path = write_records(tmp_path / "a.tfrecords", numbered(0, 3))
    offsets = RecordFile(str(path)).offsets.tolist()
    path.write_bytes(path.read_bytes()[: (offsets[2] if cut > 0 else offsets[3]) + cut])
    with pytest.raises(DataError, match=f"record 2 at byte offset {offsets[2]} is truncated"):
        contents(path)
    with pytest.raises(DataError, match=f"record 2 at byte offset {offsets[2]} is truncated"):
        assert RecordFile(str(path)).count


def test_damage_in_the_middle_surfaces_from_the_loaders_thread(tmp_path):
    index = number_files(tmp_path, [3, 3])
    path = tmp_path / "f1.tfrecords"
    offset = int(RecordFile(str(path)).offsets[2])
    content = bytearray(path.read_bytes())
    content[offset + 15] ^= 4
    path.write_bytes(content)
    with RecordLoader(index, (1,), 4, 100) as loader:
        assert read_numbers(loader, 5) == [0, 1, 2, 3, 4]
        for _ in range(2):  # and it stays so
            with pytest.raises(DataError, match=rf"f1\.tfrecords: record 2 at byte offset {offset} is corrupt"):
                next(loader)


CODECS = {"gzip": gzip.compress, "zlib": zlib.compress, "zstandard": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("codec", CODECS)
def test_codec_is_seen_from_the_content(tmp_path, codec):
    """Whatever the names: a plain file among `zstd` in its path, and a compressed one called .tfrecords."""
    folder = tmp_path / "a scratch zstd folder"
    folder.mkdir()
    plain = write_records(folder / "plain.zstd.tfrecords", numbered(0, 4))
    packed = folder / "packed.tfrecords"
    packed.write_bytes(CODECS[codec](plain.read_bytes()))
    index = write_index(folder, [plain.name, packed.name])
    for shuffle in (False, True):
        with RecordLoader(index, (2,), 4, 100, epochs=1, shuffle=shuffle) as loader:
            assert sorted(read_numbers(loader)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert contents(packed) == contents(plain)


def test_restart_in_a_compressed_file(tmp_path):
    packed = tmp_path / "packed.tfrecords"
    packed.write_bytes(gzip.compress(write_records(tmp_path / "plain", numbered(0, 9)).read_bytes()))
    index = write_index(tmp_path, [packed.name])
    with RecordLoader(index, (1,), 4, 100, epochs=1) as loader:
        assert read_numbers(loader, 5) == [0, 1, 2, 3, 4]
        with RecordLoader(index, (1,), 4, 100, epochs=1, position=loader.position) as resumed:
            assert read_numbers(resumed) == [5, 6, 7, 8]


@pytest.mark.parametrize("codec", CODECS)
def test_broken_compression_is_an_error(tmp_path, codec):
    packed = CODECS[codec](write_records(tmp_path / "plain", numbered(0, 500)).read_bytes())
    path = tmp_path / "packed.tfrecords"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=rf"packed\.tfrecords.*(broken {codec}|truncated)"):
        contents(path)


def test_other_content_is_refused_with_what_was_found(tmp_path):
    path = tmp_path / "notes.tfrecords"
    path.write_text("these are not records, but a text")
    with pytest.raises(DataError, match=r"notes\.tfrecords: starts with 74 68.*expected a whole record file"):
        contents(path)
    path.write_bytes(gzip.compress(b"these are not records, but a text"))
    with pytest.raises(DataError, match=r"is gzip, but what it decompresses to starts with 74 68"):
        contents(path)


def test_record_that_is_no_example(tmp_path):
    path = tmp_path / "a.tfrecords"
    from mesh_transformer.data.records import masked_crc

    content = b"\x0a\x7fhello"
    length = struct.pack("<Q", len(content))
    crcs = [struct.pack("<I", masked_crc(part)) for part in (length, content)]
    path.write_bytes(length + crcs[0] + content + crcs[1])
    with pytest.raises(DataError, match=r"record 0 at byte offset 0 is not a tf\.train\.Example: a field of 127 bytes"):
        contents(path)


def test_offsets_beside_the_file_are_used_only_if_they_fit(tmp_path):
    path = write_records(tmp_path / "a.tfrecords", numbered(0, 5))
    scanned = RecordFile(str(path)).offsets.tolist()
    assert scanned[0] == 0 and scanned[-1] == path.stat().st_size and len(scanned) == 6
    cache = tmp_path / f"a.tfrecords{OFFSETS_SUFFIX}"
    wrong = [0, 1, scanned[-1]]
    cache.write_bytes(encode_offsets(wrong))
    assert RecordFile(str(path)).offsets.tolist() == wrong  # it is read, not scanned again
    for stale in (encode_offsets([0, 1, scanned[-1] - 1]), b"something else", b""):
        cache.write_bytes(stale)
        assert RecordFile(str(path)).offsets.tolist() == scanned
