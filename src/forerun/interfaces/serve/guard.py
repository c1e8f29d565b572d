"""Guard: accepts only requests from this server's page, and sends the page's Content-Security-Policy.

A server on localhost can be reached by every page that the user opens. So the guard checks three things. The Host
header must name this server, because a page of another name may resolve to 127.0.0.1 (DNS rebinding). A request that a
page of another site makes is refused. Every call of the API needs a random token, which only the printed address has.
There are no CORS headers, so that no other page may read an answer.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

API = "/api/"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self';"
    " font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_SAME = frozenset({"same-origin", "none"})


class Guard:
    """An ASGI application around another one, which sees only requests that pass."""

    def __init__(self, app: App, token: str, host: str = "127.0.0.1") -> None:
        """`host` is the address that the server is bound to."""
        self._app, self._token, self._host = app, token, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or refuses it in one line."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await _refuse(*refusal, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Returns the status and the reason for which a request is refused; None for one that passes."""
        host = headers.get("host", "")
        if not self._is_own(host):
            return 421, "this server answers to its own address only; open the address that forerun serve printed"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "a page of another site asked; this server answers its own page only"
        if headers.get("sec-fetch-site", "none") not in _SAME and path.startswith(API):
            return 403, "a page of another site asked; this server answers its own page only"
        if path.startswith(API):
            kind, _, token = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._token.encode()):
                return 401, "the token is missing or wrong; open the address that forerun serve printed"
        return None

    def _is_own(self, header: str) -> bool:
        """Returns whether a Host header names this server.

        Where the server is bound to another address than localhost, any address in digits passes, because a page of
        another site can't have one as its name.
        """
        name = _name_of(header)
        if name in _LOOPBACK or name == self._host:
            return True
        if self._host in _LOOPBACK:
            return False
        return name == socket.gethostname().lower() or _is_address(name)


def _name_of(header: str) -> str:
    """Returns a Host header without its port, in lower case."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _refuse(status: int, why: str, send: Send) -> None:
    body = ('{"error": "' + why + '"}').encode()
    headers = [
        (name.encode(), value.encode()) for name, value in {**HEADERS, "content-type": "application/json"}.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
