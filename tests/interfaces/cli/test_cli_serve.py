"""`forerun serve` as a user starts and stops it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_here import run_here
from console_command import COMMAND

from forerun.interfaces.cli import serve


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, and the address that it prints."""
    command = [str(COMMAND), "serve", "--no-browser", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, re.search(r"http://\S+", line).group()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.wait()


def test_the_printed_token_opens_the_server_and_ctrl_c_stops_it() -> None:
    with serving("--demo") as (process, address):
        base, _, state = address.partition("#")
        token = re.search(r"token=([\w-]{32})&demo=1", state).group(1)  # type: ignore[union-attr]
        assert b"<title>Forerun</title>" in urllib.request.urlopen(base, timeout=30).read()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        request = urllib.request.Request(f"{base}api/options", b"{}", headers)
        assert "llama-3.1-8b" in json.load(urllib.request.urlopen(request, timeout=30))["models"]
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
        assert process.returncode == 0
        assert out.splitlines()[-1] == "stopped"
        assert error == ""


def test_it_listens_on_this_machine_only_unless_asked() -> None:
    with serving() as (_, address):
        assert address.startswith("http://127.0.0.1:")
        port = int(address.split(":")[2].split("/")[0])
        own = socket.gethostbyname(socket.gethostname())
        if not own.startswith("127."):
            with pytest.raises(ConnectionRefusedError), socket.create_connection((own, port), timeout=2):
                pass
    with serving("--host", "0.0.0.0") as (process, address):
        process.send_signal(signal.SIGINT)
        assert "can be reached from other machines" in process.communicate(timeout=60)[1]


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_here(tmp_path, "serve", "--no-browser", "--port", port)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --host 127.0.0.1 --port {port}: can't be served")
    assert done.stderr.count("\n") == 1


def test_without_its_libraries_it_names_the_line_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    done = run_here(tmp_path, "serve")
    assert done.returncode == 2
    assert "pip install 'forerun[serve]'" in done.stderr
    assert done.stderr.count("\n") == 1
