"""Words the errors that Typer finds in a command line as Forerun words its own."""

import re

_WORDS = (
    (r"^Got unexpected extra arguments? \((.*)\)$", r"unexpected argument \1"),
    (r"^Got unexpected extra argument\(s\) \((.*)\)$", r"unexpected argument \1"),
    (r"\. Did you mean ('[^']*')\?$", r"; did you mean \1?"),
    (r"^Invalid value for '([^']*)': ('.*') is not a valid integer$", r"\1: expected a whole number, got \2"),
    (r"^Invalid value for '([^']*)': ('.*') is not a valid float$", r"\1: expected a number, got \2"),
    (r" \(Possible options: ([^)]*)\)$", r"; similar options: \1"),
)
_TYPES = {
    "valid integer": "whole number",
    "valid number": "number",
    "valid boolean": "truth value, true or false",
}
"""words of pydantic, with which newer versions of Typer check values, and ours"""

_SHOULD, _OWN = "Input should be ", "Value error, "
"""beginnings of pydantic's messages: of its own checks, and of an error that a function of ours raised"""


def usage_line(error: Exception) -> str:
    """Returns the line about an error of the command line: the option or argument, the expected value, and the help
    page.

    Versions of Typer differ in their words for a wrong value; some have pydantic's error as the cause.
    """
    where = getattr(getattr(error, "ctx", None), "command_path", "forerun")
    message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    line = _wrong_value(error) or message
    return f"{line}{'' if line.endswith('?') else ';'} see {where} --help"


def _wrong_value(error: Exception) -> str:
    """Returns the line about a value that pydantic refuses, such as `--gpus: expected a whole number, got 'x'`.

    The line is empty for any other error.
    """
    errors = getattr(error.__cause__, "errors", None)
    param = getattr(error, "param", None)
    if errors is None or param is None:
        return ""
    first = errors()[0]
    name = (getattr(param, "opts", None) or [param.name])[-1]
    said = str(first["msg"])
    if said.startswith(_OWN):
        own = said.removeprefix(_OWN)
        return own if own.startswith(name) else f"{name}: {own}"
    if not said.startswith(_SHOULD):
        return ""
    wanted = said.removeprefix(_SHOULD).partition(",")[0]
    for words, ours in _TYPES.items():
        wanted = wanted.replace(words, ours)
    bound = "a number " if wanted.startswith(("less", "greater")) else ""
    return f"{name}: expected {bound}{wanted}, got {first['input']!r}"
