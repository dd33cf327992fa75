"""Let a model continue texts: one prompt, a file of them, or whatever is typed or piped in.

    python device_sample.py --config configs/quickstart.json --platform cpu --devices 8 --prompt "import "

Without --prompt or --prompt-file, each line of the input is a prompt: at a terminal Ctrl-C stops one answer and Ctrl-D
ends. Texts go to the output, everything else to the error stream. docs/sampling.md tells the rest.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mesh_transformer.command_line import (
    add_devices,
    add_orders,
    add_version,
    add_weights,
    complain,
    log_lines,
    positive,
)
from mesh_transformer.errors import EXIT_DONE, EXIT_KEYBOARD, ConfigError, MeshTransformerError

if TYPE_CHECKING:
    from mesh_transformer.completion import Options
    from mesh_transformer.config import Config

# The defaults of the 2021 library's scripts.
MAX_TOKENS, TOP_P, TEMP = 512, 0.9, 0.75
BATCH = 8
SAMPLER = (
    "temp", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs",
)  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="JSON config, a path or URL")
    add_version(parser)
    add_weights(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", help="continue this text")
    prompts.add_argument("--prompt-file", metavar="FILE", help='JSONL: a string, or an object with "prompt", a line')
    parser.add_argument("--output", metavar="FILE", help="with --prompt-file: JSONL; lines already there are kept")
    parser.add_argument("--batch", type=positive, metavar="N", help=f"with --prompt-file: texts at once ({BATCH})")
    parser.add_argument("--no-echo", action="store_true", help="with --prompt: print what follows it, without itself")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help=f"most new tokens a text ({MAX_TOKENS})")
    parser.add_argument("--n", type=positive, default=1, metavar="N", help="completions of each prompt (1)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be repeated")
    parser.add_argument("--stop-id", action="append", default=[], type=int, metavar="ID", help="a token that does too")
    add_sampling(parser)
    add_devices(parser)
    options = parser.parse_args(arguments)
    for name in ("output", "batch", "logprobs"):
        if getattr(options, name) is not None and options.prompt_file is None:
            parser.error(f"--{name} needs --prompt-file")
    if options.prompt is not None:
        # Bytes that are no text in the user's locale come as surrogates, which no tokenizer takes. They are UTF-8 or,
        # like such bytes of a pipe, are shown as U+FFFD.
        options.prompt = options.prompt.encode(errors="surrogateescape").decode(errors="replace")
    return options


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn."""
    number = functools.partial(parser.add_argument, type=float)
    number("--temp", default=TEMP, metavar="T", help=f"temperature, 0 is greedy ({TEMP})")
    number("--top-p", default=TOP_P, metavar="P", help=f"nucleus, 1 is off ({TOP_P})")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable tokens (off)")
    number("--min-p", metavar="P", help="draw from tokens at least P times as probable as the most probable one (off)")
    number("--repetition-penalty", metavar="R", help="divide the logits of tokens seen by R, 1 is off (1)")
    number("--presence-penalty", metavar="A", help="subtract A from the logits of tokens drawn before (0)")
    number("--frequency-penalty", metavar="A", help="the same, as often as they were drawn (0)")
    parser.add_argument("--logit-bias", metavar="JSON", help='add to logits: {"token id": number}')
    parser.add_argument(
        "--logprobs", type=int, metavar="K", help="with --prompt-file: tell log-probabilities, and K best"
    )
    parser.add_argument("--greedy", action="store_true", help="always the most probable token: --temp 0")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same text (a new one, told)")
    add_orders(parser)


def settings_of(options: argparse.Namespace, config: Config) -> Options:
    """What is asked for a prompt. Raises ConfigError for a value that does not fit."""
    from mesh_transformer.completion import Options

    sampler = {name: getattr(options, name) for name in SAMPLER}
    if options.greedy:
        sampler["temp"] = 0
    settings = Options(
        options.max_tokens or config.run.gen_length or MAX_TOKENS, sampler,
        secrets.randbelow(2**32) if options.seed is None else options.seed, options.stop, options.stop_id, options.n,
        options.filter_order, options.window,
    )  # fmt: skip
    settings.check()
    if options.logit_bias is None:
        return settings
    from mesh_transformer.conversation import replaced

    try:
        return replaced(settings, "logit_bias", json.loads(options.logit_bias))
    except json.JSONDecodeError as error:
        raise ConfigError(f"--logit-bias {options.logit_bias}: not JSON ({error})") from error


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    for stream in (sys.stdin, sys.stdout):
        # A byte that is no text, or a character that the terminal cannot show, is no reason to stop.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with log_lines():
            run(options)
    except MeshTransformerError as error:
        return complain(error)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return EXIT_KEYBOARD
    except BrokenPipeError:
        # The reader has gone; what is still in the buffer must not fail once more when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DONE


def run(options: argparse.Namespace) -> None:
    """Loads the model and answers. Raises MeshTransformerError for what the user can correct."""
    from mesh_transformer import prompt_files
    from mesh_transformer.config import load_config

    config = load_config(options.config, version=options.version)
    prompts = [] if options.prompt_file is None else prompt_files.read_prompts(options.prompt_file)
    answers = prompt_files.Answers(options.output, prompts)
    # Imported after parsing and reading the config, so that --help and mistakes show at once.
    from mesh_transformer import completion, conversation, inference

    step_dirs = inference.choose_steps(config, options.ckpt, options.ckpt_step, options.random_init, options.strict)
    tokenizer = completion.tokenizer_of(config)
    if step_dirs:
        inference.check_tokenizer(step_dirs[0], config, tokenizer)
    settings = settings_of(options, config)
    mesh = inference.start_mesh(config, options.platform, options.devices)
    network = inference.load_network(config, mesh, step_dirs)
    network.decode_only()
    completer = completion.Completer(network, tokenizer)
    if options.seed is None and settings.sampler["temp"]:
        print(f"seed {settings.seed}", file=sys.stderr)
    if options.prompt_file is not None:
        for lines in prompt_files.complete(completer, prompts, answers, settings, options.batch or BATCH):
            print("" if options.output else lines, end="", flush=True)
        return
    talk = conversation.Conversation(completer, settings, sys.stdin, sys.stdout, sys.stderr)
    if options.prompt is None:
        talk.run()
    else:
        print("" if options.no_echo else options.prompt, end="", flush=True)
        talk.answer(options.prompt)


if __name__ == "__main__":
    sys.exit(main())
