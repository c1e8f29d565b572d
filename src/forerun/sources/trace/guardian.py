"""Ends the processes of a traced run if the process that started the run is killed and can't clean up itself.

A guardian is a small process with one end of a pipe; the kernel closes the other end however the asking process ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.sources.trace.remains import end_all

_ROUNDS = 3
"""a process may start another while it is being looked for"""


@contextmanager
def guarded(folder: str) -> Iterator[int]:
    """Yields the descriptor of the pipe, which forked processes must close.

    If this process is killed within the block, all processes whose environment has the mark of `folder` end, and the
    folder is removed.
    """
    command = [sys.executable, "-m", __name__, folder]
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert guardian.stdin is not None
    try:
        yield guardian.stdin.fileno()
    finally:
        guardian.kill()
        guardian.stdin.close()
        guardian.wait()


def main() -> None:
    """Waits until standard input ends, and cleans up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = sys.argv[1]
    while os.read(sys.stdin.fileno(), 1):
        pass
    for _ in range(_ROUNDS):
        end_all(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
