"""Records, CSV files, HTML tables and what an installation has, by known answers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace as Hand

import numpy as np
import pytest
from printed_lines import crowded, joined, words

from forerun.describe.plan.plan import Plan
from forerun.interfaces.report import doctor
from forerun.interfaces.report.html_table import escaped, left_out_words, table_html
from forerun.interfaces.report.in_notebook import document_html
from forerun.interfaces.report.page import Document, Figures, Text
from forerun.interfaces.report.page import Table as PageTable
from forerun.interfaces.report.records import anchor_record, loop_record, plan_record
from forerun.interfaces.report.terminal import console, printed_text
from forerun.interfaces.report.written import cell, to_json, write_rows, write_table

GIB, MIB = 2**30, 2**20

# -- consoles ----------------------------------------------------------------------------------------------------------


def test_a_console_is_as_wide_as_its_terminal_and_has_a_width_of_its_own_without_one(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert (console().width, console(piped_width=160).width) == (70, 160)
    console(piped_width=40).print("[bold]1.5 of <a>[/bold]", style="bold")
    console(stderr=True).print("to stderr")
    assert capsys.readouterr() == ("[bold]1.5 of <a>[/bold]\n", "to stderr\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert console(piped_width=160).width == 70


@pytest.mark.parametrize("forced", ["", "1"])
def test_text_is_what_a_console_prints_without_its_colours(forced, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", forced)
    assert printed_text(lambda out: out.print("[red]a 1", style="bold red"), 80) == "[red]a 1\n"
    assert printed_text(lambda out: out.print("abcdef"), 3) == "abc\ndef\n"


# -- what is written ---------------------------------------------------------------------------------------------------


def test_records_of_plans_and_loops():
    plan = Plan(1024, activation_checkpointing="selective", recompute_modules=("mlp",))
    assert plan_record(plan)["recompute_modules"] == ["mlp"]
    assert set(plan_record(plan)) == set(Plan.__dataclass_fields__)
    assert anchor_record(None, 2.5) == {"step_time_s": 2.5}
    found = anchor_record(plan, 2.5)
    assert (found["seq_len"], found["step_time_s"]) == (1024, 2.5)
    assert None not in found.values()

    @dataclass
    class Stall:
        name: str
        mean_s: float

    loop = Hand(
        step_time_s=2.0, mean_step_time_s=2.5, tokens_per_s_per_gpu=3.0, stalls=[Stall("x", 0.5)], checkpoint=None
    )
    assert loop_record(loop) == {
        "mean_step_time_s": 2.5, "tokens_per_s_per_gpu": 3.0, "checkpoint": None,
        "stalls": [{"name": "x", "mean_s": 0.5, "share_of_step": 0.25}],
    }  # fmt: skip
    loop.checkpoint = Stall("saved", 1.0)
    assert loop_record(loop)["checkpoint"] == {"name": "saved", "mean_s": 1.0}


def test_cells_of_files(tmp_path):
    assert [cell(value) for value in (None, True, False, 0, 1, (2, "a"), "x", 0.5)] == [
        "", "yes", "no", 0, 1, "2 a", "x", 0.5,
    ]  # fmt: skip
    write_rows(tmp_path / "rows.csv", [{"a": True, "b": None}, {"a": 1, "b": (1, 2)}])
    assert (tmp_path / "rows.csv").read_text() == "a,b\nyes,\n1,1 2\n"
    write_rows(tmp_path / "none.csv", [])
    assert (tmp_path / "none.csv").read_text() == "rank\n"
    write_table(tmp_path / "table.csv", ("a", "b"), [(math.nan, 0.0), ("x", 2)])
    assert (tmp_path / "table.csv").read_text() == "a,b\n,0.0\nx,2\n"
    assert json.loads(to_json({"a": 1})) == {"schema_version": 1, "a": 1}
    assert to_json({"a": 1}).splitlines()[1] == '  "schema_version": 1,'
    with pytest.raises(ValueError, match="Out of range"):
        to_json({"a": math.nan})


def test_a_table_in_html():
    part = PageTable(
        ("<a>", "b"), (("1", '"2"'), ("3", "4"), ("5", "6")), numeric=frozenset({1}), caption="all", most=2
    )
    assert table_html(part) == (
        '<table>\n<caption>all</caption><thead><tr><th scope="col">&lt;a&gt;</th><th scope="col" class="number">b</th>'
        '</tr></thead>\n<tbody>\n<tr><td>1</td><td class="number">&quot;2&quot;</td></tr>\n'
        '<tr><td>3</td><td class="number">4</td></tr>\n</tbody></table>'
    )
    assert left_out_words(part) == "The first 2 of 3 rows."
    assert (left_out_words(replace(part, most=3)), "<caption>" in table_html(replace(part, caption=""))) == ("", False)
    assert escaped("<'&\">") == "&lt;&#x27;&amp;&quot;&gt;"


def test_a_page_in_a_notebook_has_its_first_figures_and_its_first_table():
    table = PageTable(("a", "b"), (("1", "2"), ("3", "4")), numeric=frozenset({1}), most=1)
    figures = Figures((("MFU", "40 %", "high"),))
    parts = (Text("hello"), table, figures, replace(table, columns=("c", "d")), figures)
    shown = document_html(Document("T<", "S", parts))
    number = 'style="text-align: right"'
    assert shown.splitlines()[:2] == ['<div role="group" aria-label="T&lt;">', "<p><strong>T&lt;</strong>"]
    assert "<br>S</p>" in shown
    assert (shown.count("<table>"), "hello" in shown, ">c<" in shown) == (2, False, False)
    assert f"<td>MFU</td><td {number}>40 %</td><td>high</td>" in shown
    assert shown.index("MFU") < shown.index(">a<")
    assert "<p>The first 1 of 2 rows.</p>" in shown
    assert (
        document_html(Document("T", "", ())) == '<div role="group" aria-label="T">\n<p><strong>T</strong>\n</p>\n</div>'
    )


# -- the installation --------------------------------------------------------------------------------------------------

NEEDS = [
    "numpy>=1",
    'matplotlib>=3; extra == "plot"',
    "torch>=2.1,<2.14; extra == 'trace'",
    'pandas; extra == "data"',
    'pyarrow>2; extra == "data"',
    "pytest; extra == 'test'",
]


def test_packages_of_each_extra():
    assert doctor.needed_by_extras(NEEDS) == {
        "plot": ["matplotlib"], "trace": ["torch"], "data": ["pandas", "pyarrow"], "test": ["pytest"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("release", "good"),
    [("2.1", True), ("2.0.9", False), ("2.13.1+cpu", True), ("2.14.0", False), ("3.1", False), ("nightly", False)],
)
def test_releases_of_torch_that_are_supported(release, good, monkeypatch):
    assert doctor.supports(release, NEEDS) == good
    monkeypatch.setattr(doctor, "_version", lambda package: release)
    found = doctor._torch(NEEDS)
    no = "" if good else "not "
    assert found.found == f"torch {release} is {no}supported (from 2.1 to before 2.14)"
    assert (found.good, bool(found.fix)) == (good, not good)


def test_what_an_installation_lacks(monkeypatch):
    monkeypatch.setattr(doctor, "_version", {"pandas": "2.0", "pyarrow": "9", "numpy": "1"}.get)
    monkeypatch.setattr(doctor, "library", lambda: None)
    data, plot, trace = sorted(doctor._extras(NEEDS), key=lambda one: one.what)
    assert (data.what, data.found, data.good) == (
        "extra data", "tables (to_dataframe), Parquet: pandas 2.0, pyarrow 9", True,
    )  # fmt: skip
    assert (plot.found, plot.good, plot.fix) == (
        "pictures and pages: no matplotlib", False, "pip install 'forerun[plot]'",
    )  # fmt: skip
    assert trace.what == "extra trace"
    assert doctor._torch(NEEDS).found == "no torch; from 2.1 to before 2.14 is supported"
    assert doctor._compiled().good is False
    findings = [data, plot]
    assert words(doctor.print_doctor, findings) == joined([
        ["What this installation has"], ["what", "found"], ["extra data", data.found], ["!", "extra plot", plot.found],
        ["What is missing, and the command that installs it"], ["extra plot: pip install 'forerun[plot]'"],
    ])  # fmt: skip
    assert crowded(doctor.print_doctor, findings) == []
    assert len(words(doctor.print_doctor, [data])) == 3
    assert doctor.doctor_record([data])["findings"][0]["what"] == "extra data"
    monkeypatch.setattr(doctor, "library", lambda: "here")
    assert doctor._compiled() == doctor.Finding("compiled functions", "came with the package")


def test_room_of_caches(tmp_path, monkeypatch):
    (tmp_path / "a/config.json").parent.mkdir()
    (tmp_path / "a/config.json").write_bytes(bytes(3 * MIB))
    (tmp_path / "a/other").write_bytes(bytes(MIB))
    assert (doctor._size(tmp_path, "config.json"), doctor._size(tmp_path)) == ("3.0 MiB", "4.0 MiB")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "hub_folder", lambda: tmp_path / "none")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Hand(free=1536 * MIB))
    kernels, hub, room = doctor._folders()
    assert (kernels.found, hub.found) == (f"4.0 MiB in {tmp_path}", f"none in {tmp_path / 'none'}")
    assert room.found == "1.5 GiB here, 1.5 GiB for temporary files"
    monkeypatch.setattr(doctor, "hub_folder", lambda: tmp_path)
    assert doctor._folders()[1].found == f"3.0 MiB in {tmp_path}"
    assert np.all([one.good for one in doctor._folders()])
