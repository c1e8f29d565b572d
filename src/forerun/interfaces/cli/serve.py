"""`forerun serve`: the planner in the browser, on this machine."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from forerun.common.errors import ForerunError

_NEEDED = ("starlette", "uvicorn")


def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 takes a free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to serve. With another one than 127.0.0.1, other machines can reach the page.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    demo: Annotated[bool, typer.Option("--demo", help="Open with an example question, already answered.")] = False,
) -> None:
    """Plan in the browser: questions, all plans, the chosen plan, on this machine and offline.

    The server listens on this machine alone, and the address that it prints has a token without which it answers
    nothing. Ctrl-C stops it.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ForerunError(f"serve: {' and '.join(missing)} missing; pip install 'forerun[serve]'")
    import_module("forerun.interfaces.serve.server").serve(host, port, browser, demo)
