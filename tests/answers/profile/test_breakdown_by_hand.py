"""Sums by name and the share of communication beside computation, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.answers.profile import breakdown


def rows(most: int, **times: list[float]) -> list[tuple[Any, ...]]:
    texts = list(times)
    name = np.array([i for i, each in enumerate(times.values()) for _ in each])
    window: Any = SimpleNamespace(
        name=name, dur_us=np.array([time for each in times.values() for time in each]),
        profile=SimpleNamespace(texts=texts),
    )  # fmt: skip
    found = breakdown._by_name(window, np.ones(len(name), np.bool_), most)
    return [(text, *(round(value, 6) for value in values)) for text, *values in found]


def test_few_names_have_a_row_each() -> None:
    assert rows(2, a=[1.0], b=[2.0, 4.0]) == [("b", 6.0, 4.0, 2.0, 1.414214, 3.0), ("a", 1.0, 1.0, 1.0, 0.0, 1.0)]
    assert rows(1, a=[1.0, 2.0, 6.0]) == [("a", 9.0, 6.0, 1.0, 2.645751, 3.0)]
    assert rows(1, a=[1.0, 2.0, 6.0, 7.0]) == [("a", 16.0, 7.0, 1.0, 2.94392, 4.0)]
    assert [row[0] for row in rows(3, b=[1.0], a=[1.0], c=[2.0])] == ["c", "a", "b"]


def test_many_names_are_summed_up_beyond_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "_NAMED_SHARE", 0.5)
    times = {"a": [50.0], "b": [30.0, 10.0], "c": [6.0], "d": [3.0], "e": [1.0]}
    # running sums 50, 90, 96, 99, 100: their middle is that of c, which still has a row
    others = (breakdown._OTHERS, 4.0, 3.0, 1.0, 1.414214, 2.0)
    first = [("a", 50.0, 50.0, 50.0, 0.0, 50.0), ("b", 40.0, 40.0, 40.0, 0.0, 40.0)]
    assert rows(4, **times) == [*first, ("c", 6.0, 6.0, 6.0, 0.0, 6.0), others]
    assert rows(2, **times) == [*first, (breakdown._OTHERS, 10.0, 6.0, 1.0, 2.516611, 3.333333)]


@pytest.mark.parametrize(("shared", "share"), [({}, 0.0), ({3: 2.0, 1: 5.0}, 25.0), ({3: 8.0}, 100.0)])
def test_the_share_of_communication_beside_computation(
    shared: dict[int, float], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakdown, "of_type", lambda window, kind: kind)
    totals = {breakdown.KernelType.COMMUNICATION: 8.0, breakdown.KernelType.COMPUTATION: 100.0}
    monkeypatch.setattr(breakdown, "_union", lambda window, kind: SimpleNamespace(total=lambda: totals[kind]))
    monkeypatch.setattr(breakdown, "shared_times", lambda sets: shared)
    one: Any = SimpleNamespace(rank=3)
    assert breakdown.overlap([one]).rows == [(3, share)]
