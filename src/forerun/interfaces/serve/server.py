"""The server: binds an address, prints it with its token, opens the browser, and runs until Ctrl-C."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import webbrowser

import uvicorn

from forerun.common.errors import ForerunError
from forerun.interfaces.serve.app import application

LOCAL = "127.0.0.1"
_AT_ONCE = 64
"""requests at once"""
_PATIENCE_S = 1
"""seconds that a stopping server waits for answers on their way"""


def serve(host: str, port: int, with_browser: bool, demo: bool) -> None:
    """Serves the page until Ctrl-C.

    Raises ForerunError for an address that can't be bound.
    """
    token = secrets.token_urlsafe(24)
    bound = _bound(host, port)
    config = uvicorn.Config(
        application(token, host),
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=_AT_ONCE,
        timeout_graceful_shutdown=_PATIENCE_S,
    )
    config.load()  # before the address is printed, from when on Ctrl-C is to stop the server
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{bound.getsockname()[1]}/#token={token}{'&demo=1' if demo else ''}"
    if host not in (LOCAL, "localhost", "::1"):
        print(f"warning: {host} can be reached from other machines, and nothing is encrypted", file=sys.stderr)
    print(f"Forerun serves {address}", flush=True)
    print("Ctrl-C stops the server. Anyone who has this address can use it; keep it to yourself.", flush=True)
    if with_browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    try:
        uvicorn.Server(config).run(sockets=[bound])
    except KeyboardInterrupt:  # uvicorn has stopped, and passes the signal on
        pass
    finally:
        bound.close()
    print("stopped", flush=True)


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket at the address; port 0 takes a free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ForerunError(f"--host {host} --port {port}: can't be served: {reason}; give another port") from None
    return made
