"""Collect text that every Python installation has: the sources of its own standard library, docstrings and all.

python scripts/collect_python_text.py --output-dir DIR [--max-mb 5]

Writes one UTF-8 text file for each module, DIR/package.module.txt. The same Python version gives the same files with
the same bytes wherever it is installed: nothing of the machine is in them. The text stays under Python's own licence.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import sysconfig
import tokenize
from pathlib import Path

# Not text worth learning: other people's packages, tests, tables of code points, and one enormous string.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
# Written when Python was built: these hold the machine's paths.
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


def modules(library: Path) -> list[Path]:
    """Sources of the library that take part, relative to it, in an order that no machine changes."""
    found = []
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)]
        found += [
            (Path(folder) / name).relative_to(library)
            for name in files
            if name.endswith(".py") and not name.startswith(SKIPPED_PREFIXES)
        ]
    return sorted(found, key=lambda path: path.parts)


def choose(library: Path, max_bytes: int) -> dict[str, str]:
    """Text by module name, of at most max_bytes together; which modules, a hash of their names decides."""
    texts: dict[str, str] = {}
    left = max_bytes
    for path in sorted(modules(library), key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        try:
            with tokenize.open(library / path) as file:  # honours the source's own encoding line
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # an example of a badly encoded file, not text
        size = len(text.encode("utf-8"))
        if text.strip() and size <= left:
            texts[".".join(path.with_suffix("").parts)] = text
            left -= size
    return dict(sorted(texts.items()))


def write(texts: dict[str, str], folder: Path) -> None:
    """Write DIR/NAME.txt for each text; the folder appears only when all of them are there."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, text in texts.items():
        (partial / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")
    partial.rename(folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to make; it must not exist yet")
    parser.add_argument("--max-mb", type=float, default=5.0, help="megabytes of text at most (default 5)")
    options = parser.parse_args(arguments)
    if options.output_dir.exists():
        print(f"error: {options.output_dir} exists; remove it or give another --output-dir", file=sys.stderr)
        return 2
    if options.max_mb <= 0:
        print(f"error: --max-mb is {options.max_mb}; it must be above 0", file=sys.stderr)
        return 2
    texts = choose(Path(sysconfig.get_path("stdlib")), int(options.max_mb * 1e6))
    if not texts:
        print("error: this Python has no sources in its standard library folder, or --max-mb is too small for one",
              file=sys.stderr)  # fmt: skip
        return 2
    write(texts, options.output_dir)
    size = sum(len(text.encode("utf-8")) for text in texts.values())
    print(f"{len(texts)} modules, {size / 1e6:.1f} MB of text in {options.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
