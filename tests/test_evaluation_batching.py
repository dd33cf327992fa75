"""Batches: every window once, few shapes, within the budget; and answers that outlive a process."""

import json

import numpy as np
import pytest

from mesh_transformer.errors import EvaluationError
from mesh_transformer.evaluation.answers import Answers
from mesh_transformer.evaluation.batching import Budget, Group, batches, bucket, group, prompts, width_bucket
from mesh_transformer.evaluation.continuing import Prompt, options_of
from mesh_transformer.evaluation.requests import Window

SEQ = 512


def windows_of(count, choices, seed=0, shortest=1, longest=400):
    """`count` contexts of many lengths, each with `choices` continuations."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        context = (number, *random.integers(0, 50, random.integers(shortest, longest)).tolist())
        for choice in range(choices):
            found.append(Window(context, (choice, *random.integers(0, 50, random.integers(1, 30)).tolist())))
    return found


def of(batch):
    return [Window(each.context, ids) for each in batch.groups for ids in each.continuations]


@pytest.mark.parametrize("choices", [1, 2, 4, 5, 20])
@pytest.mark.parametrize("replicas", [1, 4])
def test_every_window_is_in_one_batch(choices, replicas):
    windows = windows_of(60, choices)
    made = list(batches(group(windows), Budget(4096, replicas), SEQ))
    assert sorted(window for batch in made for window in of(batch)) == sorted(windows)
    for batch in made:
        assert len(batch.groups) <= batch.rows and batch.rows % replicas == 0
        assert batch.rows == replicas or batch.rows * (batch.length + batch.continuations * batch.width) <= 4096
        for each in batch.groups:
            assert each.read <= batch.length <= SEQ
            assert len(each.continuations) <= batch.continuations
            assert not batch.shared or each.longest <= batch.width
    shapes = {(batch.rows, batch.length, batch.continuations, batch.width) for batch in made}
    assert len(shapes) <= len(made)


def test_few_documents_take_few_shapes():
    """Compiling costs more than padding while there is little to do."""
    made = list(batches(group(windows_of(12, 4, shortest=40)), Budget(16384), SEQ))
    assert len({(batch.rows, batch.length, batch.width) for batch in made}) == len(made) == 1


def test_many_documents_are_padded_little():
    windows = windows_of(600, 4)
    made = list(batches(group(windows), Budget(4096), SEQ))
    padded = sum(batch.rows * batch.length for batch in made)
    assert padded < 1.3 * sum(len(each.context) for each in group(windows))


def test_an_incomplete_last_batch_has_a_shape_that_is_known_already():
    made = list(batches(group(windows_of(70, 4, shortest=40, longest=50)), Budget(10**9, rows=32), SEQ))
    assert [(len(batch.groups), batch.rows) for batch in made] == [(32, 32), (32, 32), (6, 32)]


def test_equal_requests_are_scored_once():
    """Which is also what makes choices with the same text tie exactly."""
    a = Window((1, 2, 3), (4, 5))
    assert group([a, a, Window((1, 2, 3), (6,)), a]) == [Group((1, 2, 3), ((4, 5), (6,)))]


def test_a_continuation_longer_than_its_context_is_read_with_it():
    alone, shared = (4, 5, 6), (7,)
    assert group([Window((1, 2), alone), Window((1, 2), shared)]) == [Group((1, 2), (alone,)), Group((1, 2), (shared,))]


def test_buckets():
    assert [bucket(n, 2048) for n in (1, 8, 9, 16, 17, 33, 300, 310, 1025)] == [8, 8, 16, 16, 20, 40, 320, 320, 1280]
    assert bucket(1900, 1950) == 1950
    assert [width_bucket(n, 2048) for n in (1, 8, 9, 12, 13, 17, 25, 33)] == [8, 8, 12, 12, 16, 24, 32, 48]
    for most in (5, 100):
        assert all(n <= f(n, most) <= most for n in range(1, most + 1) for f in (bucket, width_bucket))


def test_prompts_are_batched_by_their_options():
    greedy, other = options_of({"until": ["\n"]}), options_of({"until": ["\n"], "max_gen_toks": 5})
    asked = [Prompt((1,) * n, options, 0) for n in (3, 40, 7) for options in (greedy, other)]
    made = list(prompts(asked, Budget(10**9, rows=2), SEQ))
    assert [[(len(each.ids), each.options) for each in batch] for batch in made] == [
        [(40, greedy), (7, greedy)], [(3, greedy)], [(40, other), (7, other)], [(3, other)],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (256, (), (("temp", 0.0),))),
        ({"until": "x", "max_new_tokens": 7, "temperature": 0.0}, (7, ("x",), (("temp", 0.0),))),
        ({"until": ["a", ""], "do_sample": True, "top_k": 0}, (256, ("a",), (("temp", 1.0),))),
        ({"temperature": 0.5, "top_p": 0.9}, (256, (), (("temp", 0.5), ("top_p", 0.9)))),
        ({"temperature": 0.5, "do_sample": False}, (256, (), (("temp", 0.0),))),
    ],
)
def test_generation_arguments(arguments, expected):
    assert options_of(arguments) == expected


@pytest.mark.parametrize("arguments", [{"max_gen_toks": 0}, {"max_gen_toks": 1.5}, {"until": [3]}])
def test_generation_arguments_that_cannot_be_used(arguments):
    with pytest.raises(EvaluationError, match=next(iter(arguments))):
        options_of(arguments)


def test_answers_are_kept_for_the_same_settings_only(tmp_path):
    path = str(tmp_path / "deep" / "answers.jsonl")
    first = Answers(path, {"checkpoint": "a"})
    question = Window((1, 2), (3,))
    first.add([(question, (-1.5, True))])
    first.close()
    again = Answers(path, {"checkpoint": "a"})
    assert again.get(question) == [-1.5, True] and again.get(Window((1,), (2, 3))) is None
    again.close()
    assert Answers(path, {"checkpoint": "b"}).get(question) is None


def test_a_line_that_was_cut_short_is_dropped(tmp_path):
    path = tmp_path / "answers.jsonl"
    first = Answers(str(path), {})
    first.add([((1,), 1.0), ((2,), 2.0)])
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    again = Answers(str(path), {})
    assert again.get((1,)) == 1.0 and again.get((2,)) is None
    again.add([((2,), 2.0)])
    again.close()
    assert path.read_bytes() == whole


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"a": 1}) + "\nx\n")
    with pytest.raises(EvaluationError, match="does not hold answers"):
        Answers(str(path), {})
    assert path.exists()
