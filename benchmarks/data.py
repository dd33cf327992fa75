"""How fast text becomes records, and records become batches, on one core.

python benchmarks/data.py [--megabytes 8] [--repeats 5] [--tokenizer PATH] [--output FILE]

The text is the running Python's own standard library. "per core" is by the process's CPU time, so that other work on
the machine does not count; the wall clock's figure stands beside it. Medians of the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file, without the package installed
    sys.path.insert(0, str(ROOT))

from mesh_transformer.data.loader import RecordLoader  # noqa: E402
from mesh_transformer.data.prepare import TRAIN, Options, make_records  # noqa: E402
from mesh_transformer.data.tokenizer import load_tokenizer, train_tokenizer  # noqa: E402

NEEDED_MB_PER_S = 1.0
NEEDED_TOKENS_PER_S = 100_000  # 20 times what the quickstart's model trains at on two cores
VOCABULARY = 4096


def standard_library_text(megabytes: float) -> list[str]:
    """Source files of the standard library, up to so many megabytes in all."""
    texts: list[str] = []
    left = int(megabytes * 1e6)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if left <= 0 or "site-packages" in path.parts:
            continue
        text = path.read_bytes()[:left].decode("utf-8", "ignore")
        texts.append(text)
        left -= len(text.encode())
    return texts


def timed(work: Callable[[], Any], repeats: int) -> tuple[Any, float, float]:
    """The last result, and the median seconds of CPU and of wall clock."""
    cpu, wall = [], []
    result = None
    for _ in range(repeats):
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        result = work()
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
    return result, statistics.median(cpu), statistics.median(wall)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures."""
    texts = standard_library_text(options.megabytes)
    source = folder / "text"
    source.mkdir()
    for number, text in enumerate(texts):
        (source / f"{number:05}.txt").write_text(text, encoding="utf-8", newline="")
    megabytes = sum(path.stat().st_size for path in source.iterdir()) / 1e6
    tokenizer = options.tokenizer or str(folder / "tokenizer.json")
    if options.tokenizer is None:
        train_tokenizer(texts, VOCABULARY, tokenizer)
    request = Options(
        str(source), "bench", str(folder / "out"), seq=options.seq, tokenizer=tokenizer, index_dir="", workers=1
    )
    made, cpu, wall = timed(lambda: make_records(request), options.repeats)
    facts = made.descriptions[TRAIN]
    figures: dict[str, Any] = {
        "text_mb": round(megabytes, 2),
        "tokens": facts["tokens"],
        "seq": options.seq,
        "vocabulary": load_tokenizer(tokenizer).vocab_size,
        "script_mb_per_s_per_core": round(megabytes / cpu, 2),
        "script_mb_per_s_wall": round(megabytes / wall, 2),
        "script_needed_mb_per_s": NEEDED_MB_PER_S,
    }
    for name, shuffle in (("loader", False), ("loader_shuffled", True)):

        def read(shuffle: bool = shuffle) -> int:
            batch = (1, 16)
            n_vocab = facts["vocab_size"]
            with RecordLoader(made.indexes[0], batch, options.seq, n_vocab, shuffle=shuffle, epochs=1) as loader:
                return sum(step["obs"].size for step in loader)

        tokens, cpu, wall = timed(read, options.repeats)
        figures[f"{name}_tokens_per_s_per_core"] = round(tokens / cpu)
        figures[f"{name}_tokens_per_s_wall"] = round(tokens / wall)
    figures["loader_needed_tokens_per_s"] = NEEDED_TOKENS_PER_S
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and say by the exit status whether it is fast enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=8.0, help="text to work on")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--tokenizer", help=f"a tokenizer instead of one of {VOCABULARY} tokens, trained on the text")
    parser.add_argument("--output", type=Path, help="write the figures there as JSON, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        figures = measure(options, Path(folder))
    text = json.dumps(figures, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    fast = (
        figures["script_mb_per_s_per_core"] >= NEEDED_MB_PER_S
        and min(figures["loader_tokens_per_s_per_core"], figures["loader_shuffled_tokens_per_s_per_core"])
        >= NEEDED_TOKENS_PER_S
    )
    return 0 if fast else 1


if __name__ == "__main__":
    sys.exit(main())
