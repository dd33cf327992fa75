"""Scores by hand from logits, at every edge, on several meshes; batches, ties, memory, and resuming."""

import functools

import jax
import numpy as np
import pytest
from data_tools import prose, tokenizer
from decoding_tools import network

from mesh_transformer.evaluation.answers import Answers
from mesh_transformer.evaluation.evaluator import Evaluator, Stopped
from mesh_transformer.evaluation.requests import Encoder, TextOptions
from mesh_transformer.evaluation.scorer import NetworkScorer, Score

S, V = 16, 320
MESHES = [(1, 1), (2, 4)]
CONTEXTS = ["the cat sat on a mat", "rain", "", prose(40, 3), "seven quiet houses by the sea "]
CHOICES = [" and looked at the moon", " sat", prose(30, 4), ""]
PAIRS = [(context, choice) for context in CONTEXTS for choice in CHOICES]


def net(dp, mp):
    return network(dp, mp, seq=S, n_vocab=V)


class Counting(NetworkScorer):
    """A scorer that remembers its batches."""

    def __init__(self, network):
        super().__init__(network, tokenizer())
        self.batches = []

    def score(self, batch):
        self.batches.append(batch)
        return super().score(batch)


def evaluator(dp=1, mp=1, **options):
    scorer = options.pop("scorer", None) or Counting(net(dp, mp))
    return Evaluator(scorer, Encoder(tokenizer(), S, TextOptions()), **options)


@functools.cache
def logprobs(ids):
    """Log-probabilities [n, V] behind each of the ids, from whole logits, in float64."""
    logits = np.asarray(net(1, 1).logits(np.array([ids + (0,) * (S - len(ids))])))[0, : len(ids)].astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def by_hand(windows):
    """The score of one request's windows."""
    total, greedy = 0.0, True
    for context, continuation in windows:
        found = logprobs((context + continuation)[:-1])[-len(continuation) :]
        total += sum(row[token] for row, token in zip(found, continuation, strict=True))
        greedy &= all(int(np.argmax(row)) == token for row, token in zip(found, continuation, strict=True))
    return total, greedy


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_scores_are_those_of_whole_logits(mesh):
    """Shared and lonely contexts, empty and too long ones, in the order in which they were asked for."""
    encoder = Encoder(tokenizer(), S, TextOptions())
    wanted = [by_hand(windows) for windows in encoder.pairs(PAIRS)]
    found = evaluator(*mesh).loglikelihood(PAIRS)
    assert len({score.logprob for score in found}) > 12
    np.testing.assert_allclose([score.logprob for score in found], [total for total, _ in wanted], atol=2e-4, rtol=0)
    assert [score.greedy for score in found] == [greedy for _, greedy in wanted]
    assert [found[i] for i in (3, 7, 11)] == [Score(0.0, True)] * 3  # empty continuations


def test_rolling_scores_every_token_of_a_text_once():
    texts = [prose(60, 5), "moon", "", prose(7, 6)]
    windows = Encoder(tokenizer(), S, TextOptions()).documents(texts)
    assert len(windows[0]) > 2 and windows[2] == []
    found = evaluator().loglikelihood_rolling(texts)
    np.testing.assert_allclose(found, [by_hand(each)[0] for each in windows], atol=2e-4, rtol=0)


def test_contexts_are_read_once_for_all_their_continuations():
    counting = Counting(net(1, 1))
    evaluator(scorer=counting).loglikelihood([(CONTEXTS[0], choice) for choice in (" a", " the", " sat")])
    (batch,) = counting.batches
    assert batch.shared and [len(group.continuations) for group in batch.groups] == [3]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_size_of_batches_does_not_matter(rows):
    """The last batch is incomplete."""
    pairs = [(prose(4, seed), choice) for seed in range(5) for choice in (" a", " the moon")]
    wanted = evaluator().loglikelihood(pairs)
    found = evaluator(rows=rows).loglikelihood(pairs)
    np.testing.assert_allclose([a.logprob for a in found], [b.logprob for b in wanted], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mp", [1, 4])
def test_of_equal_logits_the_first_id_is_the_greedy_one(mp):
    """Both where continuations share a context and where they do not, on one shard and across two."""
    tied = net(1, mp)
    state = tied.state
    name = "causal_transformer_shard/~/projection_shard"
    projection = jax.tree.map(np.array, state.params[name])
    low, high = 3, 300  # on the first and the last shard
    for leaf in ("w", "b"):
        projection[leaf][..., [low, high]] = 0
    projection["b"][[low, high]] = 100.0  # both above everything else, and equal
    placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), projection, state.params[name])
    from mesh_transformer.evaluation.batching import Batch, Group

    try:
        tied.state = state._replace(params={**state.params, name: placed})
        scorer = NetworkScorer(tied, tokenizer())
        together = Group((1, 2, 5), ((low,), (high,)))
        alone = (Group((1, 2, 5), ((low,),)), Group((1, 2, 5), ((high,),)))
        for scores in (
            scorer.score(Batch((together,), 1, 8, 2, 8))(),
            scorer.score(Batch(alone, 2, 8, 1, 0))(),
        ):
            assert [score.greedy for score in scores] == [True, False]
            assert scores[0].logprob == scores[1].logprob == pytest.approx(-np.log(2), abs=1e-4)
    finally:
        tied.state = state


def test_each_replica_has_contexts_of_its_own():
    pairs = [(prose(5, seed), choice) for seed in range(8) for choice in (" a", " the moon")]
    counting = Counting(net(2, 4))
    found = evaluator(scorer=counting).loglikelihood(pairs)
    assert {(batch.shared, batch.rows) for batch in counting.batches} == {(True, 8)}
    wanted = evaluator().loglikelihood(pairs)
    np.testing.assert_allclose([a.logprob for a in found], [b.logprob for b in wanted], atol=1e-4, rtol=0)


@pytest.mark.parametrize("merged", [None, 2])
def test_version_2_is_scored_without_its_z_loss(merged):
    """Alone and together, in the reference's mode too, whose evaluation has the z-loss in every loss."""
    two = network(1, 1, seq=S, n_vocab=V, version=2, v2_merged_heads=merged)
    logits = np.asarray(two.logits(np.array([[1, 2, 5, 7] + [0] * (S - 4)])))[0].astype(np.float64)
    wanted = [logits[2][token] - np.log(np.exp(logits[2]).sum()) for token in (7, 9)]
    from mesh_transformer.evaluation.batching import Batch, Group

    scorer = NetworkScorer(two, tokenizer())
    together = Batch((Group((1, 2, 5), ((7,), (9,))),), 1, 8, 2, 8)
    alone = Batch((Group((1, 2, 5), ((7,),)), Group((1, 2, 5), ((9,),))), 2, 8, 1, 0)
    for batch in (together, alone):
        np.testing.assert_allclose([score.logprob for score in scorer.score(batch)()], wanted, atol=1e-4, rtol=0)


def test_equal_choices_tie_exactly():
    a, b, c = evaluator().loglikelihood([("the", " cat"), ("the", " cat"), ("the", " moon")])
    assert a == b != c


def test_memory_that_does_not_suffice_halves_the_batch():
    class Small(Counting):
        def score(self, batch):
            if batch.rows > 2:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return super().score(batch)

    pairs = [(prose(4, seed), " a") for seed in range(7)]
    small = Small(net(1, 1))
    found = evaluator(scorer=small, rows=8).loglikelihood(pairs)
    np.testing.assert_allclose(
        [a.logprob for a in found], [b.logprob for b in evaluator().loglikelihood(pairs)], atol=1e-5, rtol=0
    )
    assert {batch.rows for batch in small.batches} == {2}


def test_other_failures_are_not_taken_for_it():
    class Broken(Counting):
        def score(self, batch):
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        evaluator(scorer=Broken(net(1, 1))).loglikelihood([("a", " b")])


def test_what_was_scored_before_a_stop_is_not_scored_again(tmp_path):
    path = str(tmp_path / "answers.jsonl")
    pairs = [(prose(4, seed), " a") for seed in range(6)]
    first, left = Counting(net(1, 1)), iter([False, False, False, True])
    answers = Answers(path, {})
    with pytest.raises(Stopped):
        evaluator(scorer=first, rows=1, answers=answers, stop=lambda: next(left)).loglikelihood(pairs)
    answers.close()
    second, answers = Counting(net(1, 1)), Answers(path, {})
    found = evaluator(scorer=second, rows=1, answers=answers).loglikelihood(pairs)
    assert len(first.batches) == 3 and len(answers) == 6
    assert 0 < len(second.batches) < 6  # those that were read before the stop are there
    assert found == evaluator(rows=1).loglikelihood(pairs)
    third = Counting(net(1, 1))
    assert evaluator(scorer=third, answers=answers).loglikelihood(pairs) == found and not third.batches


def test_generated_texts_end_at_the_first_stop_string():
    plain, longer = evaluator().generate_until([("the cat", {"max_gen_toks": 8}), ("rain", {"max_gen_toks": 12})])
    assert len(plain) > 3
    until = plain[2:4]
    cut, other = evaluator().generate_until(
        [("the cat", {"max_gen_toks": 8, "until": [until, "never there"]}), ("rain", {"max_gen_toks": 12})]
    )
    assert cut == plain[: plain.index(until)] and other == longer


def test_random_texts_are_the_same_for_the_same_request():
    asked = [("the cat", {"max_gen_toks": 8, "temperature": 1.0})] * 2
    first, second = evaluator().generate_until(asked)
    assert (first, second) == tuple(evaluator().generate_until(asked)) and first != second
