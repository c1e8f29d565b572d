"""Write the man pages of all commands into a folder: python docs/write_man.py build/man

They are made of the texts that --help shows.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import typer

from forerun.common.version import __version__
from forerun.interfaces.cli.main import COMMANDS, app_of


def roff(text: str) -> str:
    """Returns text in which troff reads nothing as a command."""
    plain = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{plain}" if plain[:1] in (".", "'") else plain


def page(name: str, command: Any, parents: tuple[str, ...] = ("forerun",)) -> str:
    """Returns the page of a command."""
    path = (*parents, name) if name else parents
    context = command.make_context(path[-1], [], resilient_parsing=True)
    summary = inspect.cleandoc(command.help or command.short_help or "")
    short = (command.short_help or summary.split(". ")[0]).rstrip(".")
    lines = [f'.TH "{"-".join(path).upper()}" "1" "" "forerun {__version__}" "Forerun"']
    lines += [".SH NAME", f"{roff('-'.join(path))} \\- {roff(short)}", ".SH SYNOPSIS"]
    pieces = " ".join(command.collect_usage_pieces(context))
    lines += [f"\\fB{roff(' '.join(path))}\\fR {roff(pieces)}", ".SH DESCRIPTION"]
    lines += [roff(part) + "\n.PP" for part in summary.split("\n\n")]
    records = [each.get_help_record(context) for each in command.get_params(context)]
    if known := [record for record in records if record]:
        lines.append(".SH OPTIONS")
        for option, says in known:
            lines += [".TP", f"\\fB{roff(option)}\\fR", roff(says)]
    if commands := getattr(command, "commands", {}):
        lines.append(".SH COMMANDS")
        for each, inner in sorted(commands.items()):
            lines += [".TP", f"\\fB{roff(each)}\\fR", roff(inner.short_help or inner.help or "")]
    lines += [".SH EXIT STATUS", "0 on success, 2 on bad input, 3 where nothing fits and the command was to say so."]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Returns every page by the name of its file."""
    root: Any = typer.main.get_command(app_of([]))
    found = {"forerun.1": page("", root)}
    for name in COMMANDS:
        whole: Any = typer.main.get_command(app_of([name]))
        command = whole.commands[name]
        found[f"forerun-{name}.1"] = page(name, command)
        for inner, each in getattr(command, "commands", {}).items():
            found[f"forerun-{name}-{inner}.1"] = page(inner, each, ("forerun", name))
    return found


def main() -> None:
    """Write every page."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"{len(pages())} pages in {folder}; man -l {folder}/forerun.1 shows the first")


if __name__ == "__main__":
    main()
