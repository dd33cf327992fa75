"""Requests a second on a 4-choice task, beside lm-evaluation-harness's own Hugging Face backend on the same weights.

    python benchmarks/evaluate.py

Contexts of 300 tokens, continuations of 10, float32, GPT-J shape. Both take turns in one process, each with the batch
size that was the fastest of those tried; medians, and the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import numpy as np

SHAPE = {
    "layers": 8, "d_model": 512, "n_heads": 8, "n_vocab": 16384, "seq": 512, "pe_rotary_dims": 32,
    "compute_dtype": "float32", "train_set": "none.index", "total_steps": 1, "name": "evaluate",
}  # fmt: skip
CONTEXT, CONTINUATION, CHOICES = 300, 10, 4

Request = tuple[tuple[str, str], list[int], list[int]]


def requests_of(documents: int, seed: int) -> list[Request]:
    """Token requests as the harness passes them to its backends."""
    random, found = np.random.default_rng(seed), []
    for _ in range(documents):
        context = random.integers(0, SHAPE["n_vocab"], CONTEXT).tolist()
        found += [
            (("", ""), context, random.integers(0, SHAPE["n_vocab"], CONTINUATION).tolist()) for _ in range(CHOICES)
        ]
    return found


def ours(folder: str) -> tuple[Any, Callable[[list[Request], int | None], list[float]]]:
    """This project's side; writes the weights that the peer reads as `folder`/hf."""
    from mesh_transformer import inference, load_config, make_mesh
    from mesh_transformer.checkpoint.huggingface import convert
    from mesh_transformer.evaluation import batching
    from mesh_transformer.evaluation.batching import Budget
    from mesh_transformer.evaluation.evaluator import TOKENS_A_REPLICA
    from mesh_transformer.evaluation.requests import Window
    from mesh_transformer.evaluation.scorer import NetworkScorer

    config = load_config(SHAPE)
    network, _ = inference.load_step(config, make_mesh(config), [])
    network.write_ckpt(os.path.join(folder, "step_0"))
    convert(os.path.join(folder, "step_0"), config, os.path.join(folder, "hf"), dtype="fp32")
    scorer = NetworkScorer(network, None)

    def score(asked: list[Request], rows: int | None) -> list[float]:
        windows = [Window(tuple(context), tuple(continuation)) for _, context, continuation in asked]
        found: dict[Window, float] = {}
        budget = Budget(TOKENS_A_REPLICA, rows=rows)
        for batch in batching.batches(batching.group(windows), budget, config.model.seq):
            scores = iter(scorer.score(batch)())
            for group in batch.groups:
                found.update({Window(group.context, each): next(scores).logprob for each in group.continuations})
        return [found[window] for window in windows]

    return config, score


def theirs(folder: str) -> Callable[[list[Request], int], list[float]]:
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    model = transformers.GPTJForCausalLM.from_pretrained(os.path.join(folder, "hf"), dtype=torch.float32)
    backend = Tokenizer(models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    peer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)

    def score(asked: list[Request], rows: int) -> list[float]:
        found = peer._loglikelihood_tokens(asked, disable_tqdm=True, override_bs=rows)
        return [logprob for logprob, _ in found]

    # The batch size is read where it is set, and an override counts only for `auto`.
    peer.batch_size_per_gpu = "auto"
    return score


def fastest(score: Callable[[list[Request], Any], list[float]], sizes: list[Any], asked: list[Request]) -> Any:
    """The batch size with the highest speed, each tried once behind a call that warms it up."""
    times = {}
    for size in sizes:
        score(asked, size)
        start = time.perf_counter()
        score(asked, size)
        times[size] = time.perf_counter() - start
    return min(times, key=lambda size: times[size])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4, metavar="N", help="contexts of a round (4)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each side (5)")
    options = parser.parse_args(arguments)
    asked = requests_of(options.documents, 0)
    with tempfile.TemporaryDirectory() as folder:
        _, mine = ours(folder)
        peer = theirs(folder)
        np.testing.assert_allclose(mine(asked[:8], None), peer(asked[:8], 4), atol=1e-3, rtol=0)
        sizes = fastest(mine, [2, 4], asked), fastest(peer, [1, 4, 16], asked)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds):
            for score, size, kept in ((mine, sizes[0], times[0]), (peer, sizes[1], times[1])):
                start = time.perf_counter()
                score(asked, size)
                kept.append(time.perf_counter() - start)
    rates = [len(asked) / statistics.median(each) for each in times]
    print(f"{len(asked)} requests a round: contexts of {CONTEXT} tokens, {CHOICES} continuations of {CONTINUATION}")
    print(f"this project {rates[0]:.2f} requests/s ({sizes[0]} contexts a batch), harness's Hugging Face backend")
    print(f"{rates[1]:.2f} requests/s ({sizes[1]} requests a batch): {rates[0] / rates[1]:.2f} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
