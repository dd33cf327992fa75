"""What the tests of data share: small record files, a tokenizer trained in a moment, running the script in-process."""

from __future__ import annotations

import functools
import json
import lzma
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import create_finetune_tfrecords
from mesh_transformer.data.loader import RecordLoader
from mesh_transformer.data.records import RecordFile, RecordWriter
from mesh_transformer.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

WORDS = "the cat sat on a mat and looked at the moon while rain fell over seven quiet houses by the sea".split()


def prose(words: int, seed: int) -> str:
    """Text of so many words, in lines."""
    rng = np.random.default_rng(seed)
    chosen = [WORDS[i] + ("\n" if k % 11 == 10 else " ") for k, i in enumerate(rng.integers(0, len(WORDS), words))]
    return "".join(chosen)


@functools.cache
def tokenizer_path() -> str:
    """A byte-level BPE of 300 tokens."""
    path = Path(tempfile.mkdtemp(prefix="tokenizer-")) / "tokenizer.json"
    train_tokenizer([prose(2000, 0)], 300, str(path))
    return str(path)


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(tokenizer_path())


@functools.cache
def gpt2_folder() -> Path:
    """A folder with GPT-2's vocabulary as first published, encoder.json and vocab.bpe: the second gives the first."""
    folder = Path(tempfile.mkdtemp(prefix="gpt2-"))
    merges = lzma.decompress((Path(__file__).parent / "data/gpt2/vocab.bpe.xz").read_bytes()).decode()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [octet for octet in range(256) if octet not in printable]
    tokens = [*map(chr, printable), *(chr(256 + k) for k in range(len(other)))]
    tokens += ["".join(line.split()) for line in merges.split("\n")[1:] if line]
    vocabulary = {token: number for number, token in enumerate([*tokens, "<|endoftext|>"])}
    (folder / "vocab.bpe").write_text(merges, encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps(vocabulary))
    return folder


def write_records(path: Path, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[int]] | None = None) -> Path:
    """A record file of these token ids."""
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for number, row in enumerate(rows):
            features = {"text": np.array(row)}
            writer.write(features if masks is None else features | {"mask": np.array(masks[number])})
    return path


def numbered(first: int, count: int, seq: int = 4) -> list[list[int]]:
    """Records that tell their number: [n, n, ...], seq + 1 long."""
    return [[n] * (seq + 1) for n in range(first, first + count)]


def write_index(folder: Path, names: Sequence[str], name: str = "set.index") -> str:
    path = folder / name
    path.write_text("\n".join(names) + "\n")
    return str(path)


def number_files(folder: Path, counts: Sequence[int], seq: int = 4) -> str:
    """Record files f0, f1, ... of so many records each, numbered through, and their index."""
    first = 0
    for k, count in enumerate(counts):
        write_records(folder / f"f{k}.tfrecords", numbered(first, count, seq))
        first += count
    return write_index(folder, [f"f{k}.tfrecords" for k in range(len(counts))])


def read_numbers(loader: RecordLoader, batches: int | None = None) -> list[int]:
    """The numbers of the records of so many batches (None: to the end)."""
    numbers: list[int] = []
    while batches is None or batches > 0:
        try:
            batch = next(loader)
        except StopIteration:
            break
        numbers += batch["obs"].reshape(-1, batch["obs"].shape[-1])[:, 0].tolist()
        batches = None if batches is None else batches - 1
    return numbers


def run_script(*arguments: Any) -> int:
    """create_finetune_tfrecords.py with these arguments; its exit code."""
    return create_finetune_tfrecords.main([str(argument) for argument in arguments])


def make(text: Path, folder: Path, *flags: Any, name: str = "set", seq: int = 16) -> dict[str, Any]:
    """Run the script on text with the small tokenizer; the train split's sidecar with its "path"."""
    command = (text, name, "--output-dir", folder, "--tokenizer", tokenizer_path(), "--seq", seq, *flags)
    assert run_script(*command) == 0
    return outputs(folder, name)


def outputs(folder: Path, name: str) -> dict[str, Any]:
    """The sidecar of NAME_{records}.tfrecords in a folder, and its "path"."""
    found = [path for path in folder.glob(f"{name}_*.tfrecords") if path.stem.removeprefix(f"{name}_").isdigit()]
    assert len(found) == 1, sorted(folder.iterdir())
    return json.loads(Path(f"{found[0]}.json").read_text()) | {"path": found[0]}


def tokens_of(path: Path) -> np.ndarray:
    """All tokens of a record file, int64 [records, S+1]."""
    return np.stack([features["text"] for _, features in RecordFile(str(path)).records_from(0, 0)])
