"""Calls of a timer, and a progress bar, with a clock that the test moves."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest

from forerun.interfaces.report import progress, ticking, working


@pytest.fixture
def timer(monkeypatch):
    """The clock (`now`), what the timer of the process is set to, and whether SIGALRM is anybody's."""

    class Timer:
        now, set_to, handler = 100.0, [], signal.SIG_DFL

        def tick(self, at_s):
            self.now = at_s
            if callable(self.handler):
                self.handler(signal.SIGALRM, None)

    mine = Timer()
    mine.set_to = []
    monkeypatch.setattr(ticking.time, "monotonic", lambda: mine.now)
    monkeypatch.setattr(ticking.signal, "setitimer", lambda which, *seconds: mine.set_to.append((which, *seconds)))
    monkeypatch.setattr(ticking.signal, "signal", lambda number, handler: setattr(mine, "handler", handler))
    monkeypatch.setattr(ticking.signal, "getsignal", lambda number: mine.handler)
    return mine


def test_a_call_is_made_at_its_times_and_no_longer_than_its_block(timer):
    made = []
    with ticking.ticking(lambda: made.append(timer.now), every_s=1.0, first_after_s=2.0):
        for at_s in (101.9, 102.0, 102.9, 103.0, 105.5, 106.4, 106.5):
            timer.tick(at_s)
    assert made == [102.0, 103.0, 105.5, 106.5]
    timer.tick(200.0)
    assert len(made) == 4
    assert timer.set_to == [(signal.ITIMER_REAL, 0.1, 0.1), (signal.ITIMER_REAL, 0.0)]
    assert timer.handler == signal.SIG_DFL


def test_calls_share_one_timer(timer):
    made = []
    with ticking.ticking(lambda: made.append("a"), 1.0, 1.0):
        with ticking.ticking(lambda: made.append("b"), 5.0, 0.0):
            timer.tick(100.0)
            timer.tick(101.0)
        timer.tick(102.0)
        assert len(timer.set_to) == 1
    assert made == ["b", "a", "a"]
    assert len(timer.set_to) == 2


def test_the_timer_stops_where_a_call_raises(timer):
    def ends():
        raise KeyError("x")

    with pytest.raises(KeyError), ticking.ticking(ends, 1.0, 0.0):
        timer.tick(100.0)
    assert timer.handler == signal.SIG_DFL
    assert ticking._calls == []


def test_no_call_is_made_where_a_program_uses_the_signal_itself_or_in_another_thread(timer, monkeypatch):
    assert ticking.can_tick()
    found = []
    other = threading.Thread(target=lambda: found.append(ticking.can_tick()))
    other.start()
    other.join()
    assert found == [False]
    timer.handler = signal.SIG_IGN
    with ticking.ticking(lambda: found.append(True), 1.0, 0.0):
        assert not ticking.can_tick()
        timer.tick(200.0)
    assert (found, timer.set_to) == ([False], [])
    monkeypatch.setattr(ticking, "_ALARM", None)
    timer.handler = signal.SIG_DFL
    assert not ticking.can_tick()


class Terminal:
    def __init__(self, is_terminal):
        self.text, self.is_terminal = [], is_terminal

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.text.append(text)

    def flush(self):
        pass


def test_the_line_of_a_long_command(timer, monkeypatch):
    shown = Terminal(True)
    monkeypatch.setattr(working.sys, "stderr", shown)
    with working.working("plan"):
        timer.tick(101.9)
        assert shown.text == []
        timer.tick(102.5)
        timer.tick(103.4)
        with working.own_progress("search"):
            timer.tick(104.5)
        timer.tick(107.9)
    assert "".join(shown.text) == (
        "\r\033[Kforerun plan has worked for 2 s\r\r\033[Kforerun plan has worked for 7 s\r\r\033[K"
    )
    for is_terminal, until_s in ((True, 109.0), (False, 150.0)):
        quiet = Terminal(is_terminal)
        monkeypatch.setattr(working.sys, "stderr", quiet)
        with working.working("plan"):
            timer.tick(until_s)
        assert quiet.text == []


def test_a_progress_bar_is_drawn_every_sixteen_steps_and_at_the_end(monkeypatch):
    drawn = []

    class Bar:
        def __init__(self, *columns, console, transient, auto_refresh, disable):
            drawn.append((transient, auto_refresh, disable))

        def __enter__(self):
            drawn.append(list(working._silenced))

        def __exit__(self, *_):
            drawn.append("closed")

        def add_task(self, what, total):
            return (what, total)

        def update(self, task, completed, total, refresh):
            drawn.append((task, completed, total, refresh))

    monkeypatch.setattr(progress, "Progress", Bar)
    with progress.progress_bar("searching") as advance:
        for done in range(1, 35):
            advance(done, 34)
    task = ("searching", None)
    assert drawn == [
        (True, False, True), ["searching"], (task, 16, 34, True), (task, 32, 34, True), (task, 34, 34, True), "closed",
    ]  # fmt: skip
    assert working._silenced == []
    drawn.clear()
    with progress.counting_bar("predicting", 3) as one_more:
        one_more("a result")
        one_more()
    task = ("predicting", None)
    assert drawn[2:] == [(task, 1, 3, True), (task, 2, 3, True), "closed"]
    drawn.clear()
    clock = iter([0.0, 0.2, 0.4, 0.7, 0.8, 1.1, 1.3])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress.progress_bar("simulating") as advance:
        for done in range(1, 7):
            advance(done, 9)
    task = ("simulating", None)
    assert drawn[2:] == [(task, 3, 9, True), (task, 6, 9, True), "closed"]  # half a second after the one before
