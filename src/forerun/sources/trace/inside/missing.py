"""Finds the reason of a program's failure: missing packages instead of their consequences, and the first error instead
of a later one that hides it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

_MOST_LETTERS = 200
"""How much of an error's message is shown beside another error."""


def reason(error: BaseException) -> str:
    """Returns why a program failed: the package that is missing, where an import of one led to the error, and the
    error itself."""
    said = f"{type(error).__name__}: {str(error) or _statement(error)}"
    name = _missing(error)
    if name is None or f"'{name}'" in said:
        return said + led_by(error)
    return f"the package {name} is not installed, which led to {said}"


def led_by(error: BaseException) -> str:
    """Returns the error that led to `error`: the one that it is raised `from`, or the one that the program handled when
    it raised it, because the code that cleans up after a failure may fail too. Empty if the message of `error` contains
    it."""
    first, seen = error, {id(error)}
    while (earlier := first.__cause__ or (None if first.__suppress_context__ else first.__context__)) is not None:
        if id(earlier) in seen:
            break
        first = earlier
        seen.add(id(first))
    text = (str(first) or _statement(first)).partition("\n")[0]
    if first is error or text in str(error):
        return ""
    return f", after {type(first).__name__}: {text[:_MOST_LETTERS]}"


def _statement(error: BaseException) -> str:
    """Returns the line of code that raised `error`, which says more than an exception without a message."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def absent(modules: Iterable[str], own: str) -> ModuleNotFoundError | None:
    """Imports `modules`, and returns the first failure to find a package other than `own`, None if there is none.

    A program that tries several modules until one can be imported hides why none could.
    """
    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            if error.name and error.name.partition(".")[0] != own:
                return error
        except ImportError:
            pass
    return None


def _missing(error: BaseException) -> str | None:
    """Returns the package whose import failed first among the causes of `error`, None if all are there."""
    found, seen = None, set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, ModuleNotFoundError) and cause.name and not _is_there(cause.name.partition(".")[0]):
            found = cause.name.partition(".")[0]
        cause = cause.__cause__ or cause.__context__
    return found


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ValueError, ImportError):
        return False
