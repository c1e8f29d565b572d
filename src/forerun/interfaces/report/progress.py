"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.working import own_progress

_REFRESH_EVERY = 16
"""predictions between two updates of the progress bar"""


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function (done, total) that moves a progress bar on stderr, if stderr is a terminal.

    The bar has no thread of its own: what it watches may fork.
    """
    err = console(stderr=True)
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=err, transient=True, auto_refresh=False, disable=not err.is_terminal)
    with own_progress(what), bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            if done % _REFRESH_EVERY == 0 or done == total:
                bar.update(task, completed=done, total=total, refresh=True)

        yield advance
