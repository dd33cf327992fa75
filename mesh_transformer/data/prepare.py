"""From text files to record files: read, tokenize, split off validation, shuffle, cut, write, describe.

Tokens go through temporary files in the output folder (2 bytes a token, 4 for vocabularies above 65,536), so memory
does not depend on the size of the input.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mesh_transformer import storage
from mesh_transformer.data.draft import Draft, unpublish
from mesh_transformer.data.encoding import EncodingOptions, NumberedPiece, encode_pieces
from mesh_transformer.data.index import write_index
from mesh_transformer.data.inputs import InputFile, find_inputs
from mesh_transformer.data.packing import PackingOptions
from mesh_transformer.data.readers import Reader
from mesh_transformer.data.records import RECORDS_SUFFIX
from mesh_transformer.data.splitting import BY_DOCUMENT, make_split
from mesh_transformer.data.spool import Spool
from mesh_transformer.data.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.errors import DataError, StorageError

_LOG = logging.getLogger(__name__)
_WORTH_WORKERS = 4_000_000  # bytes of input below which starting processes takes longer than the work
TRAIN, VALIDATION = "train", "val"


@dataclass(frozen=True)
class Options:
    """What to read, what to make of it, and where to put it. See create_finetune_tfrecords.py --help."""

    input_path: str
    name: str
    output_dir: str = ""
    seq: int = 2048
    tokenizer: str = "gpt2"
    recursive: bool = False
    text_suffixes: tuple[str, ...] = ()
    text_key: str = "text"
    prompt_key: str | None = None
    completion_key: str | None = None
    errors: str = "strict"
    treat_eot_as_text: bool = False
    normalize_with_ftfy: bool = False
    normalize_with_wikitext_detokenize: bool = False
    min_unique_tokens: int = 0
    n_repack_epochs: int = 1
    seed: int = 10
    preserve_data_order: bool = False
    val_fraction: float = 0.0
    split_by: str = BY_DOCUMENT
    workers: int = 1
    index_dir: str | None = None

    @property
    def masks(self) -> bool:
        """Whether records get a mask: when JSON lines tell prompt and completion apart."""
        return self.prompt_key is not None


@dataclass(frozen=True)
class Result:
    """What was made."""

    files: dict[str, str]  # split -> record file
    descriptions: dict[str, dict[str, Any]]  # split -> what its sidecar says
    indexes: list[str]
    left_out: list[str]  # inputs that were not read
    undecodable: int


# Called with the title of a stage and its total amount (bytes, or records); returns what to call with amounts done.
Report = Callable[[str, int], Callable[[int], None]]


def _silent(title: str, total: int) -> Callable[[int], None]:
    return lambda amount: None


def make_records(options: Options, report: Report = _silent) -> Result:
    """Make record files and what belongs to them. Raises DataError for inputs, StorageError for the disk.

    Files appear under their names only when complete, and none if any cannot be made. They replace those of an earlier
    run as a whole: whatever cuts it short, the splits of two runs never lie together.
    """
    files, left_out = find_inputs(options.input_path, options.recursive, options.text_suffixes)
    tokenizer = load_tokenizer(options.tokenizer)
    output, index_dir = _folders(options)
    scratch = tempfile.gettempdir() if storage.is_url(output) else output
    reader = Reader(
        separator=None if options.treat_eot_as_text else tokenizer.eot_token,
        errors=options.errors,
        text_key=options.text_key,
        prompt_key=options.prompt_key,
        completion_key=options.completion_key,
        text_suffixes=options.text_suffixes,
    )
    splits = [TRAIN, VALIDATION] if options.val_fraction else [TRAIN]
    paths: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        spools = {split: stack.enter_context(Spool(scratch, tokenizer.vocab_size)) for split in splits}
        _fill(spools, reader, files, tokenizer, options, report)
        drafts = {split: Draft(scratch, spool, _packing(options, split)) for split, spool in spools.items()}
        for split, draft in drafts.items():
            stack.enter_context(draft)
            _write_draft(draft, split, report)
        source = _source_facts(options, files, reader, tokenizer)
        descriptions = {split: source | {"split": split} | draft.facts() for split, draft in drafts.items()}
        for split, draft in drafts.items():
            name = options.name if split == TRAIN else f"{options.name}_{split}"
            paths[split] = storage.join(output, f"{name}_{draft.packed.records}{RECORDS_SUFFIX}")
        indexes = {} if index_dir is None else {s: _index(options, index_dir, s) for s in splits}
        with _replacing(list(indexes.values()), list(paths.values())):
            for split, draft in drafts.items():
                draft.publish(paths[split], descriptions[split])
            for split, index in indexes.items():
                comment = f"{split} set of {options.name}, written by create_finetune_tfrecords.py"
                write_index(index, [_entry(paths[split], output, storage.parent(index))], comment)
    return Result(paths, descriptions, list(indexes.values()), left_out + reader.left_out, reader.undecodable)


def _folders(options: Options) -> tuple[str, str | None]:
    """Where records and index files go; made and tried, since hours may pass before the first file is written."""
    output = storage.normalise(options.output_dir or ".")
    index_dir = None if options.index_dir is None else storage.normalise(options.index_dir or output)
    for folder in {output, index_dir or output}:
        storage.makedirs(folder)
        storage.probe_writable(folder)
    return output, index_dir


@contextlib.contextmanager
def _replacing(indexes: list[str], records: list[str]) -> Iterator[None]:
    """What an earlier run left under these names goes before the block, and what the block wrote on an error in it.

    A kill between leaves files missing, which whoever reads the set notices, never one split of an earlier run.
    """

    def clear() -> None:
        for index in indexes:
            storage.remove(index)
        for path in records:
            unpublish(path)

    clear()
    try:
        yield
    except BaseException:
        with contextlib.suppress(StorageError):  # the error that brought us here says more
            clear()
        raise


def _fill(
    spools: dict[str, Spool],
    reader: Reader,
    files: list[InputFile],
    tokenizer: Tokenizer,
    options: Options,
    report: Report,
) -> None:
    """Tokenize all files into the spools."""
    size = sum(file.size for file in files)
    reader.progress = report("tokenizing", size)
    encoding = EncodingOptions(
        options.tokenizer,
        literal=options.treat_eot_as_text,
        ftfy=options.normalize_with_ftfy,
        wikitext=options.normalize_with_wikitext_detokenize,
    )
    is_validation = make_split(options.val_fraction, options.split_by, len(files), options.seed)
    stream = _numbered(files, reader)
    workers = options.workers if size >= _WORTH_WORKERS else 1
    document = 0
    for number, piece, ids in encode_pieces(stream, encoding, tokenizer, workers):
        spool = spools[VALIDATION if is_validation(number, document) else TRAIN]
        spool.add(ids, piece.prompt)
        if piece.ends:
            spool.end_document(tokenizer.eot_id)
            document += 1
    for spool in spools.values():
        spool.finish()
    if VALIDATION in spools and not spools[VALIDATION].documents:
        raise DataError(
            f"--val-fraction {options.val_fraction}: none of the {spools[TRAIN].documents} documents fell to "
            f"validation; give a larger fraction, or more documents: files, JSON lines, or text between "
            f"{tokenizer.eot_token}"
        )


def _numbered(files: list[InputFile], reader: Reader) -> Iterator[NumberedPiece]:
    for number, file in enumerate(files):
        _LOG.info("reading %s (%s, %d bytes)", file.path, file.kind.value, file.size)
        for piece in reader.documents(file):
            yield number, piece


def _packing(options: Options, split: str) -> PackingOptions:
    """Validation is not repeated, whatever training is."""
    return PackingOptions(
        record_tokens=options.seq + 1,
        epochs=options.n_repack_epochs if split == TRAIN else 1,
        seed=options.seed,
        preserve_order=options.preserve_data_order,
        min_unique_tokens=options.min_unique_tokens,
        masks=options.masks,
    )


def _write_draft(draft: Draft, split: str, report: Report) -> None:
    packing, spool = draft.packing, draft.spool
    expected = packing.epochs * spool.tokens // packing.record_tokens
    draft.write(report(f"writing {split}", expected))
    if not draft.packed.records:
        found = f"{spool.documents} documents with {spool.tokens} tokens, {draft.packed.dropped_repetitive_records} "
        raise DataError(
            f"{split} split: {found}repetitive records left out, and no record to write; a record takes "
            f"{packing.record_tokens} tokens (seq + 1): give more text, a smaller --seq, a larger --val-fraction, or a "
            f"smaller --min-unique-tokens"
        )


def _source_facts(options: Options, files: list[InputFile], reader: Reader, tokenizer: Tokenizer) -> dict[str, Any]:
    """What both splits' descriptions share."""
    return {
        "seq": options.seq,
        "tokenizer": options.tokenizer,
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "seed": options.seed,
        "preserve_data_order": options.preserve_data_order,
        "treat_eot_as_text": options.treat_eot_as_text,
        "normalize_with_ftfy": options.normalize_with_ftfy,
        "normalize_with_wikitext_detokenize": options.normalize_with_wikitext_detokenize,
        "min_unique_tokens": options.min_unique_tokens,
        "mask": options.masks,
        "val_fraction": options.val_fraction,
        "split_by": options.split_by if options.val_fraction else None,
        "input_files": len(files),
        "input_bytes": sum(file.size for file in files),
        "undecodable": reader.undecodable,
    }


def _index(options: Options, folder: str, split: str) -> str:
    """The index file of a split: NAME.train.index, NAME.val.index."""
    return storage.join(folder, f"{options.name}.{split}.index")


def _entry(path: str, output: str, folder: str) -> str:
    """The line for a record file: relative where both lie in one folder, so that the folder can be moved."""
    local = not storage.is_url(folder) and not storage.is_url(output)
    if folder == output or (local and os.path.realpath(folder) == os.path.realpath(output)):
        return storage.name(path)
    return path if storage.is_url(path) else os.path.abspath(path)
