"""A person or a pipe and a model: prompts are read, answered as the text comes, and settings changed in between."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from mesh_transformer.command_line import complain
from mesh_transformer.completion import Completer, Options
from mesh_transformer.errors import ConfigError, MeshTransformerError

STREAMED = 4  # tokens between two looks at what has come
PASTE_SECONDS = 0.05  # lines that are there so soon after one another were pasted, not typed
FENCE = '"""'
HELP = f"""\
A line is a prompt, and so is a pasted block, or the lines between two lines of {FENCE}.
Ctrl-C stops an answer, Ctrl-D ends.
/set NAME VALUE   change a setting, such as /set temp 0.7 or /set stop ["\\n"]; the value off takes it back
/show             all settings
/help             this
/quit             end
A prompt that begins with a slash is typed with two."""


def replaced(options: Options, name: str, value: Any) -> Options:
    """The options with one of them changed, by its own name or the sampler's; None sets the default.

    Raises ConfigError for a name that does not exist or a value that does not fit.
    """
    fields = {field.name: field for field in dataclasses.fields(Options) if field.name != "sampler"}
    if name in fields:
        if value is None:
            default = fields[name].default
            if default is dataclasses.MISSING:
                raise ConfigError(f"{name} cannot be turned off: give it a value")
            value = default
        if name in ("stop", "stop_ids") and isinstance(value, str | int):
            value = [value]
        changed = dataclasses.replace(options, **{name: value})
    else:
        if name == "logit_bias" and isinstance(value, dict):  # JSON has no other keys than strings
            value = {int(key) if str(key).isdigit() else key: number for key, number in value.items()}
        changed = dataclasses.replace(options, sampler={**options.sampler, name: value})
    changed.check()
    return changed


def shown(options: Options) -> str:
    """A line for each setting that is not off."""
    flat = {name: getattr(options, name) for name in (f.name for f in dataclasses.fields(options)) if name != "sampler"}
    flat |= {name: value for name, value in options.sampler.items() if value is not None}
    return "".join(f"{name} {json.dumps(value, ensure_ascii=False)}\n" for name, value in flat.items())


class Conversation:
    """Answers prompt after prompt; one that fails does not end the others. Prompt i draws by seed + i, times `n`."""

    def __init__(self, completer: Completer, options: Options, source: TextIO, out: TextIO, said: TextIO):
        self.completer, self.options = completer, options
        self._source, self._out, self._said = source, out, said

    def run(self) -> None:
        """Until the source ends. A person at a terminal may change settings, and stop an answer with Ctrl-C."""
        if not self._source.isatty():
            for line in self._source:
                self._try(self.answer, line.rstrip("\r\n"))
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  editing and history of the lines typed
        self._said.write("Type a prompt and Enter; /help tells more. Ctrl-C stops an answer, Ctrl-D ends.\n")
        for prompt in self._typed():
            if prompt.startswith("/") and not prompt.startswith("//"):
                if prompt.split()[0] == "/quit":
                    return
                self._try(self.command, prompt)
                continue
            with contextlib.suppress(KeyboardInterrupt):
                self._try(self.answer, prompt.removeprefix("/"))

    def answer(self, prompt: str) -> None:
        """Writes a completion as it comes, or `n` of them one after the other, and ends the line."""
        options = self.options
        self.options = dataclasses.replace(options, seed=options.seed + options.n)
        try:
            if options.n == 1:
                for (part,) in self.completer.stream([prompt], options, chunk=STREAMED):
                    self._write(part.text)
            else:
                for i, found in enumerate(self.completer.complete([prompt] * options.n, options)):
                    self._write(f"{'' if i == 0 else chr(10)}[{i + 1} of {options.n}]\n{found.text}")
        finally:
            self._write("\n")

    def command(self, line: str) -> None:
        """Does what a line that begins with a slash asks for. Raises ConfigError where nobody can."""
        name, _, rest = line[1:].strip().partition(" ")
        if name == "set" and rest.strip():
            setting, _, text = rest.strip().partition(" ")
            if not text.strip():
                raise ConfigError(f"/set {setting} needs a value, such as /set {setting} off")
            self.options = replaced(self.options, setting, _value(text.strip()))
        elif name == "show":
            self._said.write(shown(self.options))
        elif name == "help":
            self._said.write(HELP + "\n")
        else:
            raise ConfigError(f"/{name} is no command: /set NAME VALUE, /show, /help or /quit (// begins a prompt)")

    def _try(self, work: Callable[[str], None], line: str) -> None:
        try:
            work(line)
        except MeshTransformerError as error:
            complain(error)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _typed(self) -> Iterator[str]:
        """What is typed or pasted at a prompt, until Ctrl-D; Ctrl-C drops what was begun."""
        while True:
            try:
                line = input("> ")
                if line.strip() == FENCE:
                    yield "\n".join(iter(lambda: input("... "), FENCE))
                    continue
                lines = [line]
                while self._pasted():
                    lines.append(input())
                yield "\n".join(lines)
            except KeyboardInterrupt:
                self._write("\n")
            except EOFError:
                self._write("\n")
                return

    def _pasted(self) -> bool:
        """Whether more lines are there already. (A terminal that marks pastes gives them as one line with breaks.)"""
        return sys.platform != "win32" and bool(select.select([self._source], [], [], PASTE_SECONDS)[0])


def _value(text: str) -> Any:
    """JSON, or the text as it stands; `off` is None."""
    if text == "off":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
