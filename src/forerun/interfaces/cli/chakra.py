"""`forerun chakra`: check, describe and convert Chakra execution traces."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from forerun.astrasim.chakra.groups import read_comm_groups
from forerun.astrasim.chakra.info import TraceInfo, overall
from forerun.astrasim.chakra.info import info as describe
from forerun.astrasim.chakra.jsonize import convert as convert_trace
from forerun.astrasim.chakra.jsonize import json_lines
from forerun.astrasim.chakra.validate import LISTED
from forerun.astrasim.chakra.validate import validate as check
from forerun.interfaces.cli.exit_codes import FOUND_ERRORS
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json

PIPED_WIDTH = 160
"""width of the output outside a terminal, so that names are not cut"""
_STDOUT = "-"

chakra = typer.Typer(help="Check, describe and convert Chakra execution traces.", rich_markup_mode=None)

Traces = Annotated[
    list[str],
    typer.Argument(metavar="TRACES", help="Prefix of files <prefix>.<rank>.et, a folder, or the files of some ranks."),
]
Ranks = Annotated[int | None, typer.Option(min=1, help="Number of ranks; by default all ranks that have a file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@chakra.command("validate")
def validate(
    traces: Traces,
    comm_groups: Annotated[Path | None, typer.Option(help="JSON file of the communicator groups.")] = None,
    ranks: Ranks = None,
    limit: Annotated[int, typer.Option(min=0, help="Number of findings of each kind to list.")] = LISTED,
    as_json: AsJson = False,
) -> None:
    """Find bad nodes, missing dependencies, cycles, unmatched messages and groups that disagree."""
    groups = None if comm_groups is None else read_comm_groups(comm_groups)
    findings = check(_source(traces), groups, ranks, limit)
    n_errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        print(to_json({"errors": n_errors, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            print(finding)
        print("no problems" if not findings else f"{n_errors} errors, {len(findings) - n_errors} warnings")
    if n_errors:
        raise typer.Exit(FOUND_ERRORS)


@chakra.command("info")
def info(traces: Traces, ranks: Ranks = None, as_json: AsJson = False) -> None:
    """Count nodes, operations and bytes, by rank and over all ranks."""
    by_rank = describe(_source(traces), ranks)
    total = overall(by_rank)
    if as_json:
        rows = [
            {"rank": one.rank, "path": one.path, "metadata": one.metadata, **one.figures.record()} for one in by_rank
        ]
        print(to_json({"ranks": rows, "overall": total.record()}))
        return
    out = console(piped_width=PIPED_WIDTH)
    table = Table("rank", "nodes", "operations", "tensor bytes", "collectives", "messages", "comm bytes", "path nodes")
    for one in by_rank:
        table.add_row(str(one.rank), *_figures(one.figures))
    table.add_section()
    table.add_row("all", *_figures(total))
    out.print(table)
    table = Table("operation", "group", "calls", "bytes")
    for row in total.record()["communication"]:
        table.add_row(row["operation"], row["group"], f"{row['calls']:,}", f"{row['bytes']:,}")
    out.print(table)


@chakra.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(help="Trace file: .et, .jsonl or .json, plain or with .gz or .zst.")],
    target: Annotated[str, typer.Argument(help="File to write; its name gives the format. - prints JSON lines.")],
) -> None:
    """Convert a trace to JSON or back, or compress it."""
    if target == _STDOUT:
        for line in json_lines(source):
            print(line)
    else:
        print(f"{target}: {convert_trace(source, target):,} nodes")


def _source(traces: list[str]) -> str | list[str]:
    return traces[0] if len(traces) == 1 else traces


def _figures(figures: TraceInfo) -> list[str]:
    nodes = figures.nodes
    return [
        f"{nodes.total():,}",
        f"{figures.num_ops:,}",
        f"{figures.tensor_bytes:,}",
        f"{nodes['collective']:,}",
        f"{nodes['send'] + nodes['recv']:,}",
        f"{figures.comm_bytes.total():,}",
        f"{figures.depth:,}",
    ]
