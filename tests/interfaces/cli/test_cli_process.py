"""The process of the command: its standard output, its locale, its signals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.common.errors import ImpossibleResult
from forerun.interfaces.cli import main
from forerun.interfaces.cli.exit_codes import BUG

FORERUN = [sys.executable, "-c", "from forerun.interfaces.cli.main import main; main()"]


def ran(*arguments, shell="", **variables):
    """The command in a process of its own; `shell` follows it on a line of sh."""
    words = ["sh", "-c", f'exec "$0" "$@" {shell}', *FORERUN, *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(words, capture_output=True, env=environment, check=False)


@pytest.mark.parametrize("shell", [">/dev/full", ">&-"])
def test_output_that_nobody_takes_is_one_line_or_none(shell):
    done = ran("stacks", shell=shell)
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, len(lines)) in ((2, 1), (0, 0))
    assert all(line.startswith("error: standard output: No space left") for line in lines)


def test_a_reader_that_has_enough_is_no_error():
    done = ran("clusters", "--json", shell="| head -c 10")
    assert len(done.stdout) == 10
    assert done.stderr == b""


@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_a_terminal_without_unicode_gets_all_that_is_said(locale):
    done = ran("stacks", **locale)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() or "PYTHONIOENCODING" not in locale
    escaped = ran("models", "\u00e9", **locale)
    assert escaped.returncode == 2
    assert len(escaped.stderr.splitlines()) == 1
    assert json.loads(ran("stacks", "--json", **locale).stdout)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_the_command_in_one_line(number):
    def not_ignored():  # a job in the background of a script, or under nohup, inherits that it ignores signals
        signal.signal(number, signal.SIG_DFL)

    command = [*FORERUN, "collective", "--cases", "-"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=not_ignored)
    maps = Path(f"/proc/{process.pid}/maps")
    while "numpy" not in maps.read_text():
        assert process.poll() is None
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert len(said.splitlines()) == 1
    assert said.startswith(b"error: ")


def test_an_error_that_forerun_should_not_have_met_asks_for_a_report(monkeypatch, capsys):
    def fails(arguments):
        raise KeyError("x" * 10**5)

    monkeypatch.setattr(main, "app_of", fails)
    assert main.run(["stacks"]) == BUG
    said = capsys.readouterr().err
    assert said.startswith("error: a bug of Forerun")
    assert "KeyError" in said
    assert "test_cli_process.py, line" in said
    assert len(said) < 600
    monkeypatch.setenv(main.TRACEBACK, "1")
    with pytest.raises(KeyError):
        main.run(["stacks"])


def test_an_impossible_result_is_no_table(monkeypatch, capsys):
    def fails(arguments):
        raise ImpossibleResult("HFU is 2")

    monkeypatch.setattr(main, "app_of", fails)
    assert main.run(["stacks"]) == BUG
    assert capsys.readouterr().err == "error: HFU is 2\n"
