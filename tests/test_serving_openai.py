"""The server as the official OpenAI client sees it."""

from __future__ import annotations

import math

import numpy as np
import openai
import pytest
from conftest import network_of
from serving_tools import MAX_TOKENS, SEQ, V

from mesh_transformer.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def create(client):
    def create(prompt="def ", **more):
        return client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 16, "seed": 1, **more})

    return create


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "mesh-transformer")
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        client.models.retrieve("gpt-9")


def test_a_completion(create):
    found = create()
    (choice,) = found.choices
    assert found.object == "text_completion" and found.id.startswith("cmpl-") and found.model == "tiny"
    assert choice.index == 0 and choice.finish_reason == "length" and choice.logprobs is None and choice.text
    assert found.usage.completion_tokens == 16
    assert found.usage.total_tokens == found.usage.prompt_tokens + 16
    assert create().choices[0].text == choice.text != create(seed=2).choices[0].text
    assert create(temperature=0).choices[0].text == create(temperature=0, seed=2).choices[0].text
    default = create(max_tokens=openai.NOT_GIVEN, logit_bias={"0": -100})
    assert default.usage.completion_tokens == 16


def test_a_stream_is_the_completion_in_parts(create):
    whole = create(max_tokens=40, logprobs=2, n=2)
    chunks = list(create(max_tokens=40, logprobs=2, n=2, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 10 and {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((getattr(part.logprobs, name) for part in mine), []) == getattr(choice.logprobs, name), name
    assert not any(chunk.usage for chunk in create(stream=True))


def test_logprobs(create):
    (choice,) = create(temperature=0, logprobs=3).choices
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 16
    for token, logprob, listed in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert listed[token] == max(listed.values()) == logprob < 0, "greedy takes the most probable"
        assert sum(math.exp(x) for x in listed.values()) <= 1
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        # A token that is no whole character, or follows such ones, begins where the first of them does.
        assert token.startswith("bytes:\\x") or choice.text[offset:].lstrip("\ufffd").startswith(token)
    (bare,) = create(temperature=0, logprobs=0).choices
    assert bare.logprobs.token_logprobs == found.token_logprobs and bare.logprobs.top_logprobs == [None] * 16


def test_n_and_several_prompts(create):
    found = create(["def ", "class "], n=2)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in found.choices}) == 4 and found.usage.completion_tokens == 64
    # The i-th text draws by seed + i.
    assert found.choices[0].text == create().choices[0].text
    assert found.choices[3].text == create("class ", seed=4).choices[0].text


def test_prompts_of_token_ids(create, served_model):
    tokenizer = load_tokenizer(str(served_model.parent / "tokenizer.json"))
    ids = tokenizer.encode("def ")
    text = create().choices[0].text
    assert create(ids).choices[0].text == create([ids]).choices[0].text == text
    with pytest.raises(openai.BadRequestError, match="token id 300 does not exist"):
        create([5, 300])


def test_echo(create):
    assert create(echo=True).choices[0].text == "def " + create().choices[0].text
    parts = [chunk.choices[0].text for chunk in create(echo=True, stream=True)]
    assert "".join(parts) == "def " + create().choices[0].text and parts[0].startswith("def ")


def test_echo_with_logprobs_tells_the_prompts_own(create, served_model):
    """What the model gives for whole texts: the network's own evaluation, in a prompt of several chunks."""
    prompt = "def test(self): naïve café 日本; while QX < 12345: print(7)"
    tokenizer = load_tokenizer(str(served_model.parent / "tokenizer.json"))
    ids = tokenizer.encode(prompt)
    assert 20 < len(ids) < 46, "more than one chunk of 16"
    (plain,) = create(prompt, temperature=0, logprobs=3).choices
    (choice,) = create(prompt, temperature=0, logprobs=3, echo=True).choices
    found = choice.logprobs
    assert choice.text == prompt + plain.text
    assert found.tokens == [tokenizer.spell(i) for i in ids] + plain.logprobs.tokens
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[len(ids) :] == plain.logprobs.token_logprobs
    assert found.text_offset[len(ids) :] == [offset + len(prompt) for offset in plain.logprobs.text_offset]
    assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)

    texts = np.asarray([ids], np.int32)
    losses = network_of(1, 1, n_vocab=V, seq=SEQ).eval({"obs": texts[:, :-1], "target": texts[:, 1:]})["all_loss"][0]
    assert found.token_logprobs[1 : len(ids)] == pytest.approx((-np.asarray(losses)).tolist(), abs=1e-4)
    for token, logprob, listed in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert listed[token] == logprob <= max(listed.values()) and len(listed) <= 4

    chunks = list(create(prompt, temperature=0, logprobs=3, echo=True, stream=True))
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = sum((getattr(chunk.choices[0].logprobs, name) for chunk in chunks), [])
        assert streamed == getattr(found, name), name
    (empty,) = create("", temperature=0, logprobs=0, echo=True).choices
    assert len(empty.logprobs.tokens) == 16 and None not in empty.logprobs.token_logprobs


def test_stop_strings(create):
    whole = create(max_tokens=60).choices[0].text
    stop = whole[12:15]  # three characters: of several tokens, most likely
    cut = create(max_tokens=60, stop=stop)
    assert cut.choices[0].text == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 60
    several = create(max_tokens=60, stop=["never there", whole[5:8], stop]).choices[0]
    assert several.text == whole[: whole.index(whole[5:8])]
    streamed = list(create(max_tokens=60, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_penalties_bias_and_filters_reach_the_sampler(create):
    plain = create(temperature=0, max_tokens=60).choices[0].text
    changed = {
        "presence_penalty": 2, "frequency_penalty": 2, "logit_bias": {"120": 100},
        "extra_body": {"repetition_penalty": 5.0},
    }  # fmt: skip
    for name, value in changed.items():
        assert create(temperature=0, max_tokens=60, **{name: value}).choices[0].text != plain, name
    only = create(temperature=0, max_tokens=5, logit_bias={"120": 100}, logprobs=0).choices[0].logprobs.tokens
    assert len(set(only)) == 1
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        assert create(max_tokens=60, extra_body=extra).choices[0].text == plain
    assert create(top_p=0, max_tokens=60).choices[0].text == plain


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"max_tokens": 0}, "max_tokens"), ({"max_tokens": MAX_TOKENS + 1}, "max_tokens"), ({"top_p": 2}, "top_p"),
     ({"temperature": -0.5}, "temperature"), ({"temperature": 3}, "temperature"), ({"n": 0}, "n"), ({"n": 7}, "n"),
     ({"logprobs": 6}, "logprobs"), ({"stop": ["a"] * 5}, "stop"), ({"stop": 3}, "stop"), ({"best_of": 3}, "best_of"),
     ({"suffix": "x"}, "suffix"), ({"presence_penalty": 3}, "presence_penalty"), ({"prompt": {}}, "prompt"),
     ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"300": 1}}, "logit_bias"), ({"prompt": []}, "prompt"),
     ({"logit_bias": {"3": 101}}, "logit_bias"), ({"prompt": ["a", 5]}, "prompt"), ({"prompt": [-1]}, "prompt"),
     ({"prompt": ["a"] * 17}, "prompt"), ({"seed": 1.5}, "seed"),
     ({"stream_options": {"include_usage": True}}, "stream_options"), ({"extra_body": {"messages": []}}, "messages"),
     ({"extra_body": {"top_k": 0}}, "top_k"),
     ({"extra_body": {"repetition_penalty": 5e-324}}, "repetition_penalty")],
    ids=str,
)  # fmt: skip
def test_refusals_are_the_clients_own_exceptions(create, asked, field):
    with pytest.raises(openai.BadRequestError) as caught:
        create(**asked)
    assert (
        caught.value.param == field and field in caught.value.message and caught.value.type == "invalid_request_error"
    )


def test_another_model_is_not_found(create):
    with pytest.raises(openai.NotFoundError) as caught:
        create(model="gpt-9")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
