"""Make the example tasks' data from Python's own standard library: data/eval/*.jsonl, the same for the same Python.

python scripts/make_eval_data.py --output-dir data/eval

python_order: which of four lines comes next, the other three being the same words in another order. python_word: the
last word of a comment's or docstring's line, after a word that it often follows. python_text: whole excerpts, for
perplexity. python_line: the rest of a line that occurs often, after its first word.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

COUNTS = {"order": 200, "word": 200, "text": 12, "line": 100}
CONTEXT_LINES = 6
TEXT_CHARS = 2500
USUAL = 40  # times that a line occurs in the library for it to be asked for
OFTEN, SHARE = 10, 0.4  # times that a word has followed the one before it, and the share of what followed that
SENTENCE = re.compile(r"\w[\w' ,-]+ [a-z]{3,}")
PAIR = re.compile(r"(?=\b([a-z]{2,}) ([a-z]{3,})\b)")


def sources() -> dict[str, str]:
    """Modules at the top of the standard library, by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    return {path.name: path.read_text(encoding="utf-8", errors="replace").replace("\t", "    ") for path in files}


def order(texts: dict[str, str], draw: random.Random) -> Iterator[dict]:
    for name, text in shuffled(texts, draw):
        lines = text.splitlines()
        fit = [i for i in range(CONTEXT_LINES, len(lines)) if 5 <= len(set(lines[i].split())) <= 12]
        for i in draw.sample(fit, min(3, len(fit))):
            words = lines[i].split()
            others: set[str] = set()
            while len(others) < 3:
                mixed = draw.sample(words, len(words))
                if mixed != words:
                    others.add(" ".join(mixed))
            choices = [" ".join(words), *sorted(others)]
            draw.shuffle(choices)
            indent = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
            context = "\n".join(lines[i - CONTEXT_LINES : i]) + "\n" + indent
            yield {"file": name, "context": context, "choices": choices, "answer": choices.index(" ".join(words))}


def word(texts: dict[str, str], draw: random.Random) -> Iterator[dict]:
    pairs = collections.Counter(pair for text in texts.values() for pair in PAIR.findall(text))
    firsts = collections.Counter(first for text in texts.values() for first, _ in PAIR.findall(text))
    for name, text in shuffled(texts, draw):
        sentences = [match.group() for line in text.splitlines() for match in SENTENCE.finditer(line)]
        fit = []
        for sentence in sentences:
            before, _, last = sentence.rpartition(" ")
            first = before.rpartition(" ")[2]
            count = pairs[first, last]
            if len(before.split()) >= 4 and count >= OFTEN and count >= SHARE * firsts[first]:
                fit.append({"file": name, "context": before, "word": last})
        yield from draw.sample(fit, min(2, len(fit)))


def text(texts: dict[str, str], draw: random.Random) -> Iterator[dict]:
    for name, content in shuffled(texts, draw):
        if len(content) > 2 * TEXT_CHARS:
            start = content.index("\n", draw.randrange(len(content) - 2 * TEXT_CHARS)) + 1
            yield {"file": name, "text": content[start : content.index("\n", start + TEXT_CHARS)]}


def line(texts: dict[str, str], draw: random.Random) -> Iterator[dict]:
    counts = collections.Counter(each for content in texts.values() for each in content.splitlines() if each.strip())
    usual = {each for each, count in counts.items() if count >= USUAL and len(each.split()) > 1}
    for name, content in shuffled(texts, draw):
        lines = content.splitlines()
        fit = [i for i in range(CONTEXT_LINES, len(lines)) if lines[i] in usual]
        for i in draw.sample(fit, min(2, len(fit))):
            cut = lines[i].index(lines[i].split()[0]) + len(lines[i].split()[0])
            context = "\n".join(lines[i - CONTEXT_LINES : i]) + "\n" + lines[i][:cut]
            yield {"file": name, "context": context, "rest": lines[i][cut:]}


def shuffled(texts: dict[str, str], draw: random.Random) -> list[tuple[str, str]]:
    return draw.sample(sorted(texts.items()), len(texts))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="data/eval", metavar="DIR", help="where the files go (data/eval)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="which excerpts are drawn (1)")
    options = parser.parse_args(arguments)
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    texts = sources()
    for kind, make in (("order", order), ("word", word), ("text", text), ("line", line)):
        made = list(make(texts, random.Random(options.seed)))[: COUNTS[kind]]
        path = folder / f"python_{kind}.jsonl"
        path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in made), encoding="utf-8")
        print(f"{path}: {len(made)} documents, {path.stat().st_size:,} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
