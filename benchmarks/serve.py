"""Served requests a second: many clients at once, one after the other, and the same decoder under static batching.

    python benchmarks/serve.py

A GPT-J of 8 layers, d_model 512, vocabulary 16384, float32, one CPU device, in a real server process asked over HTTP.
The same requests, prompts and answers of mixed lengths, go to it from 16 clients at once, then one after the other; and
through `generation.Stream`, in batches of 16 in the order of their arrival, padded to the longest and run until it
ends: the same decoder and the same largest batch, without HTTP. Rounds alternate; compilation is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

from mesh_transformer import generation, inference, load_config  # noqa: E402
from mesh_transformer.completion import Options, sampler_for  # noqa: E402
from mesh_transformer.data.tokenizer import train_tokenizer  # noqa: E402
from mesh_transformer.sampler import mode_of  # noqa: E402
from mesh_transformer.transformer_shard import CausalTransformer  # noqa: E402

SHAPE: dict[str, Any] = dict(
    layers=8, d_model=512, n_heads=8, n_vocab=16384, seq=512, pe_rotary_dims=64, cores_per_replica=1,
    per_replica_batch=1, gradient_accumulation_steps=1, lr=1e-3, end_lr=1e-4, warmup_steps=1, anneal_steps=10,
    total_steps=10, weight_decay=0.1, train_set="none.index", name="bench", compute_dtype="float32", seed=1,
)  # fmt: skip
TINY: dict[str, Any] = dict(SHAPE, layers=2, d_model=32, n_vocab=384, seq=64, pe_rotary_dims=4)
IDS = 257  # of the tokenizer: end of text and the bytes
SPEED_UP, OVER_STATIC = 3.0, 1.5  # the bars
SOAK_GROWTH_MIB = 30.0


class Request:
    """What a client asks for: prompt ids and the number of tokens it gets, none of which ends a text."""

    def __init__(self, rng: random.Random, longest_prompt: int, longest_answer: int) -> None:
        self.prompt = [rng.randrange(1, IDS) for _ in range(_mixed(rng, longest_prompt))]
        self.tokens = _mixed(rng, longest_answer)
        self.seed = rng.randrange(2**31)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt, "max_tokens": self.tokens, "seed": self.seed, "temperature": 0.8,
            "logit_bias": {"0": -100},
        }  # fmt: skip


def _mixed(rng: random.Random, longest: int) -> int:
    """Most are short, some are long: the logarithm is uniform, from a sixteenth of the longest on."""
    return round(math.exp(rng.uniform(math.log(longest / 16), math.log(longest))))


class Server:
    """device_serve.py in a process of its own, ready."""

    def __init__(self, config: Path, max_batch: int) -> None:
        command = [
            sys.executable, str(ROOT / "device_serve.py"), "--config", str(config), "--random-init", "--platform",
            "cpu", "--devices", "1", "--port", "0", "--max-batch", str(max_batch), "--max-queue", "1000",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("listening on "):
                self.url = line.split()[-1]
            if line.startswith("compiled:"):
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        while httpx.get(self.url + "/health").status_code != 200:
            time.sleep(0.05)

    def resident_mib(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def ask(server: Server, requests: Sequence[Request], clients: int) -> tuple[float, list[float]]:
    """Every request once, by so many clients that each ask one at a time: seconds, and each request's latency."""
    left: Iterator[Request] = iter(requests)
    lock, latencies, failed = threading.Lock(), [], []

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=600) as http:
            while True:
                with lock:
                    request = next(left, None)
                if request is None:
                    return
                began = time.perf_counter()
                reply = http.post("/v1/completions", json=request.body)
                latencies.append(time.perf_counter() - began)
                if reply.status_code != 200 or reply.json()["usage"]["completion_tokens"] != request.tokens:
                    failed.append(reply.text)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with {failed[0][:500]}")
    return time.perf_counter() - began, latencies


class StaticBatches:
    """Batches of `size` requests, each run until its longest has ended."""

    def __init__(self, network: CausalTransformer, requests: Sequence[Request], size: int) -> None:
        self.network = network
        self.groups = [requests[start : start + size] for start in range(0, len(requests), size)]

    def stream(self, group: Sequence[Request]) -> generation.Stream:
        network = self.network
        sampler = sampler_for(
            [Options(each.tokens, {"temp": 0.8, "logit_bias": {0: -100.0}}, each.seed) for each in group]
        )
        return generation.Stream(
            network.model, network.mesh, network.weights, [each.prompt for each in group],
            [each.tokens for each in group], sampler, [(0,)] * len(group), IDS, mode_of(sampler),
        )  # fmt: skip

    def compile(self) -> None:
        for group in self.groups:
            stream = self.stream(group)
            next(stream)
            next(stream)

    def run(self) -> float:
        began = time.perf_counter()
        for group in self.groups:
            counts = [0] * len(group)
            for piece in self.stream(group):
                counts = [count + len(new) for count, new in zip(counts, piece.tokens, strict=True)]
            assert counts == [each.tokens for each in group], "the same tokens as the server gives"
        return time.perf_counter() - began


def soak(server: Server, count: int, clients: int) -> tuple[float, float]:
    """Resident MiB after a fifth of so many short requests, and after all of them."""
    rng = random.Random(1)
    requests = [Request(rng, 48, 32) for _ in range(count)]
    ask(server, requests[: count // 5], clients)
    before = server.resident_mib()
    ask(server, requests[count // 5 :], clients)
    return before, server.resident_mib()


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians over the rounds."""
    shape = TINY if options.tiny else SHAPE
    tokenizer = train_tokenizer(["a"], IDS, str(folder / "tokenizer.json"))
    keys = dict(shape, tokenizer=tokenizer.source, model_dir=str(folder / "none"))
    (folder / "config.json").write_text(json.dumps(keys))
    config = load_config(folder / "config.json")
    rng, seq = random.Random(0), config.model.seq
    requests = [Request(rng, seq * 3 // 8, seq // 2) for _ in range(options.requests)]
    mesh = inference.start_mesh(config, "cpu", 1)
    static = StaticBatches(inference.load_network(config, mesh, []), requests, options.clients)
    static.compile()
    server, single = (Server(folder / "config.json", size) for size in (options.clients, 1))
    try:
        for each in (server, single):
            ask(each, requests[:4], 4)  # connections, caches of the processor
        rounds = []
        for _ in range(options.rounds):
            together, latencies = ask(server, requests, options.clients)
            alone, alone_latencies = ask(server, requests, 1)
            rounds.append((together, alone, static.run(), ask(single, requests, 1)[0], latencies, alone_latencies))
        memory = soak(server, options.soak, options.clients) if options.soak else None
    finally:
        server.close()
        single.close()
    tokens = sum(each.tokens for each in requests)
    together, alone, batches, by_one = (sorted(each[i] for each in rounds)[len(rounds) // 2] for i in range(4))
    return {
        "tokens": tokens, "served": tokens / together, "one_by_one": tokens / alone, "static": tokens / batches,
        "single": tokens / by_one, "latency": [x for each in rounds for x in each[4]],
        "latency_alone": [x for each in rounds for x in each[5]], "memory": memory,
    }  # fmt: skip


def table(found: dict[str, Any], options: argparse.Namespace) -> str:
    """The figures as Markdown."""
    served, alone, static = found["served"], found["one_by_one"], found["static"]
    both = ((found["latency"], options.clients), (found["latency_alone"], 1))
    latencies = [f"{percentile(x, 0.5):.2f} / {percentile(x, 0.95):.2f} s" for x, _ in both]
    lines = [
        f"{options.requests} requests, {found['tokens']} new tokens, {options.clients} clients, "
        f"{options.rounds} rounds, jax {jax.__version__}",
        "",
        "| | tokens/s | ratio | latency, median / p95 |",
        "|---|---|---|---|",
        f"| served, {options.clients} clients at once | {served:.0f} | | {latencies[0]} |",
        f"| served, one after the other | {alone:.0f} | **{served / alone:.2f}** (bar {SPEED_UP:g}) | {latencies[1]} |",
        f"| the same, from a server of `--max-batch 1` | {found['single']:.0f} | {served / found['single']:.2f} | |",
        f"| static batches of {options.clients} | {static:.0f} | **{served / static:.2f}** (bar {OVER_STATIC:g}) | |",
    ]
    if found["memory"]:
        before, after = found["memory"]
        lines += [
            "",
            f"{options.soak} more requests: resident {before:.0f} MiB after a fifth of them, {after:.0f} at the end.",
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--soak", type=int, default=1000, metavar="N", help="requests to watch the memory over; 0: none"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark itself")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    print(table(found, options))
    slow = found["served"] < SPEED_UP * found["one_by_one"] or found["served"] < OVER_STATIC * found["static"]
    grown = found["memory"] is not None and found["memory"][1] - found["memory"][0] > SOAK_GROWTH_MIB
    return 1 if slow or grown else 0


if __name__ == "__main__":
    sys.exit(main())
