"""Index files: what a line may be, where it points, and what is said when it points nowhere."""

from __future__ import annotations

import os

import pytest
from data_tools import number_files, numbered, read_numbers, write_records

from mesh_transformer.data.index import read_index
from mesh_transformer.data.loader import RecordLoader
from mesh_transformer.errors import DataError


def test_comments_blank_lines_crlf_and_byte_order_mark(tmp_path):
    index = tmp_path / "x.index"
    index.write_bytes(b"\xef\xbb\xbf# made by hand\r\n\r\na.tfrecords\r\n   \r\n  sub/b c.tfrecords  \r\n#c\r\n\r\n")
    assert read_index(str(index)) == [f"{tmp_path}/a.tfrecords", f"{tmp_path}/sub/b c.tfrecords"]


def test_lines_are_absolute_urls_or_relative_to_the_index(tmp_path):
    index = tmp_path / "x.index"
    index.write_text("/abs/a.tfrecords\ngs://bucket/b.tfrecords\nhttps://host/c.tfrecords\nfile:///abs/d\n../e")
    assert read_index(str(index)) == [
        "/abs/a.tfrecords", "gs://bucket/b.tfrecords", "https://host/c.tfrecords", "/abs/d", f"{tmp_path}/../e",
    ]  # fmt: skip


def test_reads_from_any_working_directory(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    index = number_files(here, [2, 2])
    (there / "abs.index").write_text(f"{here}/f0.tfrecords\n{here}/f1.tfrecords\n")
    monkeypatch.chdir(there)
    for path in (index, os.path.relpath(index), "abs.index"):
        with RecordLoader(path, (2,), 4, 100, epochs=1) as loader:
            assert read_numbers(loader) == [0, 1, 2, 3]


def test_a_line_given_twice_is_read_twice_also_after_a_resume(tmp_path, caplog):
    write_records(tmp_path / "a", numbered(0, 3))
    write_records(tmp_path / "b", numbered(3, 2))
    index = tmp_path / "x.index"
    index.write_text("a\nb\na\n\n")
    expected = [0, 1, 2, 3, 4, 0, 1, 2]
    with RecordLoader(str(index), (1,), 4, 100, epochs=1) as loader:
        for taken in range(8):
            with RecordLoader(str(index), (1,), 4, 100, epochs=1, position=loader.position) as resumed:
                assert read_numbers(resumed) == expected[taken:]
            assert read_numbers(loader, 1) == [expected[taken]]
    assert "more than once" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "lists no record file"),
        (b"# only this\n\n", "lists no record file"),
        (
            b"a\nmissing.tfrecords\nmissing2.tfrecords\n",
            "lists 2 files that do not exist: .*missing.tfrecords, /",
        ),
        (b"\x05\x00\x00\x00\xff\xfe", "is not text .*If it is a record file, write its path into an index file"),
    ],
)
def test_errors_name_index_and_remedy(tmp_path, content, message):
    write_records(tmp_path / "a", numbered(0, 3))
    index = tmp_path / "x.index"
    index.write_bytes(content)
    with pytest.raises(DataError, match=f"x.index: {message}"):
        RecordLoader(str(index), (1,), 4, 100)


def test_missing_index(tmp_path):
    with pytest.raises(DataError, match=r"none\.index: no such index file; .*--index writes it"):
        RecordLoader(str(tmp_path / "none.index"), (1,), 4, 100)
