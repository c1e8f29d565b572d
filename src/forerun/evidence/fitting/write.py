"""Writes fitted constants into their files: rates of stacks and attention kernels, clocks of devices.

Only the values and their stated origins change, so that the diff of a file shows what a fit changed. The fit's
uncertainty has a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from forerun.common.files import read_text, whole_file
from forerun.evidence.fitting.constants import OF_KERNELS
from forerun.evidence.fitting.fit import FittedConstant
from forerun.evidence.fitting.posterior import FILE as POSTERIOR
from forerun.evidence.fitting.posterior import Posterior
from forerun.evidence.fitting.yaml_text import with_value

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
    for path in changed:
        with whole_file(path) as out:
            out.write(new[path].encode())
    return changed


def _changes(fitted: FittedConstant) -> Iterable[_Change]:
    constant, value = fitted.constant, f"{fitted.value:g}"
    for name in constant.of:
        if constant.what == "sustained":
            document = "sustained" if fitted.rows_of[name] else "sustained_kin"
            yield f"{DEVICES}/{name}.yaml", ("sustained",), value
            yield f"{DEVICES}/{name}.yaml", ("source", "sustained"), document
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
