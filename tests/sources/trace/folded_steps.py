"""Runs a program that traces steps with folding and without it, in a process of its own, and reads what it found."""

import json
import os

import pytest
from warm_process import fork, run_file, wait


def programs(names, usual):
    """The parameters of a test of each program: those of `usual` are slow, the others long."""
    return [pytest.param(n, marks=pytest.mark.slow if n in usual else pytest.mark.long) for n in names]


def steps_of(program, folder, request, usual, every):
    """What `program` found of the programs `usual`, or of `every` one where long tests of `request` run too."""
    out = folder / "steps.json"
    asked = [item for item in request.session.items if item.path == request.path]
    names = every if any(item.get_closest_marker("long") for item in asked) else usual

    def run():
        os.chdir(out.parent)
        run_file(program, out, *names)

    with out.with_suffix(".txt").open("wb") as sink:
        code = wait(fork(run, sink.fileno(), {}), 1200)
    assert code == 0, out.with_suffix(".txt").read_text()[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))
