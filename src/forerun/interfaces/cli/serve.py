"""`forerun serve`: the planner in the browser, on this machine."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from forerun.common.errors import ForerunError

_NEEDED = ("starlette", "uvicorn")


def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 chooses a free port.")] = 8765,
    host: Annotated[
        str,
        typer.Option(
            help="Address on which the server listens. With any other than 127.0.0.1, other machines can reach the"
            " page."
        ),
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    demo: Annotated[bool, typer.Option("--demo", help="Open an example question that is already answered.")] = False,
) -> None:
    """Open the planner in the browser. It runs on this machine and works offline.

    The server listens on this machine only. It prints an address with a token, and refuses requests without this
    token. Ctrl-C stops it.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ForerunError(f"serve: {' and '.join(missing)} missing; pip install 'forerun[serve]'")
    import_module("forerun.interfaces.serve.server").serve(host, port, browser, demo)
