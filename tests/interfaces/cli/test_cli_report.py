"""`--report FILE` writes a page of what predict and plan found."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

from console_command import COMMAND
from saved_programs import plan_of, program_of

from forerun.core.program.storage import save
from forerun.interfaces.cli.report_option import typed_command

QUESTION = ("gpt2-small", "--cluster", "h100-sxm", "--seq-len", "1024", "--dp-shard", "8")
SEARCH = ("gpt2-small", "--cluster", "h100-sxm", "--gpus", "8", "--seq-len", "1024", "--global-batch", "32")
SMALL = ("--pp", "1", "--cp", "1", "--top", "3", "--workers", "1")


def headings(page: Path) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page.read_text())


def command_of(page: Path) -> list[str]:
    found = re.search(r"<pre[^>]*>(forerun .*?)</pre>", page.read_text(), re.DOTALL)
    assert found
    return shlex.split(found[1].replace("&#x27;", "'").splitlines()[0])


def test_predict_writes_a_page_whose_command_writes_it_again(forerun, tmp_path):
    plain = forerun("predict", *QUESTION, "--json")
    done = forerun("predict", *QUESTION, "--report", "a b.html", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    page = tmp_path / "a b.html"
    assert {"Bottlenecks", "Critical path", "Timeline of a step", "Memory", "Configuration"} <= set(headings(page))
    assert "plan file (--plan-file)" in page.read_text()
    command = command_of(page)
    assert command == ["forerun", "predict", *QUESTION, "--json"]
    again = subprocess.run([str(COMMAND), *command[1:], "--report=other.html"], cwd=tmp_path, check=False)
    assert again.returncode == 0
    assert (tmp_path / "other.html").read_bytes() == page.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b.html", "other.html"]


def test_a_saved_program_has_a_page_too(forerun, tmp_path):
    save(program_of(plan_of(dp_shard=8)), tmp_path / "tiny.program")
    done = forerun("predict", "--program", "tiny.program", "--cluster", "h100-sxm", "--report", "page.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    assert "a saved program" in text
    assert "What a better machine would gain" in headings(tmp_path / "page.html")


def test_plan_writes_a_page_of_the_search(forerun, tmp_path):
    done = forerun("plan", *SEARCH, *SMALL, "--report", "plan.html", "--json")
    assert done.returncode == 0, done.stderr
    page = tmp_path / "plan.html"
    sections = ["The best plans", "Time and memory of the plans", "The best plan for each pair of values"]
    assert headings(page)[:4] == [*sections, "Why the others were left out"]
    assert "Timeline of a step" in headings(page)
    best = json.loads(done.stdout)["best"]
    assert f"{best['step_time_s'] * 1e3:.1f} ms" in page.read_text()
    assert command_of(page) == ["forerun", "plan", *SEARCH, *SMALL, "--json"]
    again = re.search(r"# the best plan alone\n(forerun predict .*?)</pre>", page.read_text())
    assert again
    predicted = forerun(*shlex.split(again[1])[1:], "--json")
    assert json.loads(predicted.stdout)["step_time_s"] == best["step_time_s"]


def test_a_search_in_which_nothing_fits_has_a_page(forerun, tmp_path):
    done = forerun("plan", *SEARCH, *SMALL, "--memory-limit", "0.9", "--report", "plan.html")
    assert done.returncode == 3, done.stderr
    assert "Nothing fits in memory." in (tmp_path / "plan.html").read_text()


def test_a_ranking_of_programs_has_no_page(forerun):
    done = forerun("plan", "--programs", ".", "--cluster", "h100-sxm", "--report", "a.html")
    assert done.returncode == 2
    assert done.stderr == "error: --report: not with --programs; leave it out\n"


def test_the_command_that_is_told_is_the_one_that_was_typed():
    assert typed_command(["predict", "a b", "--report", "x.html", "--tp", "2"]) == "forerun predict 'a b' --tp 2"
    assert typed_command(["plan", "--report=x", "--report", "--tp"]) == "forerun plan"
    assert typed_command(["experiment", "run", "f", "--out", "d", "--history"]) == "forerun experiment run f --history"
