"""The tables of studies: the console and the page say the same of a run."""

import io

import pytest
from results_by_hand import comparison, scaling_study
from rich.console import Console

from forerun.interfaces.report.documents_of_studies import comparison_document, scaling_document
from forerun.interfaces.report.experiment_console import print_comparison, print_scaling
from forerun.interfaces.report.page import Document, Table
from forerun.interfaces.report.study_cells import scale_cells, variant_cells


def page_rows(document: Document) -> list[tuple[str, ...]]:
    """The rows of the largest table."""
    tables = [part for part in document.parts if isinstance(part, Table)]
    return list(max(tables, key=lambda table: len(table.columns)).rows)


def console_lines(show, study) -> list[str]:
    out = io.StringIO()
    show(Console(file=out, width=160), study)
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("study", "document", "show", "cells"),
    [
        (comparison(), comparison_document, print_comparison, [variant_cells(each) for each in comparison().variants]),
        (scaling_study(), scaling_document, print_scaling, [scale_cells(each) for each in scaling_study().points]),
    ],
)
def test_the_console_and_the_page_show_the_same_figures(study, document, show, cells):
    rows, lines = page_rows(document(study)), console_lines(show, study)
    for row, shown in zip(rows, cells, strict=True):
        if shown is None:
            assert any(row[-1] in line for line in lines)
        else:
            assert {cell for cell in shown if cell} <= {cell.removeprefix("$") for cell in row}
            assert any(all(cell in line for cell in shown) for line in lines)


def test_a_variant_shows_its_mean_iteration():
    *running, impossible = map(variant_cells, comparison().variants)
    assert [one.step_time for one in running] == ["100 ms", "110 ms", "200 ms"]
    assert impossible is None
