"""Reads the settings of a shell script as text: it expands variables and arrays, and never runs anything.

Values that only a shell knows (the output of a command, an argument of the script) keep their text with the `$`.
"""

from __future__ import annotations

import re
import shlex

from forerun.common.errors import ForerunError

_MOST_CHARACTERS = 1 << 20
"""of one expanded text: variables that double themselves grow without end"""
_ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_EXPANSION = re.compile(r"\$\{([A-Za-z_]\w*)(\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(([\w\s+*/-]{1,80})\)\)")
_PRODUCT = re.compile(r"\s*(\d{1,9})\s*([*/+-])\s*(\d{1,9})\s*")
_PLAIN = re.compile(r"[^\s'\"\\\\]+")
_TEST = re.compile(r"\[\[?\s+(.*?)\s+\]\]?", re.DOTALL)


def words_of_script(text: str, place: str) -> list[str]:
    """Returns the words of the command that trains. If there is none, returns those of all variables that hold options.

    Raises ForerunError, which names `place` and the line, for a quotation mark that is not closed.
    """
    variables: dict[str, str] = {}
    commands: list[list[str]] = []
    taken: list[bool] = []
    """whether the branch that is read of each open `if` is the one that runs"""
    done: list[bool] = []
    for line, statement in _statements(text, place):
        if _branch(statement, variables, taken, done) or not all(taken):
            continue
        found = _ASSIGNMENT.fullmatch(statement)
        if found is None:
            commands.append(_words(_expanded(statement, variables, place), f"{place}, line {line}"))
            continue
        name, more, value = found.groups()
        value = _value(_expanded(value, variables, place), f"{place}, line {line}")
        variables[name] = f"{variables.get(name, '')} {value}" if more else value
    training = [words for words in commands if any(word.endswith(".py") for word in words) and _has_options(words)]
    if not training:
        held = [_words(value, place) for value in variables.values() if value.lstrip().startswith("-")]
        training = [[word for words in [*commands, *held] if _has_options(words) for word in words]]
    return training[-1]


def _has_options(words: list[str]) -> bool:
    return any(word.startswith("--") for word in words)


def _statements(text: str, place: str) -> list[tuple[int, str]]:
    """Returns each statement with the line on which it begins, without comments."""
    found: list[tuple[int, str]] = []
    current: list[str] = []
    quote, depth, line, begins, index = "", 0, 1, 1, 0
    while index < len(text):
        char = text[index]
        line += char == "\n"
        if char == "\\" and quote != "'":
            current.append(" " if text[index + 1 : index + 2] == "\n" else text[index : index + 2])
            line += text[index + 1 : index + 2] == "\n"
            index += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (index == 0 or text[index - 1] in " \t\n;("):
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
            continue
        elif char in "()":
            depth = max(0, depth + (1 if char == "(" else -1))
        if char in "\n;" and not quote and not depth:
            if statement := "".join(current).strip():
                found.append((begins, statement))
            current, begins = [], line
        else:
            current.append(char)
        index += 1
    if quote or depth:
        raise ForerunError(f"{place}, line {begins}: a quotation mark or bracket is never closed; is it cut short?")
    if statement := "".join(current).strip():
        found.append((begins, statement))
    return found


def _branch(statement: str, variables: dict[str, str], taken: list[bool], done: list[bool]) -> bool:
    """Follows `if`, `elif`, `else` and `fi`; a test that text alone does not decide counts as false."""
    word, _, rest = statement.partition(" ")
    if word == "then" and rest:
        return False
    if word == "if":
        taken.append(_holds(rest, variables))
        done.append(taken[-1])
    elif word in ("elif", "else") and taken:
        taken[-1] = not done[-1] and (word == "else" or _holds(rest, variables))
        done[-1] = done[-1] or taken[-1]
    elif word == "fi" and taken:
        taken.pop()
        done.pop()
    return word in ("if", "elif", "else", "fi", "then", "do", "done")


def _holds(test: str, variables: dict[str, str]) -> bool:
    """Says whether a test of one comparison, or of several joined by `||`, holds."""
    found = [_compared(part, variables) for part in test.split("||")]
    return any(found)


def _compared(test: str, variables: dict[str, str]) -> bool:
    match = _TEST.fullmatch(test.strip())
    if match is None:
        return False
    try:
        words = shlex.split(_expanded(match.group(1), variables, ""))
    except ValueError:
        return False
    if len(words) == 2 and words[0] in ("-n", "-z") and "$" not in words[1]:
        return bool(words[1]) == (words[0] == "-n")
    if len(words) != 3 or "$" in words[0] + words[2]:
        return False
    left, sign, right = words
    if sign in ("==", "=", "-eq", "!=", "-ne"):
        return (left == right) == (sign in ("==", "=", "-eq"))
    numbers = left.isdecimal() and right.isdecimal() and len(left + right) < 40
    return numbers and {"-gt": int(left) > int(right), "-lt": int(left) < int(right)}.get(sign, False)


def _value(text: str, place: str) -> str:
    """Returns the value of an assignment: the words of an array, or the text between quotation marks."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        words = _words(text[1:-1], place)
        return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def _expanded(text: str, variables: dict[str, str], place: str) -> str:
    """Returns a text in which known variables stand for their values."""

    def replaced(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(4)
        default = match.group(3)
        if name in variables and (variables[name] or default is None):
            return variables[name]
        return match.group(0) if default is None else default.strip("\"'")

    out = _EXPANSION.sub(replaced, text)
    if len(out) > _MOST_CHARACTERS:
        raise ForerunError(f"{place}: a variable expands to more than {_MOST_CHARACTERS:,} characters")
    return _ARITHMETIC.sub(lambda found: _result(found, variables), out)


def _result(match: re.Match[str], variables: dict[str, str]) -> str:
    """Returns the result of two numbers and a sign; everything longer stays as it is written."""
    known = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name.group(), name.group())[:20], match.group(1))
    parts = _PRODUCT.fullmatch(known)
    if parts is None:
        return match.group(0)
    left, sign, right = int(parts.group(1)), parts.group(2), int(parts.group(3))
    if sign == "/":
        return str(left // right) if right else match.group(0)
    return str({"*": left * right, "+": left + right, "-": left - right}[sign])


def _words(text: str, place: str) -> list[str]:
    """Returns the words of a text; a quoted option that has its value beside it is two words."""
    try:
        words = shlex.split(text)
    except ValueError:
        raise ForerunError(f"{place}: a quotation mark is never closed; is it cut short?") from None
    return [part for word in words for part in (word.split() if word.startswith("-") else [word]) if part]
