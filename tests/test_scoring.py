"""Continuations scored against contexts that are read once: equal to one pass over the whole text."""

from __future__ import annotations

import numpy as np
import plain_model
import pytest
from conftest import tokens_of
from decoding_tools import SEQ, network

from mesh_transformer import scoring

# Each continuation: its context among its replica's own, and its tokens.
LENGTHS = {0: (8, 8, 5), 1: (3, 1)}
PAIRS = [("rotary", "layernorm", 2, 4), ("t5", "layernorm", 2, 2), ("fixed", "layernorm-desync", 1, 4)]


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize(("pe", "norm", "dp", "mp"), PAIRS)
def test_scores_equal_one_pass_over_the_whole_text(pe, norm, dp, mp):
    net = network(dp, mp, pe=pe, norm=norm)
    lengths = [6, 9] * dp
    contexts = [tokens_of(n, seed=10 + i) for i, n in enumerate(lengths)]
    padded = np.stack([np.pad(context, (0, SEQ - len(context)), constant_values=7) for context in contexts])
    read = scoring.context_step(net.model, net.mesh)(net.state.params, padded)
    rows, texts, targets = [], [], []
    for replica in range(dp):
        for row, counts in LENGTHS.items():
            for count in counts:
                rows.append((replica, row))
                targets.append(tokens_of(count, seed=len(rows)))
                texts.append(np.concatenate([contexts[2 * replica + row], targets[-1]])[: SEQ + 1])
    T = 8
    count = np.array([len(t) for t in targets], np.int32)
    start = np.array([lengths[row] - 1 for _, row in rows], np.int32)
    tokens, target = np.zeros((len(rows), T), np.int32), np.zeros((len(rows), T), np.int32)
    for i, text in enumerate(texts):
        tokens[i, : count[i]], target[i, : count[i]] = text[start[i] : start[i] + count[i]], targets[i]
    given = scoring.Continuations(np.array([row for _, row in rows], np.int32), start, tokens, count, target)
    scores = scoring.score_step(net.model, net.mesh)(net.state.params, read, scoring.place(net.mesh, given))
    greedy = 0
    for i, text in enumerate(texts):
        logits = plain_model.logits(net.state.params, net.model, text[:-1])[start[i] :]
        wanted = log_softmax(logits)[np.arange(count[i]), targets[i]]
        assert wanted.std() > 0.1 or count[i] == 1
        np.testing.assert_allclose(np.asarray(scores.log_prob)[i, : count[i]], wanted, atol=1e-4, rtol=0)
        assert (np.asarray(scores.greedy)[i, : count[i]] == (logits.argmax(-1) == targets[i])).all()
        greedy += (logits.argmax(-1) == targets[i]).sum()
    # The targets are random, so the arg-maxes themselves are scored too.
    best = np.stack([
        np.pad(plain_model.logits(net.state.params, net.model, text[:-1])[s:].argmax(-1), (0, T - n))
        for text, s, n in zip(texts, start, count, strict=True)
    ])  # fmt: skip
    given = given._replace(target=best.astype(np.int32))
    scores = scoring.score_step(net.model, net.mesh)(net.state.params, read, scoring.place(net.mesh, given))
    assert all(np.asarray(scores.greedy)[i, :n].all() for i, n in enumerate(count))
    assert greedy < count.sum()
