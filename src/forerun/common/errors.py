"""Errors that a user can cause. The command line prints the message as one line and exits with code 2."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

_CLOSE = 3
_MOST_LISTED = 20
_LONGEST_NAME = 200
_LONGEST_MESSAGE = 4000


def bounded(text: str, most: int = _LONGEST_MESSAGE) -> str:
    """Returns `text`, without its middle if it has more than `most` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


class ForerunError(ValueError):
    """Bad input. The message is one line that names the thing, the place and the fix."""


class ImpossibleResult(ForerunError):
    """A result that breaks physics or arithmetic: a bug of Forerun. The message has the numbers to report."""


class UnknownName(ForerunError):
    """An unknown name. The message first suggests similar names, then lists all known names.

    If there are too many of them, the message names `command`, which lists them.
    """

    def __init__(self, what: str, name: str, known: list[str], command: str = "") -> None:
        name = bounded(name, _LONGEST_NAME)
        lower = {k.lower(): k for k in known}
        longer = [k for k in lower if name and k.startswith(name.lower())]
        begins = {k[: len(name)]: k for k in reversed(lower)} if name else {}
        alike = [begins[k] for k in difflib.get_close_matches(name.lower(), begins, _CLOSE)]
        near = [*longer, *difflib.get_close_matches(name.lower(), lower, _CLOSE), *alike]
        close = [lower[k] for k in dict.fromkeys(near)][:_CLOSE]
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        names = f"known: {', '.join(sorted(known))}"
        if command and len(known) > _MOST_LISTED:
            names = f"{command} lists the {len(known)} known ones"
        super().__init__(f"unknown {what} {name!r}; {hint}{names}")


class ImpossiblePlan(ForerunError):
    """A plan that can't run. The message gives the reason."""


@contextmanager
def at(place: str) -> Iterator[None]:
    """Puts `place` before the messages of errors in its block."""
    try:
        yield
    except (ImpossiblePlan, ImpossibleResult) as error:
        raise type(error)(f"{place}: {error}") from None
    except ForerunError as error:
        raise ForerunError(f"{place}: {error}") from None
