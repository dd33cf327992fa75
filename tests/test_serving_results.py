"""Nobody's answer depends on who else is asking, and all of them are what the model gives without a server."""

from __future__ import annotations

import itertools
import queue
import random
from collections import Counter

import httpx
import numpy as np
import pytest
from conftest import mesh_of
from decoding_tools import compilations
from serving_tools import MAX_TOKENS, SEQ, in_parallel, wait_until

from mesh_transformer import inference, load_config
from mesh_transformer.answer import Completion
from mesh_transformer.completion import Completer, Options, tokenizer_of
from mesh_transformer.errors import ConfigError
from mesh_transformer.serving.batch import Batch, Output
from mesh_transformer.serving.engine import TOKENS_A_TURN, Engine, State
from mesh_transformer.serving.job import Job
from mesh_transformer.serving.limits import Limits
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.waiting import FairQueue


@pytest.fixture(scope="module")
def completer(served_model):
    config = load_config(served_model)
    return Completer(inference.load_network(config, mesh_of(1, 1), []), tokenizer_of(config))


def test_answers_are_those_of_the_model_without_a_server(server, completer):
    """Through another path: prompts read whole, in a batch of another shape."""
    prompts = ["def ", "", "naïve café", "class A:\n    " * 12]
    expected = completer.complete(prompts, [Options(30, {"temp": 0.9, "top_p": 0.95}, seed) for seed in range(4)])
    found = [
        server.complete(context=prompt, temp=0.9, top_p=0.95, seed=seed, max_tokens=30)
        for seed, prompt in enumerate(prompts)
    ]
    assert found == [each.text for each in expected]


def test_same_seed_same_text_whoever_else_asks(server):
    """Ten requests of all kinds, alone and then among forty others, in three orders."""
    rng = random.Random(0)
    mine = [
        {"prompt": [rng.randrange(1, 300) for _ in range(rng.randrange(1, SEQ))], "max_tokens": rng.randrange(1, 60),
         "seed": i, "temperature": rng.choice([0, 0.7, 1.3]), "top_p": rng.choice([0.5, 1]), "logprobs": 1,
         "presence_penalty": rng.choice([0, 1.5])}
        for i in range(10)
    ]  # fmt: skip

    def ask(body):
        with server.client() as client:
            while (reply := client.post("/v1/completions", json=body)).status_code == 429:
                pass
        assert reply.status_code == 200, reply.text
        return [(choice["text"], choice["logprobs"], choice["finish_reason"]) for choice in reply.json()["choices"]]

    alone = [ask(body) for body in mine]
    for order in range(3):
        others = [
            {"prompt": [rng.randrange(1, 300)] * rng.randrange(1, 90), "max_tokens": rng.randrange(1, MAX_TOKENS)}
            for _ in range(12)
        ]
        everyone = [*enumerate(mine), *((None, other) for other in others)]
        random.Random(order).shuffle(everyone)
        found = in_parallel(*[lambda body=body: ask(body) for _, body in everyone])
        for (i, _), answer in zip(everyone, found, strict=True):
            assert i is None or answer == alone[i], "to the last bit of its log-probabilities"


def test_eight_clients_stream_their_own_answers_at_once(server):
    def ask(seed):
        text = ""
        body = {"prompt": "def ", "seed": seed, "max_tokens": 40, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
        return text

    found = in_parallel(*[lambda seed=seed: ask(seed) for seed in range(8)])
    expected = [server.complete(context="def ", seed=seed, temp=1, top_p=1, max_tokens=40) for seed in range(8)]
    assert found == expected and len(set(found)) == 8


@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.long), 2])
def test_nothing_is_compiled_once_the_batch_is_ready(completer, served_model, dp):
    """Whatever lengths, options and numbers of requests come; and rows lie in different replicas."""
    network = inference.load_network(load_config(served_model), mesh_of(dp, 1), [])
    batch = Batch(Completer(network, completer.tokenizer), Limits(max_batch=3, max_tokens=MAX_TOKENS, chunk=32))
    batch.compile()
    prompts = [[5] * 3, [6] * 20, [7] * 33, [8] * SEQ]
    asked = [
        {}, {"temp": 0}, {"logprobs": 5, "top_k": 3}, {"logit_bias": {3: 1.0, 4: -1.0}, "frequency_penalty": 1.0},
    ]  # fmt: skip
    found: Counter[int] = Counter()
    with compilations() as compiled:
        for prompt, (row, options) in zip(prompts, itertools.cycle(enumerate(asked[:3])), strict=False):
            batch.release([row])
            found[row] = 0
            batch.begin(row, prompt, Options(70, options, stop=("zz",)))
            while batch.reading:
                for output in batch.read():
                    found[output.row] += output.completion.tokens
            for output in batch.decode(4):
                found[output.row] += output.completion.tokens
        batch.reset()
        # Two rows of different replicas whose prompts are read at once, and one behind the first.
        for row in range(3):
            batch.begin(row, prompts[row], Options(9, asked[row], seed=row), echo=row > 0)
        texts, told = [""] * 3, [None] * 3
        while batch.reading:
            for output in batch.read():
                texts[output.row] += output.completion.text
                told[output.row] = output.prompt
        for output in batch.decode(9):
            texts[output.row] += output.completion.text
    assert not compiled
    alone = completer.complete(prompts[:3], [Options(9, asked[row], seed=row) for row in range(3)])
    assert texts == [answer.text for answer in alone]
    assert told[0] is None
    for prompt, listed in zip(prompts[1:3], told[1:], strict=True):
        whole = np.asarray([prompt], np.int32)
        losses = completer.network.eval({"obs": whole[:, :-1], "target": whole[:, 1:]})["all_loss"][0]
        assert np.abs(listed.drawn + np.asarray(losses)).max() < 1e-4 and listed.top.shape == (len(prompt) - 1, 5)
    assert all(1 <= count <= 17 for count in found.values()) and max(found.values()) > 5


def test_options_that_do_not_fit_are_their_own_requests_fault():
    """Whatever the schema let through: the texts beside it go on."""

    class Picky:
        reading = False

        def __init__(self):
            self.rows = []

        def begin(self, row, prompt, options, echo=False):
            if options.max_tokens == 1:
                raise ConfigError("max_tokens does not fit")
            self.rows.append(row)

        def decode(self, count):
            return [Output(row, Completion("x", 1, "stop"), True) for row in self.rows]

        def release(self, rows):
            self.rows = [row for row in self.rows if row not in rows]

    engine, events = Engine(Limits(max_batch=2), Metrics()), queue.Queue()
    engine.start(Picky)
    wait_until(lambda: engine.state is State.READY)
    engine.submit([Job([1], Options(max_tokens=n), "client", n, events.put) for n in (1, 2)])
    refused, answered = sorted((events.get(timeout=30) for _ in range(2)), key=lambda event: event.index)
    assert refused.error.status == 400 and "does not fit" in refused.error.message
    assert answered.completion.text == "x" and engine.stop() and engine.idle


def test_everyone_gets_a_token_between_two_chunks_of_a_newcomers_prompt():
    calls = []

    class Chunked:
        """A token of a prompt is a chunk; every text ends with the first token behind the last chunk."""

        def __init__(self):
            self.rows, self.unread = [], 0

        @property
        def reading(self):
            return self.unread > 0

        def begin(self, row, prompt, options, echo=False):
            self.rows.append(row)
            self.unread += len(prompt)

        def read(self):
            calls.append("read")
            self.unread -= 1
            return []

        def decode(self, count):
            calls.append(count)
            return [Output(row, Completion("x", 1, None if self.reading else "stop"), False) for row in self.rows]

        def release(self, rows):
            self.rows = [row for row in self.rows if row not in rows]

    engine, events = Engine(Limits(max_batch=2), Metrics()), queue.Queue()
    engine.start(Chunked)
    wait_until(lambda: engine.state is State.READY)
    engine.submit(
        [Job([1] * chunks, Options(max_tokens=9), "client", i, events.put) for i, chunks in enumerate((1, 5))]
    )
    wait_until(lambda: engine.idle)
    assert engine.stop() and calls == ["read", 1] * 5 + ["read", TOKENS_A_TURN]
    assert Counter(events.get().index for _ in range(events.qsize())) == {0: 6, 1: 6}


def test_the_queue_takes_clients_in_turn_and_each_in_its_order():
    class Waiting:
        def __init__(self, client, number):
            self.client, self.number = client, number

    queue = FairQueue()
    greedy = [Waiting("greedy", i) for i in range(4)]
    modest = [Waiting("modest", i) for i in range(2)]
    for item in greedy + modest:
        queue.add(item)
    assert len(queue) == 6 and queue.remove(greedy[1]) and not queue.remove(greedy[1])
    taken = [queue.take() for _ in range(5)]
    assert taken == [greedy[0], modest[0], greedy[2], modest[1], greedy[3]]
    assert queue.take() is None and len(queue) == 0
