"""Which of the simulated changes become advice, in which order and in which words; nothing is simulated here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forerun.answers.experiment.advice import advise
from forerun.answers.experiment.advice.advise import Advice, Figures, _Desk, _Trial
from forerun.answers.experiment.advice.change import Candidate
from forerun.answers.experiment.advice.machine import DEVICE


def figures(rate=100.0, gib=70.0, fits=True, tight=False, dollars=None, samples=8, limit=80.0):
    return Figures(1.0, samples, rate, gib, limit, fits, tight, dollars)


def trial(kind="overlap", change=None, caveat="", **given):
    keys = {f"training.{kind}": 1} if change is None else change
    return _Trial(Candidate(kind, f"do {kind}", {kind}, keys, {}, caveat), figures(**given))


def desk(trials=(), memory=0.9, **before):
    request = SimpleNamespace(thresholds=SimpleNamespace(memory=memory), sample="sequence")
    return _Desk(request, figures(**before), list(trials))


def test_of_two_changes_the_faster_the_roomier_or_the_cheaper_is_better():
    assert advise._better("speed", figures(2), figures(1))
    assert not advise._better("speed", figures(1), figures(1))
    assert not advise._better("memory", figures(9, tight=True), figures(1))
    assert advise._better("memory", figures(1), figures(9, tight=True))
    assert advise._better("cost", figures(1, dollars=1.0), figures(9, dollars=2.0))
    assert not advise._better("cost", figures(9, dollars=2.0), figures(1, dollars=2.0))


@pytest.mark.parametrize(
    ("before", "after", "aims"),
    [
        ({}, {"rate": 101.5}, ["speed"]),
        ({}, {"rate": 100.9}, []),
        ({}, {"rate": 200.0, "fits": False}, []),
        ({}, {"rate": 200.0, "tight": True}, []),
        ({"tight": True}, {"rate": 200.0, "tight": True}, ["speed"]),
        ({"fits": False}, {"rate": 1.0}, ["memory"]),
        ({"gib": 75}, {"gib": 66.9}, ["memory"]),
        ({"gib": 75}, {"gib": 67}, []),
        ({"gib": 72}, {"gib": 60}, []),
        ({"gib": 75}, {"gib": 60, "rate": 99.9}, []),
        ({"gib": 75}, {"gib": 60, "rate": 150}, ["speed"]),
        ({"dollars": 10.0}, {"kind": DEVICE, "dollars": 9.8}, ["cost"]),
        ({"dollars": 10.0}, {"kind": DEVICE, "dollars": 9.9}, []),
        ({"dollars": 10.0}, {"kind": DEVICE, "dollars": 9.8, "rate": 150.0}, ["speed", "cost"]),
        ({"dollars": 10.0}, {"dollars": 5.0}, []),
        ({}, {"kind": DEVICE, "dollars": 5.0}, []),
        ({"gib": 75}, {"kind": DEVICE, "gib": 10}, []),
    ],
)
def test_what_a_change_is_good_for(before, after, aims):
    assert list(desk(**before).aims(trial(**after))) == aims


def test_of_each_kind_the_best_is_told_once():
    slow, fast, other = trial(rate=110), trial(rate=120), trial("offload", rate=105)
    both = trial(DEVICE, rate=130, dollars=1.0)
    told = list(
        advise._best_of_kinds(
            desk(), [("speed", slow), ("speed", fast), ("speed", other), ("speed", both), ("cost", both)]
        )
    )
    assert [(aim, one) for aim, one in told] == [("speed", fast), ("speed", other), ("speed", both)]
    first, equal = trial(rate=110), trial(rate=110)
    assert [one for _, one in advise._best_of_kinds(desk(), [("speed", first), ("speed", equal)])] == [first]


def test_a_change_with_an_idle_part_gives_way_to_the_simpler_one():
    part = trial(change={"a": 1}, rate=110)
    for rate, stays in ((110, False), (109, False), (111, True)):
        whole = trial(change={"a": 1, "b": 2}, rate=rate)
        assert (whole in list(advise._plain([part, whole]))) == stays
        assert part in list(advise._plain([part, whole]))
    useless = trial(change={"a": 1}, rate=200, fits=False)
    whole = trial(change={"a": 1, "b": 2}, rate=100)
    assert list(advise._plain([useless, whole])) == [useless, whole]
    twins = [trial(change={"a": 1}, rate=110), trial(change={"a": 1}, rate=110)]
    assert list(advise._plain(twins)) == twins[:1]


def together(trials, after, monkeypatch, others=(), **before):
    """The advice to do several of `trials`; `after` gives the figures of so many changes at once."""
    tried = []

    def simulated(_, candidate):
        tried.append(candidate.setup)
        return after(len(candidate.setup))

    monkeypatch.setattr(advise, "_simulated", simulated)
    monkeypatch.setattr(Candidate, "on", lambda self, setup: setup | self.setup)
    return advise._together(desk([*trials, *others], **before), list(trials)), tried


def test_changes_that_go_together_are_added_while_each_helps(monkeypatch):
    one, two, three = trial("overlap", rate=130), trial("offload", rate=120), trial("batch", rate=110, samples=16)
    found, tried = together([two, three, one], lambda n: figures({2: 150, 3: 900}[n]), monkeypatch)
    assert tried == [{"overlap", "offload"}]  # the batch would change the global batch
    assert (found.kind, found.aim, found.title) == ("all together", "speed", "do overlap; do offload")
    assert found.gain == pytest.approx(0.5)
    assert found.change == {"training.overlap": 1, "training.offload": 1}
    assert found.setup == {"overlap", "offload"}


def test_what_does_not_help_beside_the_others_is_left_out(monkeypatch):
    trials = [trial("overlap", rate=130), trial("offload", rate=120, caveat="slow host"), trial("sharding", rate=110)]
    found, tried = together(trials, lambda n: figures(130.6 if n == 2 else 500), monkeypatch)
    assert (found, len(tried)) == (None, 2)
    found, _ = together(trials, lambda n: figures(130.7 if n == 2 else 130.8), monkeypatch)
    assert found.title == "do overlap; do offload"
    assert (found.caveat, found.text[-11:]) == ("slow host", "; slow host")
    found, _ = together(trials, lambda n: figures(500, tight=True), monkeypatch)
    assert found is None
    found, _ = together(trials, lambda n: figures(500, fits=False), monkeypatch)
    assert found is None
    assert together([], lambda n: figures(500), monkeypatch)[0] is None
    assert together([trial(DEVICE, rate=300)], lambda n: figures(500), monkeypatch)[0] is None


def test_changes_of_one_key_do_not_go_together(monkeypatch):
    trials = [trial("overlap", {"a": 1}, rate=130), trial("offload", {"a": 2}, rate=120)]
    assert together(trials, lambda n: figures(500), monkeypatch) == (None, [])
    gradients = [trial("gradient precision", rate=130), trial("gradient compression", rate=120)]
    assert together(gradients, lambda n: figures(500), monkeypatch) == (None, [])
    least = [trial("overlap", rate=130), trial("offload", rate=100.9)]
    assert together(least, lambda n: figures(500), monkeypatch) == (None, [])


def test_not_more_than_eight_are_tried_beside_the_first(monkeypatch):
    trials = [trial(f"kind {i}", rate=200 - i) for i in range(12)]
    found, tried = together(trials, lambda n: figures(200 + 10 * n), monkeypatch)
    assert len(tried) == 8
    assert len(found.change) == 9


def test_where_a_run_does_not_fit_what_frees_no_memory_may_speed_up_what_does(monkeypatch):
    roomy, tight = trial("offload", rate=90), trial("sharding", rate=95, tight=True)
    useless, device = trial("overlap", rate=140, fits=False), trial(DEVICE, rate=400, fits=False)
    found, tried = together([tight, roomy], lambda n: figures(200), monkeypatch, [useless, device], fits=False)
    assert tried == [{"offload", "overlap"}]
    assert (found.title, found.aim) == ("do offload; do overlap", "memory")


def advice(kind="overlap", aim="speed", gain=0.5, before=None, **after):
    return Advice(kind, aim, "t", "t", {}, before or figures(), figures(**after), gain, "", None)


def test_the_order_of_advice():
    ordered = [
        advice(gain=0.5),
        advice(gain=0.2),
        advice(aim="memory", gain=0.1),
        advice(DEVICE, gain=0.9),
        advice(DEVICE, gain=0.3),
        advice(DEVICE, "cost", dollars=1.0),
        advice(DEVICE, "cost", dollars=2.0),
    ]
    assert sorted([*reversed(ordered)], key=advise._order) == ordered
    lacking = figures(fits=False)
    ordered = [
        advice(aim="memory", gain=0.3, before=lacking),
        advice(aim="memory", gain=0.1, before=lacking),
        advice(aim="memory", gain=0.9, before=lacking, tight=True),
    ]
    assert sorted([*reversed(ordered)], key=advise._order) == ordered


@pytest.mark.parametrize(
    ("before", "aim", "after", "words"),
    [
        ({}, "speed", {"rate": 150}, "50.0% more sequences/s (150 instead of 100)"),
        ({}, "speed", {"rate": 99.5}, "0.5% fewer sequences/s (99.5 instead of 100)"),
        ({}, "speed", {"rate": 200}, "2.0 times the sequences/s (200 instead of 100)"),
        ({}, "memory", {"gib": 50.25}, "50.2 GiB instead of 70.0, 0.0% more sequences/s (100 instead of 100)"),
        ({"fits": False}, "memory", {"gib": 50}, "fits in memory (50.0 of 80.0 GiB), 100 sequences/s"),
        (
            {"fits": False},
            "memory",
            {"gib": 50, "tight": True, "rate": 12345.6},
            "fits in memory, but only just (50.0 of 80.0 GiB), 12,346 sequences/s",
        ),
        (
            {"dollars": 10.0},
            "cost",
            {"dollars": 4.0},
            "$4 instead of $10 for a million sequences, 0.0% more sequences/s (100 instead of 100)",
        ),
        (
            {"dollars": 10.0},
            "speed",
            {"dollars": 4.0, "rate": 150, "limit": 40.0},
            "50.0% more sequences/s (150 instead of 100), $4 instead of $10 for a million sequences",
        ),
        ({"dollars": 10.0}, "speed", {"dollars": 4.0, "rate": 150}, "50.0% more sequences/s (150 instead of 100)"),
        ({}, "speed", {"rate": 150, "limit": 40.0}, "50.0% more sequences/s (150 instead of 100)"),
    ],
)
def test_what_a_change_brings_in_words(before, aim, after, words):
    at = desk(**before)
    found = figures(**after)
    assert advise._brings(at, aim, found, at.gain(found)) == words
