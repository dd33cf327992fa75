"""Clean-up of text before it is tokenized. All of it is off unless asked for."""

from __future__ import annotations

import re
from collections.abc import Callable

from mesh_transformer.errors import DataError

# What WikiText's own tokenization did to ordinary text, undone: pattern, replacement. It is lossy on anything else.
_WIKITEXT = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r" @([-,.])@ ", r"\1"),  # 1 @,@ 000; well @-@ known
        (r"s ' ", "s' "),  # the dogs ' tails
        (r" ('(?:s|re|ve|ll|d|m)|n't)\b", r"\1"),  # it 's
        (r" ([:;.!?,])(?=\s|$)", r"\1"),  # a space before punctuation
        (r"\( ([^()]*?) \)", r"(\1)"),
        (r"\[ ([^\[\]]*?) \]", r"[\1]"),
        (r'" ([^"\n]*?) "', r'"\1"'),
        (r"(?<= )' ([^'\n]*?) '", r"'\1'"),
        (r"(= )+=", lambda found: found.group().replace(" ", "")),  # = = Title = =
    )
]


def wikitext_detokenize(text: str) -> str:
    """WikiText (or a corpus spaced like it) as ordinary text. A lone `N` stays what it is."""
    for pattern, replacement in _WIKITEXT:
        text = pattern.sub(replacement, text)
    return text


def normaliser(ftfy: bool, wikitext: bool) -> Callable[[str], str]:
    """The chosen clean-up as one function. Raises DataError if it needs a package that is not installed."""
    steps: list[Callable[[str], str]] = []
    if ftfy:
        steps.append(_ftfy())
    if wikitext:
        steps.append(wikitext_detokenize)

    def apply(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return apply


def _ftfy() -> Callable[[str], str]:
    try:
        import ftfy
    except ImportError as error:
        raise DataError("--normalize-with-ftfy needs the package ftfy: pip install ftfy") from error

    def fix(text: str) -> str:
        fixed: str = ftfy.fix_text(text, normalization="NFKC")
        return fixed

    return fix
