"""Serve a model to many clients at once: the 2021 library's /complete, the OpenAI API, and a page.

    python device_serve.py --config configs/quickstart.json --platform cpu --devices 8
    curl -s http://127.0.0.1:5000/complete -H 'Content-Type: application/json' -d '{"context": "import "}'

docs/serving.md tells the rest.
"""

from __future__ import annotations

import argparse
import os
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
from mesh_transformer.errors import EXIT_KEYBOARD, ConfigError, MeshTransformerError

if TYPE_CHECKING:
    from mesh_transformer.config import Config
    from mesh_transformer.serving.limits import Limits

HOST, PORT = "127.0.0.1", 5000
MAX_BATCH, MAX_QUEUE = 8, 100
KEYS = "MESH_TRANSFORMER_API_KEYS"  # an environment variable, which other users of a machine cannot read


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="JSON config, a path or URL")
    add_version(parser)
    add_weights(parser)
    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", default=HOST, help=f"address to listen on ({HOST}: this machine only)")
    where.add_argument("--port", type=int, default=PORT, help=f"port to listen on ({PORT}; 0: a free one, told)")
    where.add_argument("--api-key", action="append", metavar="KEY", help="ask for this key; may be given several times")
    where.add_argument("--api-key-file", metavar="FILE", help=f"keys, one a line (or in {KEYS}, with commas)")
    where.add_argument("--cors-origin", action="append", metavar="URL", help="a page that may ask from a browser, or *")
    where.add_argument("--model-name", metavar="NAME", help="what /v1/models calls it (default: the config's name)")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-batch", type=positive, default=MAX_BATCH, metavar="N", help=f"texts at once ({MAX_BATCH})"
    )
    limits.add_argument("--max-queue", type=int, default=MAX_QUEUE, metavar="N", help=f"texts that wait ({MAX_QUEUE})")
    limits.add_argument("--max-tokens", type=positive, metavar="N", help="new tokens of a text (seq, at least 256)")
    limits.add_argument(
        "--max-prompt", type=positive, metavar="N", help="tokens of a prompt (4 seq; the last seq count)"
    )
    limits.add_argument("--max-n", type=positive, metavar="N", help="completions of a prompt (8)")
    limits.add_argument("--max-body", type=positive, metavar="BYTES", help="size of a request (1 MiB)")
    limits.add_argument("--chunk", type=positive, metavar="N", help="prompt tokens read between others' tokens (64)")
    limits.add_argument("--timeout", type=positive, metavar="SECONDS", help="for a whole answer (600)")
    limits.add_argument("--drain", type=positive, metavar="SECONDS", help="to finish in after SIGTERM (60)")
    add_orders(parser)
    add_devices(parser)
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 2**16:
        parser.error(f"--port {options.port} must be from 0 to 65535")
    if options.max_queue < 0:
        parser.error(f"--max-queue {options.max_queue} must be 0 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with log_lines():
            return run(options)
    except MeshTransformerError as error:
        return complain(error)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return EXIT_KEYBOARD


def run(options: argparse.Namespace) -> int:
    """Serves until it is told to end; the exit code. Raises MeshTransformerError for what the user can correct."""
    from mesh_transformer.config import load_config

    config = load_config(options.config, version=options.version)
    keys = api_keys(options)
    _check_installed()
    # Imported after parsing and reading the config, so that --help and mistakes show at once.
    from mesh_transformer import completion, inference
    from mesh_transformer.serving import lifecycle
    from mesh_transformer.serving.batch import Batch
    from mesh_transformer.serving.engine import Engine
    from mesh_transformer.serving.metrics import Metrics
    from mesh_transformer.serving.service import Service

    limits, metrics = limits_of(options, config), Metrics()
    step_dirs = inference.choose_steps(config, options.ckpt, options.ckpt_step, options.random_init, options.strict)
    tokenizer = completion.tokenizer_of(config)
    if step_dirs:
        inference.check_tokenizer(step_dirs[0], config, tokenizer)
    sock = lifecycle.bind(options.host, options.port)
    port = sock.getsockname()[1]
    origins = options.cors_origin or [f"http://localhost:{port}", f"http://127.0.0.1:{port}"]
    name = options.model_name or config.run.name
    service = Service(Engine(limits, metrics), tokenizer, config.model, limits, metrics, name)

    def load() -> Batch:
        mesh = inference.start_mesh(config, options.platform, options.devices)
        network = inference.load_network(config, mesh, step_dirs)
        network.decode_only()
        batch = Batch(completion.Completer(network, tokenizer), limits, options.filter_order, options.window)
        batch.compile()
        return batch

    return lifecycle.serve(service, load, sock, origins, keys)


def limits_of(options: argparse.Namespace, config: Config) -> Limits:
    """The limits asked for; what is left out follows from the model's context."""
    from mesh_transformer.serving.limits import Limits

    seq = config.model.seq
    defaults = {"max_tokens": max(seq, 256), "max_prompt": 4 * seq}
    names = ("max_batch", "max_queue", "max_tokens", "max_prompt", "max_n", "max_body", "chunk", "timeout", "drain")
    asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return Limits(**(defaults | asked))


def api_keys(options: argparse.Namespace) -> list[str]:
    """Every key that is accepted; none means that none is asked for. Raises ConfigError for one that is too short."""
    from mesh_transformer import storage

    found = list(options.api_key or []) + os.environ.get(KEYS, "").split(",")
    if options.api_key_file is not None:
        listed = [line.strip() for line in storage.read_bytes(options.api_key_file).decode().splitlines()]
        if not any(listed):
            raise ConfigError(f"{options.api_key_file} (--api-key-file) holds no key: put one on each line")
        found += listed
    keys = [key.strip() for key in found if key.strip()]
    if options.api_key and len(keys) < len(options.api_key):
        raise ConfigError("--api-key is empty: give a key, or leave it out")
    return keys


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serving needs the package {error.name}: pip install 'mesh-transformer[serve]'") from error


if __name__ == "__main__":
    sys.exit(main())
