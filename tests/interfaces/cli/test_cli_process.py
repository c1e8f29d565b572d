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
from forerun.interfaces.cli.exit_codes import BUG, LIMIT_REACHED
from forerun.interfaces.cli.process import Ended
from forerun.interfaces.cli.process_limits import used_bytes

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


PLAN = ["plan", "llama-3.1-405b", "--cluster=h100-sxm", "--gpus=4096", "--seq-len=8192", "--global-batch=512"]


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (["--time-limit", "1s"], "error: the command took longer than --time-limit 1s; with --store"),
        (["--memory-limit-process", "40MiB"], "error: the command used more memory than --memory-limit-process 40MiB"),
    ],
)
def test_a_limit_ends_the_command_in_one_line_and_leaves_nothing_behind(limit, said, tmp_path):
    before = set(tmp_path.iterdir())
    done = ran(*PLAN, "--csv", str(tmp_path / "plans.csv"), *limit)
    assert done.returncode == LIMIT_REACHED, done.stderr
    assert done.stdout == b""
    assert done.stderr.decode().startswith(said)
    assert len(done.stderr.splitlines()) == 1
    assert set(tmp_path.iterdir()) == before


def test_a_search_that_a_limit_ended_goes_on_from_its_store(tmp_path):
    store = tmp_path / "plans.jsonl"
    words = [word.replace("4096", "256") for word in PLAN] + ["--json"]
    stopped = ran(*words, "--store", str(store), "--time-limit", "3s")
    assert stopped.returncode in (0, LIMIT_REACHED), stopped.stderr
    kept = store.stat().st_size if store.exists() else 0
    again = ran(*words, "--store", str(store))
    assert again.returncode == 0, again.stderr
    assert store.stat().st_size >= kept
    assert json.loads(again.stdout)["best"] == json.loads(ran(*words).stdout)["best"]


def test_limits_that_are_far_change_nothing():
    words = ["collective", "all_reduce", "--topology", "ring:8", "--bytes", "1MiB", "--json"]
    free = ran(*words, "--time-limit", "1h", "--memory-limit-process", "64GiB")
    assert (free.returncode, free.stderr) == (0, b"")
    assert free.stdout == ran(*words).stdout


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (["--time-limit", "0"], "--time-limit 0: expected a time"),
        (["--time-limit", "9" * 400], "expected a time"),
        (["--time-limit", "soon"], "--time-limit soon: expected a time"),
        (["--memory-limit-process", "much"], "expected 64MiB"),
    ],
)
def test_a_limit_that_is_none_is_one_line(limit, said, capsys):
    assert main.run(["collective", "all_reduce", "--topology", "ring:4", *limit]) == main.BAD_INPUT
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_signal_within_a_command_keeps_its_code(monkeypatch, capsys):
    def ends():
        raise Ended(signal.SIGTERM)

    monkeypatch.setattr(main, "_load", lambda name: ends)
    assert main.run(["stacks"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "error: ended by SIGTERM\n"


def test_the_memory_in_use_counts_this_process_and_its_children():
    alone = used_bytes()
    held = bytearray(os.urandom(1 << 20)) * 64
    assert (used_bytes() - alone) / len(held) == pytest.approx(1, abs=0.2)
    script = "held = bytearray(b'x') * (1 << 26); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        with_child = used_bytes()
        child.communicate(b"\n")
    assert with_child - used_bytes() > 1 << 26
