"""How texts become windows: cutting, rolling, empty contexts, and clean-up only where it is asked for."""

import pytest
from data_tools import tokenizer

from mesh_transformer.evaluation.requests import Encoder, TextOptions, Window, fit, rolling

S = 8


def encoder(**options):
    return Encoder(tokenizer(), 64, TextOptions(**options))


def ids(text):
    return tuple(tokenizer().encode(text))


def test_rolling_scores_each_token_once():
    """E02: 20 tokens, window 8."""
    windows = rolling(tuple(range(20)), 99, S)
    assert windows == [
        Window((99,), tuple(range(8))),
        Window((7,), tuple(range(8, 16))),
        Window(tuple(range(11, 16)), tuple(range(16, 20))),
    ]
    assert [token for window in windows for token in window.continuation] == list(range(20))
    assert all(window.length <= S for window in windows)


@pytest.mark.parametrize("count", range(0, 40))
def test_rolling_cuts_as_the_harness_does(count):
    utils = pytest.importorskip("lm_eval.utils", reason="lm-eval is not installed (the extra `evaluation`)")
    tokens = list(range(count))
    theirs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(tokens, 99, S, 1))
    assert rolling(tuple(tokens), 99, S) == [Window(tuple(a), tuple(b)) for a, b in theirs]


def test_what_is_too_long_is_cut_on_the_left_to_s_plus_1():
    context, continuation = tuple(range(10)), (20, 21, 22)
    assert fit(context, continuation, S) == [Window((4, 5, 6, 7, 8, 9), continuation)]  # 9 tokens, 8 of them read
    assert fit(context[:6], continuation, S) == [Window(context[:6], continuation)]


def test_a_continuation_of_s_tokens_keeps_one_of_the_context():
    continuation = tuple(range(20, 20 + S))
    assert fit((1, 2, 3), continuation, S) == [Window((3,), continuation)]


def test_a_continuation_longer_than_the_window_is_scored_in_several():
    continuation = tuple(range(20, 31))
    windows = fit((1, 2, 3), continuation, S)
    assert windows == [Window((3,), continuation[:8]), Window(continuation[2:8], continuation[8:])]


def test_an_empty_continuation_has_no_window():
    assert fit((1, 2), (), S) == []


def test_an_empty_context_is_the_end_of_text_token():
    eot = tokenizer().eot_id
    for context in ("", "  "):
        ((window,),) = encoder().pairs([(context, "the cat")])
        assert window == Window((eot,), ids(context + "the cat"))
    ((window,),) = encoder().pairs([("", "<|endoftext|>the")])  # a continuation that brings it is not given another
    assert window == Window((eot,), ids("the"))


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation():
    ((window,),) = encoder().pairs([("one two ", "three")])
    assert window.context == ids("one two") and window.context + window.continuation == ids("one two three")


def test_texts_that_merge_into_one_token_still_have_a_continuation():
    merged = next(text for text in ("th", "he", "in", "er") if len(ids(text)) == 1)
    ((window,),) = encoder().pairs([(merged[0], merged[1])])
    assert window == Window(ids(merged[0]), ids(merged[1]))


@pytest.mark.parametrize("text", ["a \ufb01ne day\u2026", "\uff21\uff22", "it\u2019s"])
def test_texts_are_not_rewritten_unless_asked_for(text):
    """E04: the tokens are those of the tokenizer; --ftfy gives those of the cleaned text."""
    import ftfy

    ((window,),) = encoder().pairs([(text, " x")])
    assert window.context == ids(text)
    assert encoder().documents([text])[0][0].continuation == ids(text)
    ((cleaned,),) = encoder(ftfy=True).pairs([(text, " x")])
    assert cleaned.context == ids(ftfy.fix_text(text, normalization="NFKC")) != window.context


def test_end_of_text_first_when_asked_for_and_only_once():
    eot = tokenizer().eot_id
    begun = encoder(end_of_text_first=True)
    assert begun.pairs([("one", " two")]) == [[Window((eot, *ids("one")), ids(" two"))]]
    assert begun.pairs([("<|endoftext|>one", " two")]) == [[Window((eot, *ids("one")), ids(" two"))]]
    assert begun.prompts(["one"], [4]) == [(eot, *ids("one"))]


def test_prompts_leave_room_for_what_is_generated():
    long = "word " * 100
    assert encoder().prompts([long, long, ""], [24, 64, 4]) == [ids(long)[-40:], ids(long)[-64:], (tokenizer().eot_id,)]
