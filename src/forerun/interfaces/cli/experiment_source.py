"""Finds the experiment of `forerun experiment run`, by an argument or by one of the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.experiment.description.examples import examples
from forerun.answers.experiment.description.read import preset_path
from forerun.common.errors import ForerunError

SCALES = (1, 2, 4, 8, 16)
"""numbers of nodes of --scaling without --nodes"""
_SCALED = "medium"
"""the preset of --scaling without an experiment"""


@dataclass(frozen=True)
class Chosen:
    """Holds an experiment and the study to run."""

    source: str
    """a file, or a preset's name"""
    shipped: Path | None = None
    """the file, if it comes with Forerun"""
    nodes: tuple[int, ...] = ()
    """scales of a scaling study"""
    patterns: tuple[str, ...] = ()
    """communication patterns to compare"""


EXAMPLES = examples()
_EXAMPLE_WORDS = ", ".join(f"{each.number} {each.title}" for each in EXAMPLES.values())


@dataclass(frozen=True)
class SourceOptions:
    """Holds the options that select an experiment, and those of a scaling study."""

    source: Annotated[
        str | None, typer.Argument(metavar="FILE|PRESET", help="YAML or JSON file, or the name of a preset.")
    ] = None
    preset: Annotated[str | None, typer.Option(help="Name of a preset: small, medium, large or another one.")] = None
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML or JSON file.")] = None
    example: Annotated[
        int | None, typer.Option(min=1, max=len(EXAMPLES), help=f"Number of a shipped example: {_EXAMPLE_WORDS}.")
    ] = None
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Run a scaling study, as `forerun experiment scale` does.")
    ] = False
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, help="With --scaling: node counts to simulate (default: 1 2 4 8 16).")
    ] = None

    def chosen(self) -> Chosen:
        """Returns the experiment that the argument and the options select.

        Raises ForerunError if none or several of them name an experiment, for --nodes without --scaling, and for
        --scaling with an example that is a comparison.
        """
        given = {"FILE|PRESET": self.source, "--preset": self.preset, "--config": self.config}
        named = [name for name, value in (given | {"--example": self.example}).items() if value is not None]
        if len(named) > 1:
            raise ForerunError(f"{' and '.join(named)} each name an experiment; give one of them")
        if self.nodes and not self.scaling:
            raise ForerunError("--nodes goes with --scaling; leave it out, or give --scaling too")
        scales = tuple(self.nodes or SCALES) if self.scaling else ()
        if self.example is not None:
            found = EXAMPLES[self.example]
            if self.scaling and found.patterns:
                raise ForerunError(f"--example {self.example} is a comparison; leave out --scaling")
            return Chosen(str(found.path), found.path, scales or found.nodes, found.patterns)
        preset = _SCALED if not named and self.scaling else self.preset
        if preset is not None:
            return Chosen(preset, preset_path(preset), scales)
        file = self.source or self.config
        if file is None:
            raise ForerunError("no experiment is named; give FILE|PRESET, --preset, --config or --example")
        return Chosen(str(file), nodes=scales)
