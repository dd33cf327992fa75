"""device_sample.py on a tiny checkpoint: prompts, files, pipes, refusals; and text that comes in pieces."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import batch_of, mesh_of, tiny
from decoding_tools import network

import device_sample
from mesh_transformer import CausalTransformer, completion, inference, load_config, parameters
from mesh_transformer.answer import Completion, TextStream
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.completion import Completer, Options
from mesh_transformer.data.tokenizer import load_tokenizer, train_tokenizer
from mesh_transformer.errors import CheckpointError

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ["def test(self):\n    return self.value\n" * 20, "naïve café, 日本語 and 🙂\n" * 20]
V = 384
DEVICES = ["--platform", "cpu", "--devices", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of fewer ids than the model has, a config, and a checkpoint of step 7."""
    path = tmp_path_factory.mktemp("sample")
    tokenizer = train_tokenizer(TEXTS, 300, str(path / "tokenizer.json"))
    assert tokenizer.vocab_size < V
    keys = tiny(n_vocab=V, cores_per_replica=4, model_dir=str(path / "model"), tokenizer=str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(keys))
    # Trained on another mesh than it is sampled on.
    trained = network(1, 2, n_vocab=V, model_dir=keys["model_dir"], tokenizer=keys["tokenizer"])
    store = CheckpointStore(keys["model_dir"])
    store.save(7, trained.state, trained.config)
    store.wait()
    return path


@pytest.fixture
def sample(folder, capsys, monkeypatch):
    """Runs the script in this process: (exit code, output, error stream)."""

    def run(*arguments, stdin=None, config="config.json"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        code = device_sample.main(["--config", str(folder / config), *DEVICES, "--max-tokens", "6", *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def completer(folder):
    config = load_config(folder / "config.json")
    network = inference.load_network(config, mesh_of(1, 4), [str(folder / "model" / "step_7")])
    return Completer(network, completion.tokenizer_of(config))


def test_a_prompt_is_continued(sample, completer):
    code, text, said = sample("--prompt", "def ", "--greedy")
    assert code == 0 and "model/step_7" in said and "mesh dp 1 x mp 4" in said and "seed" not in said
    ids = completer.tokenizer.encode("def ")
    context = np.array([ids])
    # Nothing near the padding ids is likely to be drawn from random weights, so what is masked shows in the logits.
    out = completer.network.generate(context, [len(ids)], 6, {"temp": 0}, n_tokens=completer.tokenizer.vocab_size)
    assert text == "def " + completer.tokenizer.decode(out["tokens"][0]) + "\n"
    assert sample("--prompt", "def ", "--greedy", "--no-echo")[1] == text.removeprefix("def ")
    drawn = [sample("--prompt", "def ", "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == sample("--prompt", "def ", "--seed", "1", "--temp", "0.75", "--top-p", "0.9")[1]
    told = sample("--prompt", "def ")
    seed = told[2].rsplit("seed ", 1)[1].strip()
    assert sample("--prompt", "def ", "--seed", seed)[1] == told[1]


def test_bytes_that_are_no_text_do_not_stop_it(sample, tmp_path):
    as_bytes = "日本".encode().decode("ascii", "surrogateescape")
    assert sample("--prompt", as_bytes, "--greedy") == sample("--prompt", "日本", "--greedy")
    assert sample("--prompt", "caf\udce9", "--greedy")[1].startswith("caf\ufffd")
    (tmp_path / "prompts.jsonl").write_text('"a"\n"half \\ud800 a pair"\n')
    code, _, said = sample("--prompt-file", str(tmp_path / "prompts.jsonl"))
    assert code == 2 and said.endswith("prompts.jsonl, line 2: half a surrogate pair at character 5\n")


def test_a_pipe_gets_an_answer_for_each_line(sample):
    code, text, said = sample("--seed", "5", stdin="def \n\nx" * 1 + "y" * 60 + "\ndef \n")
    assert code == 0
    answers = text.split("\n")
    assert len(answers) >= 5 and "the prompt has" in said and "only the last 16 are used" in said
    assert text.startswith(sample("--seed", "5", "--prompt", "def ", "--no-echo")[1])
    assert text.endswith(sample("--seed", "8", "--prompt", "def ", "--no-echo")[1])


def test_one_bad_line_does_not_end_the_session(sample, monkeypatch):
    encode = completion.Tokenizer.encode

    def fails_once(self, text, *more):
        if text == "bad":
            raise completion.ConfigError("this one cannot be answered")
        return encode(self, text, *more)

    monkeypatch.setattr(completion.Tokenizer, "encode", fails_once)
    code, text, said = sample("--seed", "4", stdin="bad\ndef \n")
    assert code == 0 and "error: this one cannot be answered" in said
    assert text == "\n" + sample("--seed", "5", "--prompt", "def ", "--no-echo")[1]


def test_a_file_is_completed_and_continued(sample, folder, tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('"def "\n{"prompt": "", "id": 3}\n\n{"prompt": "café"}\n', encoding="utf-8")
    out = tmp_path / "out.jsonl"
    run = ["--prompt-file", str(prompts), "--output", str(out), "--seed", "1"]
    code, text, said = sample(*run, "--batch", "2")
    assert (code, text) == (0, "") and "prompts 2/3" in said and "prompts 3/3" in said
    whole = out.read_bytes()
    lines = [json.loads(line) for line in whole.decode().splitlines()]
    assert [line["prompt"] for line in lines] == ["def ", "", "café"] and lines[1]["id"] == 3
    assert all(line["tokens"] == 6 and line["finish_reason"] == "length" for line in lines)
    assert lines[0]["completion"] + "\n" == sample("--prompt", "def ", "--no-echo", "--seed", "1")[1]
    # Cut short inside its second line, it is continued; by another batch, with the same answers.
    out.write_bytes(whole[: whole.index(b"\n") + 20])
    code, _, said = sample(*run, "--batch", "1")
    assert code == 0 and "1 of 3 prompts have their answers already" in said
    assert out.read_bytes() == whole
    assert sample("--prompt-file", str(prompts), "--seed", "1", "--batch", "1")[1] == whole.decode()
    out.write_text('{"prompt": "other"}\n')
    code, _, said = sample(*run)
    assert code == 2 and "holds answers to other prompts" in said
    prompts.write_text('"fine"\n{"text": 1}\n')
    code, _, said = sample(*run)
    assert code == 2 and 'in.jsonl, line 2: expected a string, or an object with a string "prompt"' in said


def other_config(folder, name, **changes):
    keys = json.loads((folder / "config.json").read_text()) | changes
    (folder / name).write_text(json.dumps(keys))
    return name


@pytest.fixture
def damaged(folder, tmp_path):
    """The checkpoint's run with a newer step 8, of other weights, one byte of which has flipped; its model_dir."""
    model_dir = tmp_path / "model"
    shutil.copytree(folder / "model", model_dir)
    trained = network(1, 2, n_vocab=V, model_dir=str(model_dir), tokenizer=str(folder / "tokenizer.json"))
    more = jax.tree.map(lambda x: 2 * x, trained.state.params)
    store = CheckpointStore(model_dir)
    store.save(8, trained.state._replace(params=more), trained.config)
    store.wait()
    path = model_dir / "step_8" / "shard_1" / "3.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return model_dir


def test_a_damaged_newest_checkpoint_is_passed_over_or_refused(sample, folder, damaged):
    config = other_config(folder, "damaged.json", model_dir=str(damaged))
    expected = sample("--prompt", "def ", "--greedy")[1]
    for named in ((), ("--ckpt", str(damaged))):
        code, text, said = sample("--prompt", "def ", "--greedy", *named, config=config)
        assert (code, text) == (0, expected)
        assert "shard_1/3.npz has checksum" in said and f"{damaged}/step_7 is used instead" in said
    for asked in (("--strict",), ("--ckpt-step", "8"), ("--ckpt", str(damaged / "step_8"))):
        code, text, said = sample("--prompt", "def ", "--greedy", *asked, config=config)
        assert (code, text) == (2, "") and "shard_1/3.npz has checksum" in said and "used instead" not in said
    # A file that is not there is noticed before devices start, and treated in the same way.
    (damaged / "step_8" / "shard_0" / "3.npz").unlink()
    assert inference.choose_steps(load_config(folder / config), None, "latest", False) == [f"{damaged}/step_7"]
    assert sample("--prompt", "a", "--strict", config=config)[0] == 2
    shutil.rmtree(damaged / "step_7" / "shard_0")
    code, _, said = sample("--prompt", "a", config=config)
    assert code == 2 and f"error: {damaged}/step_8" in said, "the first of the damaged ones is what counts"


def test_the_step_that_is_used_instead_must_be_of_the_same_model(sample, folder, damaged):
    """Equal shapes, other positions: only the manifest tells, and it was looked at for the newest step alone."""
    other = network(1, 2, n_vocab=V, pe="rotary", pe_rotary_dims=2, model_dir=str(damaged))
    store = CheckpointStore(damaged.parent / "other")
    store.save(7, other.state, other.config)
    store.wait()
    shutil.rmtree(damaged / "step_7")
    shutil.copytree(damaged.parent / "other" / "step_7", damaged / "step_7")
    code, text, said = sample("--prompt", "a", config=other_config(folder, "mixed.json", model_dir=str(damaged)))
    assert (code, text) == (2, "") and "step_7 is of another model: pe_rotary_dims was 2" in said


@pytest.mark.parametrize("told", ["hash", "name"])
def test_another_tokenizer_than_the_weights_were_trained_with_is_said(sample, folder, tmp_path, told):
    trained = network(1, 2, n_vocab=V, model_dir=str(tmp_path / "model"), tokenizer=str(folder / "tokenizer.json"))
    own = load_tokenizer(str(folder / "tokenizer.json")).hash
    store = CheckpointStore(tmp_path / "model")
    store.save(1, trained.state, trained.config, position={"tokenizer_hash": own if told == "hash" else None})
    store.wait()
    train_tokenizer(["other texts"], 290, str(folder / "another.json"))
    warned = {}
    for name in ("tokenizer.json", "another.json"):
        config = other_config(
            folder, "tokenizers.json", model_dir=str(tmp_path / "model"), tokenizer=str(folder / name)
        )
        code, _, said = sample("--prompt", "def ", "--greedy", config=config)
        assert code == 0
        warned[name] = "trained with" in said
    assert warned == {"tokenizer.json": False, "another.json": True}


@pytest.mark.parametrize(("early_cast", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_early_cast_keeps_weights_in_16_bits_where_there_is_no_optimizer(folder, early_cast, dtype):
    config = load_config(folder / other_config(folder, "cast.json", early_cast=early_cast))
    path = str(folder / "model" / "step_7")
    loaded, named = inference.load_network(config, mesh_of(1, 4), [path]), CausalTransformer(config, mesh_of(1, 4))
    named.load_ckpt(path)
    drawn, fresh = inference.load_network(config, mesh_of(1, 4), []), CausalTransformer(config, mesh_of(1, 4))
    for net in (loaded, named, drawn, fresh):
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(net.state.params)} == {dtype}
    whole = network(1, 4, n_vocab=V)
    rows = batch_of(2, 16, vocab=V)
    losses = [np.asarray(net.eval(rows)["loss"]) for net in (loaded, named, whole)]
    assert np.array_equal(losses[0], losses[1])
    assert (0 < np.abs(losses[0] - losses[2]).max() < 0.05) == early_cast
    assert (fresh.state.opt_state is None) == early_cast
    with pytest.raises(CheckpointError, match="no optimizer.*early_cast"):
        loaded.train(batch_of(1, 1, 16, vocab=V))


def test_random_weights_have_to_be_asked_for(sample, folder):
    other_config(folder, "fresh.json", model_dir=str(folder / "empty"))
    code, text, said = sample("--prompt", "a", config="fresh.json")
    assert code == 2 and text == "" and "holds no complete checkpoint" in said and "--random-init" in said
    code, text, said = sample("--prompt", "a", "--random-init", "--greedy", config="fresh.json")
    assert code == 0 and "random weights" in said
    code, text, _ = sample("--prompt", "a", "--ckpt", str(folder / "model"), "--greedy", config="fresh.json")
    assert code == 0 and text == sample("--prompt", "a", "--ckpt-step", "7", "--greedy")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ckpt-step", "8"], "has no step 8; it has 7"),
        (["--ckpt-step", "best"], "none is best"),
        (["--ckpt", "nowhere/step_1"], "nowhere/step_1"),
        (["--top-k", "0"], "top_k (0) must be an integer of at least 1"),
        (["--top-p", "1.5"], "top_p (1.5) must be a number from 0 to 1"),
        (["--temp", "-1"], "temp (-1.0) must be a finite number of at least 0"),
        (["--devices", "3"], "3 devices cannot be split into replicas of cores_per_replica (4)"),
        (["--platform", "tpu"], "platform 'tpu' was asked for"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(sample, arguments, message):
    code, text, said = sample("--prompt", "a", *arguments)
    assert code == 2 and text == ""
    line = said.splitlines()[-1]
    assert line.startswith("error: ") and message in line


def test_weights_of_another_model_are_refused(sample, folder):
    for changes, message in (
        ({"n_heads": 4}, "n_heads was 8 in the run and is 4"),
        ({"layers": 3}, "layers 3 in the config, 2 in the checkpoint"),
        ({"n_vocab": 300}, "n_vocab 300 in the config, 384 in the checkpoint"),
    ):
        code, _, said = sample("--prompt", "a", config=other_config(folder, "other.json", **changes))
        assert code == 2 and message in said, said


def fond_of(completer, ids):
    """The same, with logits that make these ids all but certain."""
    network, state = completer.network, completer.network.state
    projection = dict(state.params[parameters.PROJECTION])
    bias = np.array(projection["b"])
    bias[ids] = 80.0
    projection["b"] = jax.device_put(bias, projection["b"].sharding)
    fond = CausalTransformer(network.config, network.mesh)
    fond.state = state._replace(params={**state.params, parameters.PROJECTION: projection})
    return Completer(fond, completer.tokenizer)


def test_the_end_of_text_ends_a_text(completer):
    found = fond_of(completer, [completer.tokenizer.eot_id]).complete(["def "], Options(6, {}, 0))
    assert found == [Completion("", 0, "stop")]


def test_padding_ids_are_not_drawn(completer):
    size = completer.tokenizer.vocab_size
    (found,) = fond_of(completer, slice(size, None)).complete(["def "], Options(6, {"temp": 1.0}, 0))
    # An id without a token would decode to nothing.
    assert found.tokens == 6 and len(found.text) >= 6


def test_characters_are_never_cut(completer):
    """Whatever the pieces, and through every character that is spread over tokens."""
    tokenizer = completer.tokenizer
    text = "naïve café, 日本語 🙂🙃 déjà vu: " + "ελληνικά " * 20
    ids = tokenizer.encode(text)
    for size in (1, 2, 3, 7, len(ids)):
        stream = TextStream(tokenizer)
        parts = [stream.add(ids[i : i + size], last=i + size >= len(ids)) for i in range(0, len(ids), size)]
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)
    # What is cut off by the end, and bytes that are no character, do come out.
    broken = TextStream(tokenizer)
    half, letter = tokenizer.encode("🙃")[:-1], tokenizer.encode("a")
    parts = [broken.add(half), broken.add(letter), broken.add(half, last=True)]
    assert parts[0] == "" and "".join(parts) == tokenizer.decode(half + letter + half)
    assert parts[1].endswith("a") and parts[2].endswith("\ufffd")


def test_a_config_error_needs_no_jax():
    program = (
        "import sys, device_sample\n"
        "assert device_sample.main(['--config', 'nowhere.json']) == 2\n"
        "assert not {'jax', 'haiku', 'tokenizers', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.startswith("error: nowhere.json"), done.stderr


@pytest.mark.slow
def test_a_real_pipe_in_and_out(folder):
    done = subprocess.run(
        [sys.executable, "device_sample.py", "--config", str(folder / "config.json"), *DEVICES, "--max-tokens", "6"],
        input=b"a\n\xff\xfe\nb", cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") >= 3 and b"Traceback" not in done.stderr


def test_stop_texts_end_a_text_and_its_work(sample, completer):
    """The first two characters of the greedy continuation are cut off, wherever its tokens end."""
    _, whole, _ = sample("--prompt", "def ", "--greedy", "--no-echo")
    stop = whole[1:3]
    code, text, _ = sample("--prompt", "def ", "--greedy", "--no-echo", "--stop", "nowhere", "--stop", stop)
    assert (code, text) == (0, whole[: whole.index(stop)] + "\n")
    options = Options(64, {"temp": 0}, stop=[stop])
    tokens = [part.tokens for (part,) in completer.stream(["def "], options, chunk=2)]
    assert sum(tokens) < 30, "the work ends too, not only the text"
    both = completer.complete(["def ", "def "], [options, Options(6, {"temp": 0})])
    assert [found.finish_reason for found in both] == ["stop", "length"] and both[1].tokens == 6
    ids = completer.tokenizer.encode("def ")
    known = completer.tokenizer.vocab_size
    first = completer.network.generate(np.array([ids]), [len(ids)], 1, {"temp": 0}, n_tokens=known)["tokens"][0, 0]
    assert sample("--prompt", "def ", "--greedy", "--no-echo", "--stop-id", str(int(first)))[1] == "\n"


def test_several_completions_and_their_log_probabilities(sample, tmp_path):
    (tmp_path / "in.jsonl").write_text('"def "\n"x"\n')
    run = ["--prompt-file", str(tmp_path / "in.jsonl"), "--seed", "1"]
    code, text, _ = sample(*run, "--n", "2", "--batch", "2", "--logprobs", "2")
    assert code == 0
    lines = [json.loads(line) for line in text.splitlines()]
    for i, line in enumerate(lines):
        for j, found in enumerate(line["completions"]):
            alone = sample("--prompt", line["prompt"], "--seed", str(1 + 2 * i + j), "--no-echo")[1]
            assert found["completion"] + "\n" == alone
            assert len(found["logprobs"]) == found["tokens"] == 6
            for token in found["logprobs"]:
                assert token["logprob"] <= token["top"][0][2] <= 0 and len(token["top"]) == 2
    both = sample("--prompt", "def ", "--seed", "1", "--n", "2", "--no-echo")[1]
    first, second = (found["completion"] for found in lines[0]["completions"])
    assert both == f"[1 of 2]\n{first}\n[2 of 2]\n{second}\n"


def test_every_sampling_flag_reaches_the_model(sample):
    plain = sample("--prompt", "def ", "--seed", "1")[1]
    for flag, value in (
        ("--temp", "1.9"), ("--top-k", "1"), ("--min-p", "0.9"), ("--repetition-penalty", "9"), ("--top-p", "0"),
        ("--presence-penalty", "2"), ("--frequency-penalty", "-2"), ("--logit-bias", '{"70": 100}'),
    ):  # fmt: skip
        code, text, said = sample("--prompt", "def ", "--seed", "1", flag, value)
        assert code == 0, said
        if flag not in ("--presence-penalty", "--frequency-penalty"):  # of six tokens none may come twice
            assert text != plain, flag
    for flag, value in (("--filter-order", "huggingface"), ("--window", "reference")):
        assert sample("--prompt", "def ", "--seed", "1", flag, value)[0] == 0
    code, _, said = sample("--prompt", "def ", "--logit-bias", "3: 4")
    assert code == 2 and "--logit-bias 3: 4: not JSON" in said
    with pytest.raises(SystemExit):
        sample("--prompt", "def ", "--logprobs", "1")
