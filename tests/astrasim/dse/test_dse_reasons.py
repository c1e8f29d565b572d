"""What a point's time and memory consist of, and the sentences on why one point is slower than another."""

import json
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from dse_files import changed, write

from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.dse import reasons as reasons_of
from forerun.astrasim.dse.definition import read_exploration
from forerun.astrasim.dse.evaluate import figures_of
from forerun.astrasim.dse.explore import evaluator_of, explore
from forerun.astrasim.dse.reasons import Change, reasons
from forerun.astrasim.dse.space import AXES, Point
from forerun.astrasim.dse.terms import Communication, Terms
from forerun.astrasim.dse.workload import Strategy
from forerun.common.workers import Workers
from forerun.interfaces.report.exploration import reason_record, reason_words, strategy_words

LIMITED = [("memory_limit", "0.004 GB"), ("plan.pp", [1, 2])]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """All strategies of the small transformer, with pipelines and a limit that not all meet."""
    folder = tmp_path_factory.mktemp("reasons")
    return explore(read_exploration(write(folder, changed(*LIMITED))), folder / "out", Workers(1)).pairs[0]


def test_the_terms_add_up_to_the_time_and_to_the_memory(pair):
    assert len(pair.ranked) > 40
    for row in pair.ranked:
        figures, terms = row.figures, row.figures.terms
        exposed = sum(one.exposed_ns for one in terms.communication)
        assert terms.compute_ns + exposed + terms.idle_ns == figures.time_ns
        assert exposed + terms.idle_ns == figures.exposed_communication_ns
        assert terms.held_bytes + terms.made_bytes == figures.peak_memory_bytes
        assert min(terms.compute_ns, terms.idle_ns, terms.held_bytes, terms.made_bytes) >= 0
        assert all(one.exposed_ns >= 0 for one in terms.communication)


def test_communication_is_over_the_axes_that_have_several_ranks(pair):
    for row in pair.ranked:
        split = row.point.strategy
        several = {axis for axis in ("dp", "tp", "sp", "pp") if getattr(split, axis) > 1}
        assert {one.axis for one in row.figures.terms.communication} == several


def exposed_by_hand(replayed, rank):
    """ns in which a rank does not compute, by what is under way; every ns on its own."""
    actor = replayed.actor_of_rank[rank]
    lowered = replayed.traces[actor]
    kinds = lowered.trace.kind[lowered.row].tolist()
    result, rows = replayed.run.result, replayed.rows(actor)
    spans = [*zip(kinds, result.start_ns[rows].tolist(), result.end_ns[rows].tolist(), strict=True)]
    found = dict.fromkeys(("queued", "receive", "idle"), 0)
    ticks = sorted({0, *(tick for _, start, end in spans for tick in (start, end))})
    for low, high in pairwise(ticks):
        busy = {kind for kind, start, end in spans if start <= low and high <= end}
        if NodeKind.COMP in busy:
            continue
        what = "queued" if busy & {NodeKind.COLLECTIVE, NodeKind.SEND} else "receive" if busy else "idle"
        found[what] += high - low
    return found


@pytest.mark.parametrize("strategy", [Strategy(2, 2, 2), Strategy(2, 2, 1, 2), Strategy(2, 1, 1, 4, 1, True, True)])
def test_exposed_communication_is_what_a_walk_over_the_time_line_finds(tmp_path, strategy):
    exploration = read_exploration(write(tmp_path, changed()))
    replayed = evaluator_of(exploration).replay(Point("tiny", "torus", strategy))
    terms = figures_of(replayed, exploration.workloads["tiny"].axes(strategy)).terms
    ends = [rank.wall_cycles_finished for rank in replayed.statistics]
    by_hand = exposed_by_hand(replayed, ends.index(max(ends)))
    received = sum(one.exposed_ns for one in terms.communication if one.kind == "receive")
    assert (received, terms.idle_ns) == (by_hand["receive"], by_hand["idle"])
    assert sum(one.exposed_ns for one in terms.communication) - received == by_hand["queued"]


def test_only_communication_has_calls_and_bytes(pair):
    changes = [change for reason in reasons(pair) for change in reason.changes]
    assert {change.is_communication for change in changes} == {False, True}
    for change in changes:
        assert change.is_communication == (change.calls != (0, 0))
        assert change.is_communication == (change.size_bytes != (0, 0))


def test_changes_add_up_to_the_difference(pair):
    found = reasons(pair)
    varied = {axis for axis in AXES if len({getattr(row.point.strategy, axis) for row in pair.rows}) > 1}
    assert {reason.axis for reason in found} == {*varied, None}
    for reason in found:
        before, after = reason.total
        assert sum(change.by for change in reason.changes) == after - before
        sizes = [abs(change.by) for change in reason.changes]
        assert sizes == sorted(sizes, reverse=True)


def test_an_axis_is_told_from_its_lowest_value_over_the_fastest_to_its_highest(pair):
    fastest = pair.ranked[0]
    for axis in ("dp", "tp", "sp", "pp"):
        told = [reason for reason in reasons(pair) if reason.axis == axis and reason.what == "time"]
        values = sorted({getattr(row.point.strategy, axis) for row in pair.ranked})
        assert getattr(told[0].before.point.strategy, axis) == values[0]
        assert getattr(told[-1].after.point.strategy, axis) == values[-1]
        assert fastest in [row for reason in told for row in (reason.before, reason.after)]


SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def numbers(text):
    """Amounts of time in a sentence, in ns."""
    return [
        float(n.replace(",", "")) * SECONDS[unit] * 1e9 for n, unit in re.findall(r"([+-]?[\d.,]+) (s|ms|us)\b", text)
    ]


def test_the_figures_of_a_sentence_are_those_of_the_points(pair):
    for reason in (one for one in reasons(pair) if one.what == "time"):
        text = reason_words(reason, pair)
        before, after = reason.total
        assert numbers(text)[:2] == pytest.approx([before, after], rel=6e-3)
        assert f"({after / before - 1:+.1%})" in text
        assert (
            f"{strategy_words(reason.before.point.strategy)} -> {strategy_words(reason.after.point.strategy)}" in text
        )
        for change in reason.changes:
            if change.is_communication and change.term in text:
                amount = re.search(re.escape(change.term) + r" ([+-][\d.,]+ \w+) \((\d+) -> (\d+) calls", text)
                assert numbers(amount[1]) == pytest.approx([change.by], rel=6e-3)
                assert (int(amount[2]), int(amount[3])) == change.calls
        communication = sum(change.by for change in reason.changes if change.is_communication)
        said = re.search(r"xposed communication (grows|shrinks) by ([\d.,]+ \w+)", text)
        if said:
            assert (said[1] == "grows") == (communication > 0)
            assert numbers(said[2]) == pytest.approx([abs(communication)], rel=6e-3)
        else:
            assert communication == 0


def test_more_operations_are_explained_by_recomputation(pair):
    (told,) = [one for one in reasons(pair) if one.axis == "activation_recompute" and one.what == "time"]
    text = reason_words(told, pair)
    before, after = told.before.figures.terms, told.after.figures.terms
    assert text.startswith("activation recompute no -> yes: fastest ")
    if after.operations > before.operations:
        assert f"operations {after.operations / before.operations - 1:+.1%}, as activations are computed again" in text


def test_memory_is_told_in_the_unit_of_the_limit(pair):
    told = [one for one in reasons(pair) if one.what == "memory"]
    assert told
    for reason in told:
        text = reason_words(reason, pair).removeprefix("within 0.004 GB: ")
        sizes = [float(size) * 1e9 for size in re.findall(r"([\d.]+) GB", text)]
        assert sizes[:2] == pytest.approx(reason.total, rel=6e-3)
        changes = [size for change in reason.changes for size in (change.before, change.after)]
        assert sizes[2:] == pytest.approx(changes, rel=6e-3)
    assert "GiB" not in " ".join(reason_words(one, pair) for one in told)


def test_records_hold_the_figures_and_the_sentence(pair):
    for reason in reasons(pair):
        record = json.loads(json.dumps(reason_record(reason, pair)))
        assert record["total"] == list(reason.total)
        assert sum(one["after"] - one["before"] for one in record["changes"]) == record["total"][1] - record["total"][0]
        assert record["text"] == reason_words(reason, pair)


def terms(compute_ns, idle_ns, *communication):
    found = tuple(Communication(axis, kind, calls, size, exposed) for kind, axis, calls, size, exposed in communication)
    return SimpleNamespace(terms=Terms(0, compute_ns, found, idle_ns, 5, 7))


def test_communication_of_one_point_alone_is_compared_with_none():
    before = terms(100, 10, ("all-gather", "tp", 8, 2048, 60), ("send", "pp", 3, 64, 30))
    after = terms(100, 25, ("all-gather", "tp", 16, 1024, 90), ("all-to-all", "ep", 2, 32, 40))
    assert reasons_of._ordered(reasons_of._time_changes(before, after)) == (
        Change("all-to-all over ep", 0, 40, (0, 2), (0, 32)),
        Change("all-gather over tp", 60, 90, (8, 16), (2048, 1024)),
        Change("send over pp", 30, 0, (3, 0), (64, 0)),
        Change("idle", 10, 25),
    )
