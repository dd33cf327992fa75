"""Reading: which files, in which order, every kind of file, encodings, and documents cut where tokens do not change."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile

import pytest
import zstandard
from data_tools import gpt2_folder, prose, tokenizer

from mesh_transformer.data import documents
from mesh_transformer.data.documents import PIECE_CHARS, split_documents
from mesh_transformer.data.inputs import find_inputs
from mesh_transformer.data.normalise import normaliser, wikitext_detokenize
from mesh_transformer.data.readers import Reader
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.errors import DataError, StorageError

EOT = "<|endoftext|>"
COMPRESS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: zstandard.compress(content[: len(content) // 2]) + zstandard.compress(
        content[len(content) // 2 :]  # two frames, as parallel compressors write
    ),
}  # fmt: skip


def read(path, separator=EOT, **options):
    """The documents of all files of a path."""
    reader = Reader(separator, **options)
    found, text = [], ""
    for file in find_inputs(str(path), recursive=True)[0]:
        for piece in reader.documents(file):
            text += piece.text
            if piece.ends:
                found.append(text)
                text = ""
    assert text == ""
    return found


def tar_of(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_folder_upper_case_and_sub_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "B.TXT", "sub/c.txt", "notes.pdf"):
        (tmp_path / name).write_text(name)
    (tmp_path / "d.jsonl").write_text('{"text": "d"}\n')
    found, left_out = find_inputs(str(tmp_path), recursive=True)
    assert [file.name for file in found] == ["B.TXT", "a.txt", "d.jsonl", "sub/c.txt"]
    assert left_out == ["notes.pdf"]
    found, left_out = find_inputs(str(tmp_path), recursive=False)
    assert [file.name for file in found] == ["B.TXT", "a.txt", "d.jsonl"]
    assert left_out == ["notes.pdf", "sub/"]
    found, _ = find_inputs(str(tmp_path), recursive=False, text_suffixes=(".PDF",))
    assert [file.name for file in found] == ["B.TXT", "a.txt", "d.jsonl", "notes.pdf"]


def test_nothing_to_read_is_an_error(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    (tmp_path / "x.pdf").write_text("x")
    with pytest.raises(DataError, match=r"nothing to read among 2 entries \(sub-folders are read with --recursive\)"):
        find_inputs(str(tmp_path), recursive=False)
    with pytest.raises(DataError, match=r"x\.pdf: not a kind of file that is read; expected \.txt, \.jsonl"):
        find_inputs(str(tmp_path / "x.pdf"), recursive=False)
    with pytest.raises(DataError, match="no such file or folder"):
        find_inputs(str(tmp_path / "none"), recursive=False)
    with pytest.raises(DataError, match="--recursive is for local folders"):
        find_inputs("gs://bucket/folder", recursive=True)


def test_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("a")
    scan = os.scandir

    def denied(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(StorageError, match="sub: cannot list the folder: Permission denied"):
        find_inputs(str(tmp_path), recursive=True)


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_every_kind_of_file(tmp_path, suffix):
    compress = COMPRESS.get(suffix, lambda content: content)
    text = "one" + EOT + "two\nlines — 日本" + EOT
    lines = b"".join(json.dumps({"text": line, "other": 1}).encode() + b"\n" for line in ("three", "four" + EOT + "5"))
    archive = {"x/a.txt": b"six", "x/b.pdf": b"no", "x/c.jsonl.gz": gzip.compress(b'{"text": "seven"}')}
    contents = {".txt": text.encode(), ".jsonl": lines, ".json": lines + b"\n\n", ".tar": tar_of(archive)}
    expected = {".txt": ["one", "two\nlines — 日本", ""], ".tar": ["six", "seven"]}
    for kind, content in contents.items():
        path = tmp_path / f"f{kind}{suffix.upper()}"
        path.write_bytes(compress(content))
        assert read(path) == expected.get(kind, ["three", "four", "5"]), kind
    if suffix:  # the name tells the compression only
        for content, whole in ((text.encode(), expected[".txt"]), (tar_of(archive), expected[".tar"])):
            path = tmp_path / f"plain{suffix}"
            path.write_bytes(compress(content))
            assert read(path) == whole
    if suffix == ".gz":
        (tmp_path / "f.tgz").write_bytes(compress(tar_of(archive)))
        assert read(tmp_path / "f.tgz") == ["six", "seven"]


def test_members_of_archives_that_are_not_read_are_listed(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tar_of({"a.txt": b"a", "b.pdf": b"b"})))
    reader = Reader(EOT)
    assert [piece.text for piece in reader.documents(find_inputs(str(path), False)[0][0])] == ["a"]
    assert reader.left_out == [f"{path}:b.pdf"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_broken_and_misnamed_compression(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    packed = COMPRESS[suffix](prose(5000, 0).encode())
    path.write_bytes(packed[: len(packed) * 3 // 4])
    with pytest.raises(DataError, match=rf"a\.txt\{suffix}: broken .* data"):
        read(path)
    path.write_text("plain text")
    with pytest.raises(DataError, match=r"its name says .*, but it is not compressed; rename it"):
        read(path)
    archive = tmp_path / f"b.tar{suffix}"
    packed = COMPRESS[suffix](tar_of({"a.txt": prose(5000, 0).encode()}))
    archive.write_bytes(packed[: len(packed) * 3 // 4])
    with pytest.raises(DataError, match=rf"b\.tar\{suffix}: broken"):
        read(archive)


def test_encoding_is_utf8_and_errors_name_the_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "é日🦆".encode() * 200_000)  # characters lie across every block's end
    assert read(path) == ["é日🦆" * 200_000]
    at = 700_001
    path.write_bytes(b"x" * at + b"\xff" + b"y")
    with pytest.raises(DataError, match=rf"a\.txt: byte offset {at} is not UTF-8 .*--errors replace"):
        read(path)
    path.write_bytes(b"ab\xff\xfec" + "\ufffd".encode() + b"\xe6\x97")  # cut off at the end of the file, too
    with pytest.raises(DataError, match="byte offset 2 "):
        read(path)
    reader = Reader(EOT, errors="replace")
    file = find_inputs(str(path), False)[0][0]
    assert [piece.text for piece in reader.documents(file)] == ["ab\ufffd\ufffdc\ufffd\ufffd"]
    assert reader.undecodable == 3  # the one that was there before is not counted
    assert read(path, errors="ignore") == ["abc\ufffd"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"}\nnot json\n', "line 2: not JSON"),
        (b'\n\n["a"]\n', "line 3: a JSON list; expected one JSON object a line"),
        (b'{"body": "a", "id": 1}', r"line 1: key `text` is not among body, id; .*--text-key"),
        (b'{"text": null}', "line 1: key `text` is null"),
        (b'{"text": "\\ud83d"}', "line 1: key `text` has half a surrogate pair at character 0"),
        (b'{"text": "a"}\n{"text": "\xff"}', "byte offset 24 is not UTF-8"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(DataError, match=rf"a\.jsonl[,:] {message}"):
        read(tmp_path / "a.jsonl")


def test_json_text_key_and_long_lines(tmp_path):
    long = prose(60_000, 1)
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": long}) + "\r\n" + json.dumps({"body": "b"}))
    assert read(tmp_path / "a.jsonl", text_key="body") == [long, "b"]
    (tmp_path / "b.jsonl").write_text('{"text": "a\\ud83db"}')
    assert read(tmp_path / "b.jsonl", errors="replace") == ["a\ufffdb"]


def test_prompt_and_completion(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "Question?", "a": " Answer."}) + "\n")
    file = find_inputs(str(tmp_path / "a.jsonl"), False)[0][0]
    found = list(Reader(EOT, prompt_key="q", completion_key="a").documents(file))
    assert [(piece.text, piece.prompt, piece.ends) for piece in found] == [
        ("Question?", True, False), (" Answer.", False, True),
    ]  # fmt: skip


@pytest.mark.parametrize("block", [1000, 40_000, 10_000_000])
def test_documents_of_a_stream_do_not_depend_on_its_blocks(block):
    text = EOT.join([prose(40_000, 0), "", "short", prose(20_000, 1), "x" * 100_000]) + EOT
    found, current = [], ""
    for piece in split_documents((text[i : i + block] for i in range(0, len(text), block)), EOT):
        assert len(piece.text) <= PIECE_CHARS + 256
        current += piece.text
        if piece.ends:
            found.append(current)
            current = ""
    assert found == text.split(EOT)
    assert "".join(piece.text for piece in split_documents([text], None)) == text


@pytest.mark.parametrize("which", ["small", "gpt2"])
def test_pieces_tokenize_as_the_whole(which, monkeypatch):
    """With every mixture of punctuation, digits and white space around the places where a cut may fall."""
    chosen = tokenizer() if which == "small" else load_tokenizer(str(gpt2_folder()))
    unit = "Words, and 12 345 more...\n\n  indented = 'x'  \n\tdon't — stop!  \r\n" + prose(40, 3) + "日本語 テキスト\n"
    text = unit * 3
    whole = chosen.encode(text)
    monkeypatch.setattr(documents, "_KEEP_CHARS", 0)
    for size in range(60, 140):
        monkeypatch.setattr(documents, "PIECE_CHARS", size)
        cut = [piece.text for piece in documents.pieces(text)]
        assert len(cut) > 4 and "".join(cut) == text
        assert [token for part in cut for token in chosen.encode(part)] == whole, size


def test_clean_up_is_off_unless_asked_for():
    text = "P ( N ) = N and 1 @,@ 000 don 't â€œquotedâ€\x9d ﬁ"
    assert normaliser(ftfy=False, wikitext=False)(text) == text


def test_wikitext_clean_up_changes_exactly_this():
    before = (
        " = = Title = = \n The dogs ' tails , 1 @,@ 000 @.@ 5 m long ( well @-@ known ) : it 's \" fine \" ; "
        "don n't [ sic ] N = 5 @ home 's and ' quoted ' end ! \n"
    )
    after = (
        " == Title == \n The dogs' tails, 1,000.5 m long (well-known): it's \"fine\"; "
        "donn't [sic] N = 5 @ home's and 'quoted' end! \n"
    )
    assert wikitext_detokenize(before) == after
    untouched = (
        "A lone N stays. So do URLs http://a.b/c?d=1,2 and 3.14, f(x) [0] \"q\" and 'r' - s's.\n\n    indented\n"
    )
    assert wikitext_detokenize(untouched) == untouched


def test_ftfy_mends_encoding_and_uses_nfkc():
    assert normaliser(ftfy=True, wikitext=False)("â€œquotedâ€\x9d ﬁne Ｎ") == '"quoted" fine N'
