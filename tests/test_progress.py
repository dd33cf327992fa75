"""How long pieces of work show how far they are."""

import io
import re

import pytest

from mesh_transformer.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


def read_all(out, total, seconds, amount=5_000_000):
    """Work of `amount` a second on a clock of its own; returns what was shown."""
    now = [0.0]
    with Progress("reading", total, unit="MB", scale=1e6, stream=out, clock=lambda: now[0]) as stage:
        for second in range(seconds):
            now[0] = float(second + 1)
            stage.advance(amount)
        stage.finish()
    return out.getvalue()


def test_lines_where_there_is_no_terminal():
    text = read_all(io.StringIO(), 200_000_000, 40)
    assert "\r" not in text
    assert text.splitlines() == [
        "reading 50.0/200.0 MB  25%, 5.00 MB/s, 0:00:30 left",
        "reading 100.0/200.0 MB  50%, 5.00 MB/s, 0:00:20 left",
        "reading 150.0/200.0 MB  75%, 5.00 MB/s, 0:00:10 left",
        "reading 200.0/200.0 MB  100%, 5.00 MB/s, 0:00:00 left",
    ]


def test_a_bar_on_a_terminal():
    text = read_all(Terminal(), 200_000_000, 40)
    assert re.search(r"\r 50% \|.*\| reading 100.0/200.0 MB  50%, 5.00 MB/s, 0:00:20 left", text)
    assert text.count("\n") == 1 and text.endswith("\n")


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_the_end_is_at_100_percent_whatever_the_total_was_thought_to_be(out):
    """Records that are left out, for one, were counted in."""
    assert "reading 195.0/195.0 MB  100%, 5.00 MB/s, 0:00:00 left" in read_all(out, 200_000_000, 39).splitlines()[-1]


def test_what_is_counted_in_ones_has_no_decimals():
    out, now = io.StringIO(), [0.0]
    with Progress("writing train", 3687, unit="records", stream=out, clock=lambda: now[0]) as stage:
        now[0] = 2.0
        stage.advance(3687)
    assert out.getvalue() == "writing train 3687/3687 records  100%, 1,844 records/s, 0:00:00 left\n"


def test_an_error_shows_no_end():
    out = io.StringIO()
    with pytest.raises(ZeroDivisionError), Progress("reading", 10, stream=out) as stage:
        stage.advance(1)
        raise ZeroDivisionError
    assert out.getvalue() == ""


def test_durations():
    assert [duration(s) for s in (0, 61, 3600 * 25)] == ["0:00:00", "0:01:01", "1 d 1:00:00"]
