"""A progress bar on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.working import own_progress

_REFRESH_EVERY = 16
"""predictions between two updates of the progress bar"""
_REFRESH_AFTER_S = 0.5
"""the bar also moves where fewer predictions than that took so long"""


@contextmanager
def progress_bar(what: str, refresh_every: int = _REFRESH_EVERY) -> Iterator[Callable[[int, int | None], None]]:
    """Yields a function (done, total) that moves a progress bar on stderr, if stderr is a terminal.

    A total of None is not known yet.

    The bar uses no thread, because the watched code may fork.
    """
    err = console(stderr=True)
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=err, transient=True, auto_refresh=False, disable=not err.is_terminal)
    with own_progress(what), bar:
        task, shown_at = bar.add_task(what, total=None), time.monotonic()

        def advance(done: int, total: int | None) -> None:
            nonlocal shown_at
            now = time.monotonic()
            if done % refresh_every == 0 or done == total or now - shown_at > _REFRESH_AFTER_S:
                bar.update(task, completed=done, total=total, refresh=True)
                shown_at = now

        yield advance


@contextmanager
def counting_bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Yields a function that moves such a bar by one each time; it takes any arguments."""
    done = count(1)
    with progress_bar(what, refresh_every=1) as advance:
        yield lambda *_: advance(next(done), total)
