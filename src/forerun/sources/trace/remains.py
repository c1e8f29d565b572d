"""Finds the place in the program at which a traced process died, and ends the processes that it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sysconfig
import time
from pathlib import Path

ASK = signal.SIGUSR1
"""The signal that makes a traced process write where it is."""
MARK = "FORERUN_TRACE"
"""The environment variable of traced processes and of everything that they start."""
_TAIL_BYTES = 65536
"""more than the hundred frames that Python's fault handler writes; the first is the place at which a process died"""
_ANSWER_S = 0.5
_POLL_S = 0.01
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_PACKAGE = str(Path(__file__).parents[2])


def is_users(filename: str) -> bool:
    """Returns whether a file is the user's own rather than part of Python, an installed package, or Forerun."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [os.path.join(path, "") for path in (*paths, _PACKAGE)]
    return not filename.startswith((*installed, "<")) and "site-packages" not in filename


def place(fault: Path) -> str:
    """Returns file and line of the user's program where Python's fault handler last saw it, or ""."""
    found: list[tuple[str, str]] = _FRAME.findall(tail(fault))
    return next((f"{name}:{line}" for name, line in found if is_users(name)), "")


def ask_place(pid: int, fault: Path) -> str:
    """Returns file and line of the user's program where process `pid` is, or "" if it doesn't answer."""
    with contextlib.suppress(OSError):
        os.kill(pid, ASK)
        end = time.monotonic() + _ANSWER_S
        while not place(fault) and time.monotonic() < end:
            time.sleep(_POLL_S)
    return place(fault)


def tail(path: Path) -> str:
    """Returns the end of a text file; "" where it can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def last_words(path: Path) -> str:
    """Returns the last line of an output that is not empty."""
    return next((line for line in reversed(tail(path).splitlines()) if line.strip()), "none")


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process; 0 if the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def end_all(mark: str) -> None:
    """Kills every process whose environment has `mark`, whichever process started it."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
