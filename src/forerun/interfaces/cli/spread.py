"""Options that take several values after one name: `--nodes 1 2 4`, as `--nodes 1 --nodes 2 --nodes 4`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand


def spread(arguments: Sequence[str], several: Collection[str]) -> list[str]:
    """`arguments` with the name repeated before each further value of the options in `several`.

    Values go on until the next option; what belongs to the command itself stands before.
    """
    out: list[str] = []
    name = ""
    for argument in arguments:
        if argument.startswith("-"):
            name = argument if argument in several else ""
            out.append(argument)
        elif name and out[-1] != name:
            out += [name, argument]
        else:
            out.append(argument)
    return out


class SpreadCommand(TyperCommand):
    """A command whose list options take several values after one name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments after repeating the name of such options."""
        several = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        return super().parse_args(ctx, spread(args, several))
