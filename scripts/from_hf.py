"""Turn a Hugging Face GPT-J into a checkpoint that this project trains, samples and serves from.

    python scripts/from_hf.py gpt-j-6b runs/gptj --shards 8
    python device_sample.py --config runs/gptj/config.json --ckpt runs/gptj --prompt "Once upon a time"

Reads safetensors or .bin, in one file or several. Writes a slim checkpoint, its config and its tokenizer.
docs/huggingface.md tells the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mesh_transformer.command_line import complain, log_lines  # noqa: E402
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="folder with config.json and the weights, local or gs://")
    parser.add_argument("output", help="folder to write step_N, meta.json, config.json and the tokenizer into")
    parser.add_argument("--shards", type=int, default=1, metavar="M", help="model-parallel parts; any number loads (1)")
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16"), help="type of the weights written (as they are)")
    parser.add_argument(
        "--n-vocab", type=int, metavar="N", help="add rows to the vocabulary, up to N, so that M divides it"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from mesh_transformer.checkpoint.huggingface_import import from_hf

    try:
        with log_lines():
            found = from_hf(options.input, options.output, options.shards, options.dtype, options.n_vocab)
    except MeshTransformerError as error:
        return complain(error)
    print(f"{found.path}: {found.shards} shard{'s' if found.shards > 1 else ''}; its config is {found.config}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
