"""Errors that a user can cause. The command line prints their one line and exits with status 2."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

_CLOSE = 3


class ForerunError(ValueError):
    """Bad input. The message is one line that names the thing, the place and the fix."""


class UnknownName(ForerunError):
    """A name that is not known. The message suggests similar names first, then lists all."""

    def __init__(self, what: str, name: str, known: list[str]) -> None:
        lower = {k.lower(): k for k in known}
        longer = [k for k in lower if name and k.startswith(name.lower())]
        near = [*longer, *difflib.get_close_matches(name.lower(), lower, _CLOSE)]
        close = [lower[k] for k in dict.fromkeys(near)][:_CLOSE]
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        super().__init__(f"unknown {what} {name!r}; {hint}known: {', '.join(sorted(known))}")


class ImpossiblePlan(ForerunError):
    """A plan that can't run. The message gives the reason."""


@contextmanager
def at(place: str) -> Iterator[None]:
    """Begins the messages of errors with `place`."""
    try:
        yield
    except ImpossiblePlan as error:
        raise ImpossiblePlan(f"{place}: {error}") from None
    except ForerunError as error:
        raise ForerunError(f"{place}: {error}") from None
