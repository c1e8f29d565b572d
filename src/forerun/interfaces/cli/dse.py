"""`forerun dse`: explore a design space."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.astrasim.dse.definition import read_exploration
from forerun.astrasim.dse.explore import explore
from forerun.astrasim.dse.tables import CSV_NAME, PARQUET_NAME, metrics_name, parquet_is_possible
from forerun.common.errors import ForerunError
from forerun.interfaces.cli.exit_codes import NOTHING_FITS
from forerun.interfaces.cli.issue_order_option import Order
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.cli.work_options import WorkOptions
from forerun.interfaces.report.drawing import drawing_is_possible
from forerun.interfaces.report.exploration import exploration_record, print_exploration
from forerun.interfaces.report.pareto_plot import write_pareto_plot
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json

PLOT_NAME = "pareto.png"


@grouped
def dse(
    file: Annotated[
        Path, typer.Argument(help="YAML file with the keys workloads, systems, plan and sampling.", metavar="FILE.yaml")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results; a later run continues from them.")],
    work: WorkOptions,
    points: Annotated[
        Path | None,
        typer.Option(
            help="Points to explore instead of those of the file: keys dp_tp_sp_pp_ar, as text, YAML or JSON."
        ),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(
            help=(
                "ASTRA-sim release whose issue order and group rule to use, such as 2025-03. Overrides that"
                " of the file."
            )
        ),
    ] = None,
    issue_order: Annotated[
        Order | None,
        typer.Option(help="Order in which ready nodes are issued. Overrides that of the release and of the file."),
    ] = None,
    top: Annotated[int, typer.Option(help="Number of best points to show.", min=1)] = 5,
    plot: Annotated[
        bool | None,
        typer.Option(
            "--plot/--no-plot", help="Draw the Pareto front in pareto.png (default: if matplotlib is installed)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Explore a design space: every workload on every system with every strategy, or a sample of them.

    Forerun generates traces as STAGE does and replays them as ASTRA-sim does, without writing them. It skips points
    whose results are in the folder. It exits with code 3 if no point works, or none fits in the memory limit.
    """
    exploration = read_exploration(file, points, release, issue_order.policy if issue_order else None)
    if plot and not drawing_is_possible():
        raise ForerunError("--plot needs matplotlib: pip install 'forerun[plot]'")
    with progress_bar("simulating") as advance:
        explored = explore(exploration, out, work.workers, advance)
    with_plot = drawing_is_possible() if plot is None else plot
    if with_plot:
        write_pareto_plot(out / PLOT_NAME, explored)
    if as_json:
        print(to_json(exploration_record(explored, top)))
    else:
        screen = console()
        print_exploration(screen, explored, top)
        metrics = [metrics_name(pair.workload, pair.system) for pair in explored.pairs]
        written = [CSV_NAME, *metrics, *[PARQUET_NAME] * parquet_is_possible(), *[PLOT_NAME] * with_plot]
        screen.print(f"{out}: {', '.join(written)}", soft_wrap=True)
        if not parquet_is_possible():
            screen.print(f"no {PARQUET_NAME}: pip install 'forerun[data]'")
    if not any(pair.ranked_within_limit for pair in explored.pairs):
        raise typer.Exit(NOTHING_FITS)
