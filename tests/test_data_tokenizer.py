"""Tokenizers: from files and folders without a network, GPT-2's exactly, trained ones reproducibly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from data_tools import gpt2_folder, prose, tokenizer, tokenizer_path

from mesh_transformer.data.tokenizer import check_vocabulary, load_tokenizer, train_tokenizer
from mesh_transformer.errors import DataError

ROOT = Path(__file__).resolve().parent.parent


def test_gpt2_from_its_two_files(tmp_path):
    gpt2 = load_tokenizer(str(gpt2_folder()))
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, 50256)
    assert gpt2.encode("hello\n\nhello") == [31373, 198, 198, 31373]
    assert gpt2.encode("a<|endoftext|>b") == [64, 50256, 65]
    literal = gpt2.encode("a<|endoftext|>b", literal=True)
    assert 50256 not in literal and gpt2.decode(literal) == "a<|endoftext|>b"
    # Under Hugging Face's names, and as one file: the same tokenizer.
    (tmp_path / "vocab.json").write_bytes((gpt2_folder() / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((gpt2_folder() / "vocab.bpe").read_bytes())
    renamed = load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(gpt2.backend.to_str())
    for same in (renamed, load_tokenizer(str(tmp_path)), load_tokenizer(str(tmp_path / "tokenizer.json"))):
        assert same.hash == gpt2.hash
        assert same.encode("It's 12:30, naïve 日本語 🦆") == gpt2.encode("It's 12:30, naïve 日本語 🦆")
    assert gpt2.hash != tokenizer().hash


def test_a_text_longer_than_gpt2s_context_is_nothing_to_warn_of(capfd):
    """How long a text may be is the model's affair: 1500 tokens of 2048 fit."""
    assert len(load_tokenizer(str(gpt2_folder())).encode(" a" * 1500)) == 1500
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "text", ["naïve café — “quoted”", "日本語とひらがな", "🦆👩‍👩‍👧 emoji", "tabs\tand\r\nlines\n\n", " N "]
)
def test_round_trip(text):
    assert tokenizer().decode(tokenizer().encode(text)) == text


def test_training_is_reproducible(tmp_path):
    """Also with another number of threads, in another process."""
    texts = [prose(3000, seed) for seed in range(4)]
    first = train_tokenizer(texts, 320, str(tmp_path / "sub" / "a.json"))
    assert (first.vocab_size, first.eot_id, first.eot_token) == (320, 0, "<|endoftext|>")
    program = (
        "import sys; from data_tools import prose; from mesh_transformer.data.tokenizer import train_tokenizer\n"
        "train_tokenizer([prose(3000, seed) for seed in range(4)], 320, sys.argv[1])"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "b.json")], check=True, env=environment)
    assert (tmp_path / "sub" / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert load_tokenizer(str(tmp_path / "b.json")).hash == first.hash
    with pytest.raises(DataError, match="vocab_size 256: expected at least 257"):
        train_tokenizer(texts, 256, str(tmp_path / "c.json"))


def test_train_tokenizer_script(tmp_path, capsys):
    from scripts import train_tokenizer as script

    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(prose(2000, 0))
    (tmp_path / "text" / "b.pdf").write_text("no text")
    command = [str(tmp_path / "text"), "--output", str(tmp_path / "out.json"), "--vocab-size", "300"]
    assert script.main(command) == 0
    printed = capsys.readouterr()
    assert "300 tokens" in printed.out and "b.pdf" in printed.out
    assert load_tokenizer(str(tmp_path / "out.json")).hash == tokenizer().hash
    assert script.main([str(tmp_path / "none"), "--output", str(tmp_path / "x.json")]) == 2
    assert "error: " in capsys.readouterr().err


def test_vocabulary_larger_than_the_models_is_refused():
    check_vocabulary(tokenizer(), 300)
    with pytest.raises(
        DataError, match=r"has 300 tokens, but the model's n_vocab is 299; raise n_vocab to at least 300"
    ):
        check_vocabulary(tokenizer(), 299)


def test_end_of_text_under_another_name(tmp_path):
    content = json.loads(Path(tokenizer_path()).read_text())
    text = json.dumps(content).replace("<|endoftext|>", "</s>")
    (tmp_path / "a.json").write_text(text)
    assert load_tokenizer(str(tmp_path / "a.json")).eot_token == "</s>"
    (tmp_path / "a.json").write_text(text.replace("</s>", "<stop>"))
    with pytest.raises(DataError, match=r"has no end-of-text token \(looked for <\|endoftext\|>, </s>"):
        assert load_tokenizer(str(tmp_path / "a.json")).eot_id


def test_what_is_no_tokenizer_is_refused_with_the_files_that_are_needed(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    for path, message in (
        ("broken.json", "not a tokenizers JSON file"),
        ("folder", "the folder has no tokenizer.json"),
        ("missing.json", "no such file or folder"),
        ("missing/folder/deep", "no such file or folder"),
    ):
        with pytest.raises(DataError, match=f"{message}.*vocab.json and merges.txt"):
            load_tokenizer(str(tmp_path / path))


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as gives one file of the model `someone/words`."""

    def answer(self, body):
        self.send_response(200)
        for name, value in (("Content-Length", len(body)), ("ETag", '"1234"'), ("X-Repo-Commit", "c" * 40)):
            self.send_header(name, str(value))
        self.end_headers()
        return body

    def do_HEAD(self):
        self.answer(Path(tokenizer_path()).read_bytes())

    def do_GET(self):
        is_file = self.path.startswith("/someone/words/resolve/") and self.path.endswith("/tokenizer.json")
        information = json.dumps({"id": "someone/words", "siblings": []}).encode()
        self.wfile.write(self.answer(Path(tokenizer_path()).read_bytes() if is_file else information))

    def log_message(self, *_):
        pass


def load_by_name(name, home, endpoint):
    """In a process of its own, since the package reads its settings once; its output."""
    program = (
        "import sys\n"
        "from mesh_transformer.data.tokenizer import load_tokenizer\n"
        "from mesh_transformer.errors import DataError\n"
        "try: print(load_tokenizer(sys.argv[1]).hash)\n"
        "except DataError as error: print(error)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if not endpoint else {}
    done = subprocess.run(
        [sys.executable, "-c", program, name], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_hub_name_needs_the_network_once(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        assert load_by_name("someone/words", tmp_path, endpoint).strip() == tokenizer().hash
    finally:
        server.shutdown()
        server.server_close()
    assert load_by_name("someone/words", tmp_path, endpoint).strip() == tokenizer().hash


@pytest.mark.parametrize("network", ["unreachable", "switched off"])
def test_hub_name_without_a_network_says_at_once_which_file_is_needed(tmp_path, network):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}" if network == "unreachable" else ""
        began = time.monotonic()
        said = load_by_name("gpt2", tmp_path, endpoint)
    assert time.monotonic() - began < 15, "it gave up at the first refusal, not after half a minute of them"
    assert said.startswith("tokenizer gpt2: no such file or folder here, and the hub did not give its tokenizer")
    assert "give its path" in said and "vocab.json and merges.txt" in said
