"""What commands print and record of what they found, and what they refuse before any work, by known answers."""

from __future__ import annotations

from types import SimpleNamespace as Hand

import pytest
from command_here import run_here

from forerun.astrasim.astra.hot_links import HotLink
from forerun.common.errors import ForerunError
from forerun.interfaces.cli import astra, cluster, plan_search, predict, run


def test_busiest_links_follow_the_lines_of_a_replay(monkeypatch, capsys):
    monkeypatch.setattr(astra, "output_lines", lambda *_: ["a line", "another"])
    astra._Outcome((), (HotLink(0, 9, 0.25, 1000), HotLink(3, 4, 0.125, 7))).print_lines(None)
    assert capsys.readouterr().out.splitlines() == [
        "a line", "another", "link 0 -> 9: busy 25.0%, 1000 bytes", "link 3 -> 4: busy 12.5%, 7 bytes",
    ]  # fmt: skip


def test_the_record_of_a_replay_leaves_out_what_is_not_known(monkeypatch):
    monkeypatch.setattr(astra, "asdict", lambda one: dict(vars(one)))
    ranks = (Hand(wall_time=5, memory=None), Hand(wall_time=7, memory=0))
    assert astra._Outcome(ranks).record() == {"per_rank": {"0": {"wall_time": 5}, "1": {"wall_time": 7, "memory": 0}}}
    linked = astra._Outcome((), (Hand(source=1),)).record()
    assert linked == {"per_rank": {}, "hottest_links": [{"source": 1}]}


def test_kernels_without_a_time_are_said_or_refused(capsys):
    found = Hand(untimed=1200, kernels=3400, timeline=Hand(end_of_step_ps=1), statistics=("s",))
    assert astra._statistics_of(found) == ("s",)
    assert capsys.readouterr().err.startswith("warning: 1,200 of 3,400 compute nodes have neither duration_micros")
    found.timeline.end_of_step_ps = 0
    with pytest.raises(ForerunError, match=r"1,200 of 3,400 compute nodes .*, and nothing else takes time"):
        astra._statistics_of(found)
    found.untimed = 0
    assert astra._statistics_of(found) == ("s",)
    assert capsys.readouterr().err == ""


def test_options_of_a_replay_that_do_not_go_together():
    how = Hand(hottest=3, semantics=astra.Semantics.STREAMS, order="ascending")
    machine = Hand(aware=False)
    with pytest.raises(ForerunError, match="--hottest: add --backend aware"):
        astra._replayed([], {}, machine, how)
    how.hottest = 0
    for aware, order in ((True, "ascending"), (False, "hashed")):
        machine.aware, how.order = aware, order
        with pytest.raises(ForerunError, match="--semantics streams has neither --backend aware nor the issue order"):
            astra._replayed([], {}, machine, how)


def test_parts_beside_a_step_are_recorded_and_printed_where_they_are_asked_for(monkeypatch):
    printed = []
    for name in ("allocation", "post_training", "compression", "outer_steps"):
        monkeypatch.setattr(predict, f"{name}_record", lambda part, name=name: (name, part))
        monkeypatch.setattr(predict, f"print_{name}", lambda out, part, name=name: printed.append((name, part)))
    whole = predict.Beside("s", "a", "g", "r")
    assert whole.record() == {
        "allocator": ("allocation", "a"), "post_training": ("post_training", "s"),
        "gradient_compression": ("compression", "g"), "outer_steps": ("outer_steps", "r"),
    }  # fmt: skip
    whole.print(None)
    assert printed == [("post_training", "s"), ("allocation", "a"), ("compression", "g"), ("outer_steps", "r")]
    printed.clear()
    predict.Beside().print(None)
    assert printed == []


@pytest.mark.parametrize("command", ["run", "cluster"])
def test_pictures_need_matplotlib_before_any_work(command, monkeypatch):
    for module in (run, cluster):
        monkeypatch.setattr(module, "drawing_is_possible", lambda: False)
    asked = run_here(None, command, "missing.yaml", "--pictures", "folder")
    assert (asked.returncode, "--pictures needs matplotlib" in asked.stderr) == (2, True)
    plain = run_here(None, command, "missing.yaml")
    assert (plain.returncode, "missing.yaml" in plain.stderr, "matplotlib" in plain.stderr) == (2, True, False)


def test_heat_maps_and_pictures_of_a_search_are_checked_first(monkeypatch):
    monkeypatch.setattr(plan_search, "drawing_is_possible", lambda: False)
    plan_search.Shown().check()
    with pytest.raises(ForerunError, match="--pictures needs matplotlib"):
        plan_search.Shown(pictures="folder").check()
