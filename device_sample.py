"""Let a model continue texts: one prompt, a file of them, or whatever is typed or piped in.

    python device_sample.py --config configs/quickstart.json --platform cpu --devices 8 --prompt "import "

Without --prompt or --prompt-file, each line of the input is a prompt: at a terminal Ctrl-C stops one answer and Ctrl-D
ends. Texts go to the output, everything else to the error stream. docs/sampling.md tells the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mesh_transformer.command_line import complain, log_lines, positive, which_step
from mesh_transformer.errors import EXIT_DONE, EXIT_KEYBOARD, MeshTransformerError

if TYPE_CHECKING:
    from mesh_transformer.completion import Completer, Options

# The defaults of the 2021 library's scripts.
MAX_TOKENS, TOP_P, TEMP = 512, 0.9, 0.75
STREAMED = 4  # tokens between two looks at what has come
BATCH = 8


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="JSON config, a path or URL")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--ckpt", metavar="PATH", help="weights: a step_N folder, or a model_dir (default: the config's)"
    )
    weights.add_argument(
        "--ckpt-step", type=which_step, default="latest", metavar="N", help="a step, `latest` or `best`"
    )
    weights.add_argument("--random-init", action="store_true", help="use weights that were never trained")
    parser.add_argument(
        "--strict", action="store_true", help="refuse a damaged newest checkpoint instead of using the one before"
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", help="continue this text")
    prompts.add_argument("--prompt-file", metavar="FILE", help='JSONL: a string, or an object with "prompt", a line')
    parser.add_argument("--output", metavar="FILE", help="with --prompt-file: JSONL; lines already there are kept")
    parser.add_argument("--batch", type=positive, metavar="N", help=f"with --prompt-file: lines at once ({BATCH})")
    parser.add_argument("--no-echo", action="store_true", help="with --prompt: print what follows it, without itself")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help=f"most new tokens a text ({MAX_TOKENS})")
    parser.add_argument("--top-p", type=float, default=TOP_P, metavar="P", help=f"nucleus, 1 is off ({TOP_P})")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most probable tokens (off)")
    parser.add_argument("--temp", type=float, default=TEMP, metavar="T", help=f"temperature, 0 is greedy ({TEMP})")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token: --temp 0")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same text (a new one, told)")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="refuse to run on any other (default: any)")
    parser.add_argument(
        "--devices", type=positive, metavar="N", help="use N devices (default: all); with --platform cpu, simulate N"
    )
    options = parser.parse_args(arguments)
    for name in ("output", "batch"):
        if getattr(options, name) is not None and options.prompt_file is None:
            parser.error(f"--{name} needs --prompt-file")
    if options.prompt is not None:
        # Bytes that are no text in the user's locale come as surrogates, which no tokenizer takes. They are UTF-8 or,
        # like such bytes of a pipe, are shown as U+FFFD.
        options.prompt = options.prompt.encode(errors="surrogateescape").decode(errors="replace")
    return options


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

    config = load_config(options.config)
    prompts = [] if options.prompt_file is None else prompt_files.read_prompts(options.prompt_file)
    answers = prompt_files.Answers(options.output, prompts)
    # Imported after parsing and reading the config, so that --help and mistakes show at once.
    from mesh_transformer import completion, inference

    step_dirs = inference.choose_steps(config, options.ckpt, options.ckpt_step, options.random_init, options.strict)
    tokenizer = completion.tokenizer_of(config)
    if step_dirs:
        inference.check_tokenizer(step_dirs[0], config, tokenizer)
    sampler = {"top_p": options.top_p, "top_k": options.top_k, "temp": 0 if options.greedy else options.temp}
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    settings = completion.Options(options.max_tokens or config.run.gen_length or MAX_TOKENS, sampler, seed)
    settings.check()
    mesh = inference.start_mesh(config, options.platform, options.devices)
    completer = completion.Completer(inference.load_network(config, mesh, step_dirs), tokenizer)
    if options.seed is None and sampler["temp"]:
        print(f"seed {seed}", file=sys.stderr)
    if options.prompt is not None:
        print("" if options.no_echo else options.prompt, end="", flush=True)
        answer(completer, options.prompt, settings)
    elif options.prompt_file is not None:
        for lines in prompt_files.complete(completer, prompts, answers, settings, options.batch or BATCH):
            print("" if options.output else lines, end="", flush=True)
    else:
        converse(completer, settings)


def answer(completer: Completer, prompt: str, settings: Options) -> None:
    """Prints a completion as it comes, and ends the line."""
    try:
        for (part,) in completer.stream([prompt], settings, chunk=STREAMED):
            print(part.text, end="", flush=True)
    finally:
        print(flush=True)


def converse(completer: Completer, settings: Options) -> None:
    """Answers line after line, of a person at a terminal or of a pipe; one that fails does not end the others."""
    person = sys.stdin.isatty()
    if person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  editing and history of the lines typed
        print("Type a prompt and Enter. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    for prompt in typed() if person else (line.rstrip("\r\n") for line in sys.stdin):
        try:
            answer(completer, prompt, settings)
        except MeshTransformerError as error:
            complain(error)
        except KeyboardInterrupt:
            if not person:
                raise
        settings = dataclasses.replace(settings, seed=settings.seed + 1)


def typed() -> Iterator[str]:
    """Lines typed at a prompt, until Ctrl-D; Ctrl-C drops the line begun."""
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


if __name__ == "__main__":
    sys.exit(main())
