"""Stop strings wherever tokens and pieces meet, and tokens told one by one."""

from __future__ import annotations

import numpy as np
import pytest

from mesh_transformer.answer import Answer, StopStrings
from mesh_transformer.data.tokenizer import train_tokenizer
from mesh_transformer.sampling import LogProbs

TEXT = "one STOP two\nUser: three 日本 ENDE"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (["STOP"], "one "),
        (["two", "STOP"], "one "),
        (["\nUser:"], "one STOP two"),
        (["ENDEX", "E!"], TEXT),
        (["E"], "one STOP two\nUser: three 日本 "),
        (["o"], ""),
        ([], TEXT),
        (["STOPS", "TOP t"], "one S"),
        (["日本"], "one STOP two\nUser: three "),
    ],
)
def test_a_stop_string_ends_the_text_before_itself(stop, kept, size):
    strings, text, hit = StopStrings(stop), "", False
    for start in range(0, len(TEXT), size):
        ready, hit = strings.add(TEXT[start : start + size])
        text += ready
        assert kept.startswith(text), "nothing is given out that has to be taken back"
        if hit:
            break
    if not hit:
        text += strings.add("", last=True)[0]
    assert text == kept and hit == (kept != TEXT)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer([TEXT * 20], 290, str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def log_probs(ids):
    """Made up, each to be told from the others."""
    ids = np.array(ids)
    return LogProbs(-ids / 100, np.stack([ids, ids + 1], 1), np.stack([-ids / 100, -ids / 50], 1))


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("stop", "kept"), [(["STOP"], "one "), ([], TEXT), ([" 日本 E"], "one STOP two\nUser: three")])
def test_an_answer_across_token_boundaries(tokenizer, stop, kept, size):
    ids = tokenizer.encode(TEXT)
    answer, parts = Answer(tokenizer, stop), []
    for start in range(0, len(ids), size):
        new = ids[start : start + size]
        parts.append(answer.add(new, "length" if start + size >= len(ids) else None, log_probs(new)))
        if answer.finish_reason:
            break
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.text == kept and whole.finish_reason == ("stop" if kept != TEXT else "length")
    assert answer.add(ids, "length") == type(whole)("", 0, whole.finish_reason), "what comes later is dropped"
    told = whole.logprobs
    assert [token.id for token in told] == ids[: len(told)]
    for token, after in zip(told, [*told[1:], None], strict=True):
        assert token.logprob == -token.id / 100 and [one[0] for one in token.top] == [token.id, token.id + 1]
        end = after.offset if after else len(kept)
        assert "\ufffd" in token.text or token.text.startswith(kept[token.offset : end])
    if kept == TEXT:
        assert len(told) == len(ids)
    else:
        assert all(token.offset < len(kept) for token in told) and len(told) <= whole.tokens <= len(ids)
