"""Writes fitted constants into their files: rates of stacks and attention kernels, clocks of devices.

Only the values and their stated origins change, and comments stay, so that the diff of a file shows the changes of a
fit. The fit's uncertainty has a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from forerun.common.admission import read_text
from forerun.common.errors import ForerunError
from forerun.common.files import whole_files
from forerun.evidence.fitting.constants import OF_KERNELS
from forerun.evidence.fitting.fit import FittedConstant
from forerun.evidence.fitting.posterior import FILE as POSTERIOR
from forerun.evidence.fitting.posterior import Posterior

DEVICES = "describe/cluster/devices"
KERNELS = "describe/kernels/attention.yaml"
STACKS = "describe/stacks/frameworks"

_Change = tuple[str, tuple[str, ...], str]
"""file under the package's folder, path of keys, value in YAML's notation"""


def write_constants(
    constants: Iterable[FittedConstant], posterior: Posterior, folder: Path | None = None
) -> list[Path]:
    """Writes `constants` into Forerun's files under `folder` (by default the package's); returns the changed files.

    Raises ForerunError if a file lacks the place of a constant, or cannot be read or written.
    """
    root = Path(str(resources.files("forerun"))) if folder is None else folder
    old: dict[Path, str] = {}
    new: dict[Path, str] = {}
    for fitted in constants:
        for file, keys, value in _changes(fitted):
            path = root / file
            if path not in old:
                old[path] = new[path] = read_text(path)
            new[path] = with_value(new[path], keys, value, str(path))
    path = root / POSTERIOR
    old[path], new[path] = read_text(path), posterior.as_text()
    changed = [path for path in old if new[path] != old[path]]
    with whole_files() as files:
        for path in changed:
            with files.open(path) as out:
                out.write(new[path].encode())
    return changed


def _changes(fitted: FittedConstant) -> Iterable[_Change]:
    constant, value = fitted.constant, f"{fitted.value:g}"
    for name in constant.of:
        if constant.what == "sustained":
            yield f"{DEVICES}/{name}.yaml", ("sustained",), value
        elif constant.what in OF_KERNELS:
            kernel, _, architecture = name.partition(".")
            direction = constant.what.removeprefix("attention_")
            yield KERNELS, (kernel, "rates", architecture, direction), value
        else:
            yield f"{STACKS}/{name}.yaml", (constant.what,), value
            yield f"{STACKS}/{name}.yaml", ("fitted", constant.what), f'"{_origin(fitted, name)}"'


def _origin(fitted: FittedConstant, name: str) -> str:
    how = f"fitted on {fitted.rows} published steps (forerun fit)"
    if fitted.rows_of[name]:
        return how
    if fitted.rows:
        known = next(place for place, rows in fitted.rows_of.items() if rows)
        return f"{known}'s, {how}"
    if fitted.constant.kind is None:
        return f"no published step informs it: {fitted.constant.source}"
    return f"no published step informs it: the value of {fitted.constant.kind} that forerun fit finds"


_SCALAR = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^\s#{}\[\],"'][^#{}\[\],]*?)"""


def with_value(text: str, path: Sequence[str], value: str, place: str) -> str:
    """Returns `text` with the scalar at `path` replaced by `value`, which is in YAML's notation.

    A missing last key goes after the scalars of its mapping, and a missing mapping to the end of the text.

    Raises ForerunError if a key on the way is missing, or the last one holds no scalar. The message names `place` and
    key.
    """
    lines = text.splitlines()
    start, end, pad = 0, len(lines), ""
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        number = _line_of(lines, start, end, pad, key)
        if number is None:
            if not last and depth:
                raise ForerunError(f"{place}: there is no {'.'.join(path[: depth + 1])}")
            at = _first_mapping(lines, start, end, pad) if last else end
            return _text([*lines[:at], *_entry(path[depth:], value, pad), *lines[at:]])
        rest = lines[number].removeprefix(f"{pad}{key}:").strip()
        if last:
            lines[number] = _replaced(lines[number], rf"^({re.escape(pad + key)}:\s+)", value, place, path)
            return _text(lines)
        if rest.startswith("{"):
            inner = path[-1]
            if depth != len(path) - 2:
                raise ForerunError(
                    f"{place}: {'.'.join(path)} is nested too deep in one line; give its mapping a line of its own"
                )
            lines[number] = _replaced(lines[number], rf"^(.*?[{{,]\s*{re.escape(inner)}:\s+)", value, place, path)
            return _text(lines)
        start, end = number + 1, _end_of(lines, number, end, pad)
        pad = _indentation(lines[start]) if start < end else pad + "  "
    raise ForerunError(f"{place}: no key given")


def _line_of(lines: Sequence[str], start: int, end: int, pad: str, key: str) -> int | None:
    return next((i for i in range(start, end) if re.match(rf"{re.escape(pad + key)}:(\s|$)", lines[i])), None)


def _first_mapping(lines: Sequence[str], start: int, end: int, pad: str) -> int:
    """Returns the number of the first line that opens a mapping; `end` where none does."""
    return next((i for i in range(start, end) if re.match(rf"{re.escape(pad)}[^\s#].*:$", lines[i])), end)


def _end_of(lines: Sequence[str], number: int, end: int, pad: str) -> int:
    """Returns the number of the first line after the mapping that line `number` opens, without trailing comments."""
    after = number + 1
    for i in range(number + 1, end):
        if not lines[i].strip() or lines[i].lstrip().startswith("#"):
            continue
        if len(_indentation(lines[i])) <= len(pad):
            break
        after = i + 1
    return after


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _entry(path: Sequence[str], value: str, pad: str) -> list[str]:
    keys = [f"{pad}{'  ' * depth}{key}:" for depth, key in enumerate(path)]
    return [*keys[:-1], f"{keys[-1]} {value}"]


def _replaced(line: str, before: str, value: str, place: str, path: Sequence[str]) -> str:
    found = re.match(before + rf"({_SCALAR})(?=\s*(?:[,}}]|#|$))", line)
    if found is None:
        raise ForerunError(f"{place}: {'.'.join(path)} is missing or not a plain value")
    return f"{found[1]}{value}{line[found.end() :]}"


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
