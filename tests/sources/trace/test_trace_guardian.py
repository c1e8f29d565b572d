"""What a killed `forerun trace` leaves behind: nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_STUBBORN = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
"""
_PATIENCE_S = 60


def marked(folder: Path) -> list[int]:
    """The processes that belong to a traced run whose files lie under `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if f"FORERUN_TRACE={folder}".encode() in environment:
            found.append(int(entry.name))
    return found


def until(holds) -> bool:
    end = time.monotonic() + _PATIENCE_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_and_no_folder_is_left(number, tmp_path):
    (tmp_path / "stubborn.py").write_text(_STUBBORN)
    place = tmp_path / "tmp"
    place.mkdir()
    words = "from forerun.interfaces.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", words, "trace", "stubborn.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert until(lambda: marked(place)), "the script runs"
    process.send_signal(number)
    process.wait(_PATIENCE_S)
    assert until(lambda: not marked(place))
    assert until(lambda: not list(place.glob("forerun-*")))
