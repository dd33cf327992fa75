"""Turn a checkpoint into a folder that Hugging Face's `GPTJForCausalLM.from_pretrained` loads.

    python to_hf_weights.py --input-ckpt step_383500_slim --config configs/6B_roto_256.json --output-path gptj-6b

Reads full and slim checkpoints of any number of shards and writes safetensors; needs no accelerator and no torch.
docs/huggingface.md tells the rest.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mesh_transformer.command_line import complain, log_lines
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.huggingface import Export

DTYPES = ("fp16", "fp32", "bf16")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input-ckpt", required=True, metavar="PATH", help="a step_N folder, or a model_dir (its newest)"
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="JSON config of the model, a path or URL")
    parser.add_argument(
        "--output-path", required=True, metavar="PATH", help="folder to write, made where it is missing"
    )
    parser.add_argument("--dtype", default="fp16", choices=DTYPES, help="type of the weights written (fp16)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="bytes of one file: 5GB, 200MiB (5GB)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer to write beside the weights (the config's)")
    parser.add_argument(
        "--trim-vocab", action="store_true", help="leave out the rows of the vocabulary that the tokenizer does not use"
    )
    parser.add_argument("--debug", action="store_true", help="report every tensor")
    parser.add_argument(
        "--cpu", action="store_true", help="accepted for the 2021 command lines: no device is ever used"
    )
    return parser.parse_args(arguments)


def convert(ckpt: Any, config: Any, out: Any, **options: Any) -> Export:
    """`mesh_transformer.checkpoint.huggingface.convert`, under this script's name."""
    from mesh_transformer.checkpoint import huggingface

    return huggingface.convert(ckpt, config, out, **options)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with log_lines(logging.DEBUG if options.debug else logging.INFO):
            found = convert(
                options.input_ckpt, options.config, options.output_path, dtype=options.dtype,
                max_shard_size=options.max_shard_size, trim_vocab=options.trim_vocab, tokenizer=options.tokenizer,
            )  # fmt: skip
    except MeshTransformerError as error:
        return complain(error)
    print(
        f"{found.path}: {found.tensors} tensors, {found.bytes / 1e6:,.1f} MB of {found.dtype} in "
        f"{len(found.files)} file{'s' if len(found.files) > 1 else ''} (the source was {found.source_dtype})"
    )
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
