"""What `forerun experiment run` is to run: a file or preset as its argument, or by one of the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.answers.experiment.description.examples import examples
from forerun.answers.experiment.description.read import preset_path
from forerun.common.errors import ForerunError

SCALES = (1, 2, 4, 8, 16)
"""of --scaling without --nodes"""
_SCALED = "medium"
"""the preset of --scaling without an experiment"""


@dataclass(frozen=True)
class Chosen:
    """An experiment, and which study of it."""

    source: str
    """a file, or a preset's name"""
    shipped: Path | None = None
    """the file, where it comes with Forerun"""
    nodes: tuple[int, ...] = ()
    """scales of a scaling study"""
    patterns: tuple[str, ...] = ()
    """communication patterns to compare"""


def chosen(
    source: str | None,
    preset: str | None,
    config: Path | None,
    example: int | None,
    scaling: bool,
    nodes: list[int] | None,
) -> Chosen:
    """What the argument and the options name together.

    Raises:
        ForerunError: none or several of them name an experiment; --nodes without --scaling; --scaling with an example
            that is a comparison.
    """
    given = {"FILE|PRESET": source, "--preset": preset, "--config": config, "--example": example}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ForerunError(f"{' and '.join(named)} each name an experiment; give one of them")
    if nodes and not scaling:
        raise ForerunError("--nodes goes with --scaling")
    scales = tuple(nodes or SCALES) if scaling else ()
    if example is not None:
        found = examples()[example]
        if scaling and found.patterns:
            raise ForerunError(f"--example {example} is a comparison; --scaling goes with the others")
        return Chosen(str(found.path), found.path, scales or found.nodes, found.patterns)
    if not named and scaling:
        preset = _SCALED
    if preset is not None:
        return Chosen(preset, preset_path(preset), scales)
    file = source or config
    if file is None:
        raise ForerunError("no experiment is named; give FILE|PRESET, --preset, --config or --example")
    return Chosen(str(file), nodes=scales)
