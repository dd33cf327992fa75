"""Loss and perplexity of a checkpoint over records or plain text; needs no harness.

    python -m mesh_transformer.evaluation.perplexity --config F --data INDEX_OR_TEXT

Records (an .index file, or a name of the config's val_set) are evaluated as training validates: the same batches and
the same weights, so the same figure. Text (whatever the data script reads) is cut into its documents, each scored as
lm-evaluation-harness does, every token once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mesh_transformer.command_line import add_devices, add_version, add_weights, complain, log_lines, positive
from mesh_transformer.errors import EXIT_DONE, EXIT_KEYBOARD, ConfigError, DataError, MeshTransformerError

if TYPE_CHECKING:
    import numpy as np

    from mesh_transformer.config import Config
    from mesh_transformer.data.tokenizer import Tokenizer
    from mesh_transformer.training.executor import Batch
    from mesh_transformer.transformer_shard import CausalTransformer

WHOLE = 2**31 - 1  # batches


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """loss: nats per token.  tokens: those scored.  sequences: records or documents.  text_bytes: what the tokens say,
    in UTF-8, end-of-text left out; None where the tokenizer cannot tell."""

    loss: float
    tokens: int
    sequences: int
    text_bytes: int | None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}

    def line(self) -> str:
        bits = "" if self.bits_per_byte is None else f"  bits per byte {self.bits_per_byte:.4f}"
        return (
            f"loss {self.loss:.6f}  perplexity {self.perplexity:.4f}{bits}  tokens {self.tokens:,}  "
            f"sequences {self.sequences:,}"
        )


def of_records(
    network: CausalTransformer, config: Config, index_path: str, batches: int | None, tokenizer: Tokenizer | None
) -> Perplexity:
    """Over the first batches of an index, as training validates. batches: None is the config's val_batches.

    Raises DataError where there is no record.
    """
    from mesh_transformer.checkpoint.store import CheckpointStore
    from mesh_transformer.mesh import DP
    from mesh_transformer.training import data_sets
    from mesh_transformer.training.executor import NetworkExecutor
    from mesh_transformer.training.signals import StopRequest
    from mesh_transformer.training.validation import Validation, weights_of
    from mesh_transformer.training.watchdog import Watchdog

    if batches is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, val_batches=batches))
    rows = config.mesh.per_replica_batch * network.mesh.shape[DP] * config.data.val_batch_multiplier
    records = data_sets.ValidationSet(config, index_path, rows)
    lengths = byte_lengths(tokenizer, config.model.n_vocab) if tokenizer is not None else None
    said = 0.0

    def counted() -> Iterator[Batch]:
        nonlocal said
        for batch in records():
            if lengths is not None:
                said += float((lengths[batch["target"]] * weights_of(batch)[1]).sum())
            yield batch

    executor = NetworkExecutor(network, CheckpointStore(config.run.directory), config, {})
    with Watchdog() as watchdog:
        found = Validation({"data": counted}).run(executor, watchdog, StopRequest()).get("data")
    records.close()
    if found is None:
        raise DataError(f"{index_path} has no record to evaluate (or val_batches is 0: give --batches)")
    return Perplexity(found.loss, round(found.tokens), found.sequences, round(said) if lengths is not None else None)


def of_text(network: CausalTransformer, tokenizer: Tokenizer, path: str, batch_size: int | None) -> Perplexity:
    """Over the documents of a file or folder, each begun anew behind an end-of-text token."""
    from mesh_transformer import storage
    from mesh_transformer.data.inputs import find_inputs
    from mesh_transformer.data.readers import Reader
    from mesh_transformer.evaluation.evaluator import Evaluator
    from mesh_transformer.evaluation.requests import Encoder, TextOptions
    from mesh_transformer.evaluation.scorer import NetworkScorer

    reader = Reader(tokenizer.eot_token)
    texts, parts = [], []
    for file in find_inputs(path, recursive=not storage.is_url(path))[0]:
        for piece in reader.documents(file):
            parts.append(piece.text)
            if piece.ends:
                texts.append("".join(parts))
                parts.clear()
    texts = [text for text in texts if text]
    encoder = Encoder(tokenizer, network.model.seq, TextOptions())
    evaluator = Evaluator(NetworkScorer(network, tokenizer), encoder, rows=batch_size, progress=sys.stderr)
    tokens = sum(len(window.continuation) for windows in encoder.documents(texts) for window in windows)
    if not tokens:
        raise DataError(f"{path} has no text to evaluate")
    total = sum(evaluator.loglikelihood_rolling(texts))
    return Perplexity(-total / tokens, tokens, len(texts), sum(len(text.encode()) for text in texts))


def byte_lengths(tokenizer: Tokenizer, n_vocab: int) -> np.ndarray | None:
    """UTF-8 bytes that each id says, float64 [n_vocab]; 0 for special tokens and ids that there are not.

    None where tokens are not strings of bytes, so that what one says depends on its neighbours.
    """
    import numpy as np

    backend = tokenizer.backend
    if type(backend.decoder).__name__ != "ByteLevel":
        return None
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    lengths = np.zeros(n_vocab)
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        lengths[number] = 0 if token in special else len(token)  # byte-level BPE writes a character for each byte
    return lengths


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mesh_transformer.evaluation.perplexity", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", required=True, help="JSON config, a path or URL")
    add_version(parser)
    parser.add_argument(
        "--data", required=True, metavar="DATA", help="an .index file, a name of the config's val_set, or text"
    )
    add_weights(parser)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--batches", type=positive, metavar="N", help="of records (default: the config's val_batches)")
    amount.add_argument("--whole", action="store_true", help="all records")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="of text: windows at once (by memory)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_devices(parser)
    return parser.parse_args(arguments)


def evaluate(options: argparse.Namespace) -> Perplexity:
    """Loads the model and evaluates. Raises MeshTransformerError for what the user can correct."""
    from mesh_transformer import completion, inference
    from mesh_transformer.config import load_config

    config = load_config(options.config, version=options.version)
    step_dirs = inference.choose_steps(config, options.ckpt, options.ckpt_step, options.random_init, options.strict)
    index = config.data.val_paths.get(options.data, options.data if options.data.endswith(".index") else None)
    if index is None and (options.batches or options.whole):
        raise ConfigError(f"--batches and --whole are for records, and {options.data} is text: leave them out")
    tokenizer = None
    try:
        tokenizer = completion.tokenizer_of(config)
    except DataError:
        if index is None:  # records need no tokenizer, but for bits per byte
            raise
    if tokenizer is not None and step_dirs:
        inference.check_tokenizer(step_dirs[0], config, tokenizer)
    mesh = inference.start_mesh(config, options.platform, options.devices)
    network, _ = inference.load_step(config, mesh, step_dirs, masters=True)
    if index is None:
        if tokenizer is None:
            raise DataError(f"{options.data}: text needs the config's tokenizer")
        return of_text(network, tokenizer, options.data, options.batch_size)
    return of_records(network, config, index, WHOLE if options.whole else options.batches, tokenizer)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with log_lines():
        try:
            found = evaluate(options)
        except MeshTransformerError as error:
            return complain(error)
        except KeyboardInterrupt:
            return EXIT_KEYBOARD
    sys.stdout.write((json.dumps(found.to_json()) if options.json else found.line()) + "\n")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
