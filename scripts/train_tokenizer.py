"""Train a byte-level BPE tokenizer on text, for a model of one's own.

python scripts/train_tokenizer.py TEXT --output FILE [--vocab-size N]

Reads what create_finetune_tfrecords.py reads: one file or a folder. The same text gives the same tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

from mesh_transformer.command_line import complain  # noqa: E402  after the path
from mesh_transformer.data.inputs import find_inputs  # noqa: E402
from mesh_transformer.data.readers import ERRORS, Reader, describe_left_out  # noqa: E402
from mesh_transformer.data.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer  # noqa: E402
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError  # noqa: E402
from mesh_transformer.progress import Progress  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("input_path", help="a file or folder of text")
    flags.add_argument("--output", required=True, help="the tokenizer, a JSON file of Hugging Face tokenizers")
    flags.add_argument("--vocab-size", type=int, default=4096, help="tokens, the end-of-text token included")
    flags.add_argument("--recursive", action="store_true", help="read sub-folders too")
    flags.add_argument(
        "--text-suffix", action="append", default=[], metavar=".SUF", help="read this suffix as text too"
    )
    flags.add_argument("--text-key", default="text", help="key of the text in a JSON line")
    flags.add_argument("--errors", choices=ERRORS, default="strict", help="what to do with bytes that are not UTF-8")
    return flags


def train(options: argparse.Namespace) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, and lines about what was not read."""
    files, left_out = find_inputs(options.input_path, options.recursive, options.text_suffix)
    with Progress("reading", sum(file.size for file in files), unit="MB", scale=1e6) as stage:
        reader = Reader(
            END_OF_TEXT, options.errors, options.text_key, text_suffixes=options.text_suffix, progress=stage.advance
        )

        def texts() -> Iterator[str]:
            for file in files:
                for piece in reader.documents(file):
                    yield piece.text
            stage.finish()

        tokenizer = train_tokenizer(texts(), options.vocab_size, options.output)
    return tokenizer, describe_left_out(left_out + reader.left_out, options.text_suffix, 10)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        tokenizer, notes = train(options)
    except MeshTransformerError as error:
        return complain(error)
    print("\n".join([f"{options.output}: {tokenizer.vocab_size} tokens, hash {tokenizer.hash}", *notes]))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
