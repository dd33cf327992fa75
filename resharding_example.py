"""An example to copy from: a checkpoint of eight shards, read onto one device, continues a text.

    python resharding_example.py --config configs/6B_roto_256.json --ckpt step_383500_slim --prompt "Hello, my name is"

Nothing has to be converted first. In memory a parameter is whole, whatever the files' number of shards, so the config's
cores_per_replica says how the model is split here, and the files say how they were split there. To get files in another
number of shards, for the 2021 library, use scripts/reshard.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_transformer.command_line import complain, log_lines
from mesh_transformer.errors import EXIT_DONE, MeshTransformerError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="JSON config of the model, a path or URL")
    parser.add_argument("--ckpt", required=True, metavar="PATH", help="a step_N folder, or a model_dir")
    parser.add_argument("--prompt", default="Hello, my name is", metavar="TEXT", help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="most new tokens (64)")
    return parser.parse_args(arguments)


def continuation(config_path: str, ckpt: str, prompt: str, max_tokens: int) -> str:
    """What the model writes after `prompt`, always its most probable token, on one device."""
    from mesh_transformer import load_config
    from mesh_transformer.completion import Completer, Options, tokenizer_of
    from mesh_transformer.inference import choose_steps, load_network, start_mesh

    # 1. The model as the config describes it, on one device whatever it was trained on.
    config = load_config(load_config(config_path).to_dict() | {"cores_per_replica": 1})
    # 2. The files, of any number of shards, full or slim: checked against the config before a device is touched.
    steps = choose_steps(config, ckpt, "latest", random_init=False)
    # 3. One device; each part of each file goes straight to its place, without the optimizer, in the compute dtype.
    network = load_network(config, start_mesh(config, platform=None, devices=1), steps)
    # 4. Text in, text out. network.generate is the same in tokens.
    options = Options(max_tokens, {"temp": 0}, seed=0)
    return Completer(network, tokenizer_of(config)).complete([prompt], options)[0].text


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with log_lines():
            print(options.prompt + continuation(options.config, options.ckpt, options.prompt, options.max_tokens))
    except MeshTransformerError as error:
        return complain(error)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
