"""The interactive prompt through a real pseudo-terminal: editing, pasting, settings, and stopping one answer."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from test_device_sample import DEVICES, ROOT, folder, sample  # noqa: F401

from mesh_transformer import conversation
from mesh_transformer.completion import Options
from mesh_transformer.errors import ConfigError

PROMPT = "> "
# The script in a session whose terminal is its own, so that Ctrl-C reaches it as a signal; which a job that runs in the
# background, as tests may, ignores from birth.
OWN_TERMINAL = """
import fcntl, runpy, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_path("device_sample.py", run_name="__main__")
"""


class Terminal:
    """The script under a pseudo-terminal; what it writes is read as a person would see it."""

    def __init__(self, *arguments):
        mine, its = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *arguments], stdin=its, stdout=its, stderr=its, cwd=ROOT,
            start_new_session=True, env=os.environ | {"TERM": "xterm"},
        )  # fmt: skip
        os.close(its)
        self.end, self.text = mine, ""

    def type(self, keys):
        os.write(self.end, keys.encode())

    def wait(self, ending, seconds=120):
        """Reads until what was written since the last call ends with `ending`; returns it without escapes."""
        stop, seen = time.monotonic() + seconds, ""
        while not plain(seen).endswith(ending):
            ready, _, _ = select.select([self.end], [], [], max(0, stop - time.monotonic()))
            assert ready, f"waited for {ending!r}, saw {self.text[-500:] + seen[-2000:]!r}"
            with contextlib.suppress(OSError):
                seen += os.read(self.end, 4096).decode(errors="replace")
        self.text += seen
        return plain(seen)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.end)


def plain(text):
    """Without escapes of the terminal; a carriage return alone goes back, which is not followed."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r\n", "\n").replace("\r", "")


@pytest.fixture
def terminal(folder):  # noqa: F811
    found = Terminal("--config", str(folder / "config.json"), *DEVICES, "--max-tokens", "6", "--seed", "5")
    yield found
    found.close()


def test_a_person_at_a_terminal(terminal, sample):  # noqa: F811
    assert "Ctrl-D ends" in terminal.wait(PROMPT)
    # Edited before it is sent: a letter too many is taken back.
    terminal.type("def x\x7f\n")
    answer = sample("--seed", "5", "--prompt", "def ", "--no-echo")[1]
    assert terminal.wait(PROMPT).endswith(answer + PROMPT)
    # Pasted at once: one prompt, of two lines.
    terminal.type("one\ntwo\n")
    answer = sample("--seed", "6", "--prompt", "one\ntwo", "--no-echo")[1]
    assert terminal.wait(PROMPT).endswith(answer + PROMPT)
    terminal.type("/set temp 0\n")
    terminal.wait(PROMPT)
    terminal.type("/set n 0\n")
    assert "error: n (0) must be an integer of at least 1" in terminal.wait(PROMPT)
    terminal.type("/show\n")
    said = terminal.wait(PROMPT)
    assert "\ntemp 0\n" in said and "\nmax_tokens 6\n" in said and "\nn 1\n" in said
    terminal.type('"""\n')
    terminal.wait("... ")
    terminal.type('a\n"""\n')
    terminal.wait(sample("--greedy", "--prompt", "a", "--no-echo")[1] + PROMPT)
    # An answer that would go on for hours is stopped, and only that.
    terminal.type("/set max_tokens 200000\n")
    terminal.wait(PROMPT)
    terminal.type("long\n")
    terminal.wait("long\n")
    time.sleep(1.0)
    assert terminal.process.poll() is None
    terminal.type("\x03")
    terminal.wait("\n" + PROMPT, 60)
    terminal.type("/set max_tokens 6\n")
    terminal.wait(PROMPT)
    terminal.type("def \n")
    terminal.wait(sample("--greedy", "--prompt", "def ", "--no-echo")[1] + PROMPT)
    # Ctrl-C at the prompt drops the line begun; Ctrl-D ends.
    terminal.type("half\x03")
    terminal.wait("\n" + PROMPT)
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0
    assert "Traceback" not in terminal.text


def test_settings():
    options = Options(5, {"temp": 0.5})
    for name, value, found in (
        ("temp", 0.7, 0.7), ("top_k", 3, 3), ("logit_bias", {"3": 1}, {3: 1}), ("top_k", None, None),
    ):  # fmt: skip
        options = conversation.replaced(options, name, value)
        assert options.sampler[name] == found
    assert conversation.replaced(options, "stop", "x").stop == ["x"]
    assert conversation.replaced(options, "stop_ids", 3).stop_ids == [3]
    assert conversation.replaced(options, "window", None).window == "full"
    assert "temp 0.7\n" in conversation.shown(options) and "top_k" not in conversation.shown(options)
    for name, value, message in (
        ("tmp", 1, "'tmp' is unknown; the nearest is"), ("temp", "hot", "temp"), ("window", "x", "window"),
        ("max_tokens", None, "cannot be turned off"), ("max_tokens", "many", "max_tokens"), ("seed", 1.5, "seed"),
        ("stop", [""], "not empty"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            conversation.replaced(options, name, value)


def test_commands_that_do_not_exist():
    talk = conversation.Conversation(None, Options(5), io.StringIO(), io.StringIO(), io.StringIO())
    for line, message in (("/temp 1", "/temp is no command"), ("/set temp", "needs a value"), ("/set", "no command")):
        with pytest.raises(ConfigError, match=message):
            talk.command(line)
