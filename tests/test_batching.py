"""Rows that join and leave a running batch: their texts are their own, and nobody else's text changes by a bit."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import tokens_of
from decoding_tools import SEQ, compilations, generate, network

from mesh_transformer import batching, decoding
from mesh_transformer.sampler import Mode, sampler_of

KNOWN = np.int32(64)
ROWS, STOP_WIDTH = 4, 2
# What a server has on, so that any request can join.
MODE = Mode(penalties=True, bias=4, logprobs=3, logits=True)


class Batch:
    """A running batch of a network and, for each row, what was drawn for its newest text."""

    def __init__(self, net):
        self.net = net
        self.rows = batching.idle_rows(net.model, net.mesh, ROWS, SEQ, STOP_WIDTH, MODE)
        self.tokens, self.logits, self.logprobs = ({} for _ in range(3))

    def feed(self, *parts):
        """Each part: row, tokens, start, last, options, seed."""
        placed = [
            batching.Part(row, tokens, start, last, 50, [], sampler_of(options, 1, seed, MODE))
            for row, tokens, start, last, options, seed in parts
        ]
        chunk = batching.place_chunk(self.net.mesh, ROWS, SEQ, placed, STOP_WIDTH, MODE)
        step = batching.extend_step(self.net.model, self.net.mesh, MODE)
        self.rows, drawn = step(self.net.state.params, self.rows, chunk, KNOWN)
        mine = ROWS // self.net.mesh.shape["dp"]
        each = len(drawn.counts) // self.net.mesh.shape["dp"]
        places = {}
        for part in placed:
            replica = part.row // mine
            places[part.row] = replica * each + sum(p // mine == replica for p in places)
            self.tokens[part.row], self.logits[part.row], self.logprobs[part.row] = [], [], []
        self.keep(drawn, places)
        return drawn

    def decode(self, count):
        step = decoding.decode_steps(self.net.model, self.net.mesh, MODE)
        self.rows, drawn = step(self.net.state.params, self.rows, np.int32(count), KNOWN)
        self.keep(drawn, {row: row for row in self.tokens})

    def keep(self, drawn, places):
        for row, place in places.items():
            n = int(drawn.counts[place])
            self.tokens[row] += np.asarray(drawn.tokens)[place, :n].tolist()
            self.logits[row] += list(np.asarray(drawn.logits)[place, :n])
            self.logprobs[row] += list(np.asarray(drawn.logprobs.drawn)[place, :n])

    def release(self, row):
        self.rows = batching.release(self.rows, np.arange(ROWS) == row)


GREEDY = {"temp": 0}
SAMPLED = {"temp": 1.0, "top_p": 0.9, "frequency_penalty": 0.3, "logprobs": 2}
FIRST = [(0, tokens_of(5, seed=1), 0, True, GREEDY, 0), (3, tokens_of(9, seed=2), 0, True, SAMPLED, 7)]


def quiet(net):
    """Rows 0 and 3 in a batch that nobody joins."""
    batch = Batch(net)
    batch.feed(*FIRST)
    for _ in range(5):
        batch.decode(4)
    return batch


@pytest.mark.parametrize(("dp", "mp"), [(1, 1), (2, 4)])
def test_joining_and_leaving_changes_nobody_elses_text(dp, mp):
    """Past the context too: 5 + 21 tokens in a ring of 16."""
    net = network(dp, mp, pe="rotary", norm="layernorm")
    alone, busy = quiet(net), Batch(net)
    long, short = tokens_of(13, seed=3), tokens_of(3, seed=4)
    busy.feed(*FIRST)
    busy.decode(4)
    assert int(busy.feed((1, long[:6], 0, False, SAMPLED, 8)).status[0]) == decoding.IDLE
    busy.decode(4)  # while half of row 1's prompt is there
    busy.feed((1, long[6:], 6, True, SAMPLED, 8), (2, short, 0, True, GREEDY, 0))
    busy.decode(4)
    released_after = len(busy.tokens[2])
    busy.release(2)
    busy.decode(4)
    assert len(busy.tokens[2]) == released_after == 5, "a released row draws no more"
    busy.feed((2, short, 0, True, SAMPLED, 9))
    busy.decode(4)
    for row in (0, 3):
        assert len(busy.tokens[row]) == 21
        assert busy.tokens[row] == alone.tokens[row]
        assert all((a == b).all() for a, b in zip(busy.logits[row], alone.logits[row], strict=True))
        assert busy.logprobs[row] == alone.logprobs[row]
    # And those that joined have their own texts, whether their prompts came whole or in parts.
    for row, prompt, options, seed in ((1, long, SAMPLED, 8), (2, short, SAMPLED, 9), (3, FIRST[1][1], SAMPLED, 7)):
        wanted = generate(net, [prompt] * 3, len(busy.tokens[row]), options, seed=[seed] * 3, return_logits=True)
        assert busy.tokens[row] == wanted["tokens"][0].tolist()
        np.testing.assert_allclose(busy.logits[row], wanted["logits"][0], atol=1e-5, rtol=0)


def test_a_text_leaves_nothing_behind():
    """A row's second text does not see its first: neither keys nor what penalties remember."""
    net = network(2, 4, pe="rotary", norm="layernorm")
    busy, fresh = Batch(net), Batch(net)
    busy.feed((1, tokens_of(12, seed=5), 0, True, {"temp": 1.0, "repetition_penalty": 1.5}, 1))
    busy.decode(16)
    busy.release(1)
    again = (1, tokens_of(4, seed=6), 0, True, {"temp": 0, "repetition_penalty": 1.5}, 1)
    for batch in (busy, fresh):
        batch.feed(again)
        batch.decode(8)
    assert busy.tokens[1] == fresh.tokens[1] and busy.logprobs[1] == fresh.logprobs[1]


def test_rows_come_and_go_without_compiling():
    net = network(2, 4, pe="rotary", norm="layernorm")
    quiet(net)
    batch = Batch(net)
    batch.feed(*FIRST)
    batch.release(1)
    with compilations() as seen:
        batch.feed((1, tokens_of(16), 0, True, GREEDY, 0), (2, tokens_of(1), 0, True, {"logit_bias": {3: 5}}, 0))
        batch.decode(7)
        batch.release(2)
        batch.feed((2, tokens_of(2), 0, True, {"presence_penalty": 1, "logprobs": 3}, 0))
    assert not seen
