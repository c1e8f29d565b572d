"""The line that says how long a command has been at work, on a terminal of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

SLOW = """
import time
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report import working
working.FIRST_AFTER_S = 0.2
with working.working("plan"):
    {body}
print("done")
"""


def shown(body: str, terminal: bool = True) -> tuple[str, str]:
    """Returns what a slow command writes to stderr, which is a terminal or a pipe, and to stdout."""
    command = [sys.executable, "-c", SLOW.format(body=body)]
    if not terminal:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stderr, done.stdout
    reader, writer = pty.openpty()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, text=True, check=True)
    os.close(writer)
    written = b""
    while True:
        try:
            part = os.read(reader, 1 << 16)
        except OSError:  # the terminal has no writer any more
            break
        if not part:
            break
        written += part
    os.close(reader)
    return written.decode(), done.stdout


def test_a_long_command_says_that_it_works_and_takes_the_line_back() -> None:
    line, output = shown("time.sleep(0.6)")
    assert "forerun plan has worked for 0 s" in line
    assert line.endswith("\r\033[K")
    assert output == "done\n"


def test_a_short_command_says_nothing() -> None:
    assert shown("pass") == ("", "done\n")


def test_a_pipe_gets_nothing() -> None:
    assert shown("time.sleep(0.6)", terminal=False) == ("", "done\n")


def test_progress_of_the_command_itself_silences_the_line() -> None:
    line, _ = shown("with progress_bar('plans'): time.sleep(0.6)")
    assert "has worked" not in line


@pytest.mark.parametrize("body", ["raise SystemExit(0)", "time.sleep(0.3); raise SystemExit(0)"])
def test_the_timer_ends_with_the_command(body: str) -> None:
    line, output = shown(body)
    assert output == ""
    assert line.count("has worked") == ("sleep" in body)
