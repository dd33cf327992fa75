"""Text files to record files for training: tokenize, shuffle, cut into records of seq + 1 tokens, write.

Reads .txt, .jsonl (also .json, .ndjson: one JSON object a line), .tar, alone or compressed (.gz .zst .xz .bz2); one
file or a folder. Writes NAME_{records}.tfrecords with a .json beside it that says what is in it and what was dropped,
and with --index the index file that a config's train_set names. The same input and seed give the same bytes, whatever
the machine, the order of the folder and the number of workers. Memory does not grow with the input; the output folder
needs room for the tokens a second time while it runs. docs/data.md tells more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable

from mesh_transformer.command_line import complain, log_lines
from mesh_transformer.data.prepare import Options, Result, make_records
from mesh_transformer.data.readers import ERRORS, describe_left_out
from mesh_transformer.data.splitting import BY_DOCUMENT, BY_FILE
from mesh_transformer.errors import EXIT_DONE, EXIT_KEYBOARD, DataError, MeshTransformerError
from mesh_transformer.progress import Progress

DEFAULT_SEQ, DEFAULT_TOKENIZER = 2048, "gpt2"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("input_path", help="a file or folder of text, or a URL")
    flags.add_argument("name", help="output is NAME_{number of records}.tfrecords")
    flags.add_argument("--output-dir", default="", help="folder for the output (default: the current one)")
    flags.add_argument(
        "--index",
        nargs="?",
        const="",
        metavar="DIR",
        help="write NAME.train.index (and NAME.val.index) there; without DIR, into the output folder",
    )
    flags.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="this part (0 to 0.5) becomes NAME_val_{records}.tfrecords, for validation (default: 0, none)",
    )
    flags.add_argument(
        "--split-by",
        choices=(BY_DOCUMENT, BY_FILE),
        default=BY_DOCUMENT,
        help="what --val-fraction is a part of (default: document)",
    )
    flags.add_argument("--verbose", action="store_true", help="list every input file and everything left out")
    _add_input(flags.add_argument_group("reading"))
    _add_tokens(flags.add_argument_group("tokens and records"))
    _add_cleaning(flags.add_argument_group("cleaning"))
    _add_order(flags.add_argument_group("order"))
    return flags


def _add_input(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--recursive", action="store_true", help="read sub-folders too")
    group.add_argument(
        "--text-suffix",
        action="append",
        default=[],
        metavar=".SUF",
        help="read files with this suffix as plain text too (.py, .md, ...); may be repeated",
    )
    group.add_argument(
        "--text-key", default="text", metavar="KEY", help="key of the text in a JSON line (default: text)"
    )
    group.add_argument(
        "--prompt-key",
        metavar="KEY",
        help="with --completion-key: a JSON line is a prompt and what "
        "follows it; records get a mask, and training learns the completions only",
    )
    group.add_argument("--completion-key", metavar="KEY", help="see --prompt-key")
    group.add_argument(
        "--errors",
        choices=ERRORS,
        default="strict",
        help="bytes that are not UTF-8: stop with an "
        "error that names the place, put U+FFFD there, or leave them out (default: strict)",
    )


def _add_tokens(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seq", type=int, help=f"the model's seq; records hold one token more (default: {DEFAULT_SEQ})")
    group.add_argument(
        "--tokenizer",
        help="tokenizer.json, a folder with it or with vocab.json and merges.txt, or a "
        f"hub name (default: {DEFAULT_TOKENIZER})",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        help="take --seq and --tokenizer from this model config, and check the tokenizer against its n_vocab",
    )
    group.add_argument(
        "--treat-eot-as-text",
        action="store_true",
        help="the literal name of the end-of-text token "
        "(and of other special tokens) in the input is text, not a separator",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that tokenize (default: the number of cores); does not change the output",
    )


def _add_cleaning(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--normalize-with-ftfy", action="store_true", help="mend mis-decoded text with ftfy (NFKC)")
    group.add_argument(
        "--normalize-with-wikitext-detokenize",
        action="store_true",
        help="undo WikiText's spacing of punctuation; only for text that has it",
    )
    group.add_argument(
        "--min-unique-tokens",
        type=int,
        default=0,
        metavar="N",
        help="leave out records with fewer "
        "different tokens, which can give large gradients; 200 suits seq 2048 (default: 0, off)",
    )


def _add_order(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--n-repack-epochs",
        type=int,
        default=1,
        metavar="N",
        help="write the data N times, shuffled and cut anew each time; for N epochs of training (default: 1)",
    )
    group.add_argument("--seed", type=int, default=10, help="of the shuffle and the split (default: 10)")
    group.add_argument("--preserve-data-order", action="store_true", help="do not shuffle")


def options_from(arguments: argparse.Namespace) -> Options:
    """The options, checked. Raises DataError naming the flag."""
    seq, tokenizer = arguments.seq, arguments.tokenizer
    if arguments.config is not None:
        seq, tokenizer = _from_config(arguments.config, seq, tokenizer)
    seq = DEFAULT_SEQ if seq is None else seq
    _require(seq >= 1, f"--seq {seq}: expected at least 1")
    _require(arguments.n_repack_epochs >= 1, f"--n-repack-epochs {arguments.n_repack_epochs}: expected at least 1")
    _require(arguments.workers >= 1, f"--workers {arguments.workers}: expected at least 1")
    _require(0 <= arguments.val_fraction <= 0.5, f"--val-fraction {arguments.val_fraction}: expected 0 to 0.5")
    _require(
        arguments.name not in ("", ".", "..") and "/" not in arguments.name,
        f"name {arguments.name!r}: expected a file name; the folder is --output-dir",
    )
    _require(
        (arguments.prompt_key is None) == (arguments.completion_key is None),
        "--prompt-key and --completion-key: expected both or neither",
    )
    _require(
        arguments.min_unique_tokens <= seq + 1,
        f"--min-unique-tokens {arguments.min_unique_tokens}: expected at most {seq + 1}, a record's tokens",
    )
    given = vars(arguments) | {
        "seq": seq,
        "tokenizer": tokenizer or DEFAULT_TOKENIZER,
        "text_suffixes": tuple(suffix if suffix.startswith(".") else "." + suffix for suffix in arguments.text_suffix),
        "index_dir": arguments.index,
    }
    return Options(**{field.name: given[field.name] for field in dataclasses.fields(Options)})


def _from_config(path: str, seq: int | None, tokenizer: str | None) -> tuple[int, str]:
    from mesh_transformer.config import load_config
    from mesh_transformer.data.tokenizer import check_vocabulary, load_tokenizer

    config = load_config(path)
    tokenizer = tokenizer or config.data.tokenizer
    check_vocabulary(load_tokenizer(tokenizer), config.model.n_vocab)
    return config.model.seq if seq is None else seq, tokenizer


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise DataError(message)


def summary(result: Result, options: Options, verbose: bool = False) -> list[str]:
    """What was made, what was dropped, and what to do with it, in lines."""
    lines = []
    for split, facts in result.descriptions.items():
        dropped = facts["dropped_tail_tokens"] + facts["dropped_repetitive_tokens"]
        lines += [
            f"{result.files[split]}: {facts['records']} records of {facts['record_tokens']} tokens (seq + 1)",
            f"  {facts['tokens']} written + {dropped} dropped ({facts['dropped_tail_tokens']} did not fill a record, "
            f"{facts['dropped_repetitive_tokens']} repetitive) = {facts['epochs']} x {facts['corpus_tokens']} tokens "
            f"of {facts['documents']} documents ({facts['empty_documents']} empty ones left out)",
        ]
    if result.undecodable:
        lines.append(f"{result.undecodable} places were not UTF-8 (--errors {options.errors})")
    lines += describe_left_out(result.left_out, options.text_suffixes, len(result.left_out) if verbose else 10)
    return lines + [f"{index}: for train_set or val_set of a config" for index in result.indexes]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parsed = parser().parse_args(arguments)
    stages: list[Progress] = []
    with contextlib.ExitStack() as stack:

        def report(title: str, total: int) -> Callable[[int], None]:
            if stages:
                stages.pop().finish()
            unit, scale = ("MB", 1e6) if title == "tokenizing" else ("records", 1)
            stages.append(stack.enter_context(Progress(title, total, unit=unit, scale=scale)))
            return stages[-1].advance

        try:
            with log_lines(logging.INFO if parsed.verbose else logging.WARNING):
                options = options_from(parsed)
                result = make_records(options, report)
        except MeshTransformerError as error:
            return complain(error)
        except KeyboardInterrupt:
            print("\ninterrupted: no data set was made", file=sys.stderr)
            return EXIT_KEYBOARD
        stages.pop().finish()
    print("\n".join(summary(result, options, parsed.verbose)))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
