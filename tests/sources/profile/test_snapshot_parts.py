"""What an event of a memory snapshot does, where a block comes from, and the modules around a call, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.sources.profile import graph_breaks, memory_snapshot


@pytest.mark.parametrize(
    ("action", "signs"),
    [
        ("alloc", (1, 0)),
        ("free_requested", (-1, 0)),
        ("free_completed", (0, 0)),
        ("segment_alloc", (0, 1)),
        ("segment_map", (0, 1)),
        ("segment_free", (0, -1)),
        ("segment_unmap", (0, -1)),
        ("snapshot", (0, 0)),
        (None, (0, 0)),
    ],
)
def test_what_an_event_does_to_memory(action: str | None, signs: tuple[int, int]) -> None:
    assert memory_snapshot._sign({} if action is None else {"action": action}) == signs


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ([], ""),
        (None, ""),
        ([{}], ":0 "),
        ([{"filename": "/a/b/train.py", "name": "step", "line": 7}], "train.py:7 step"),
        ([{"filename": "/x/site-packages/torch/nn/f.py", "name": "f", "line": 3},
          {"filename": "/a/model.py", "name": "g", "line": 5}, {"filename": "/a/main.py"}], "model.py:5 g"),
        ([{"filename": "/x/site-packages/torch/nn/f.py", "name": "f", "line": 3}], "f.py:3 f"),
    ],
)  # fmt: skip
def test_a_block_comes_from_the_first_line_that_is_not_a_librarys(frames: Any, where: str) -> None:
    found = memory_snapshot._block({"size": 5, "frames": frames}, "p")
    assert (found.size, found.where) == (5, where)


def test_modules_around_a_call_are_those_of_its_thread_that_hold_it() -> None:
    mark = graph_breaks.MODULE
    texts = [
        "call",
        *(f"{mark}{name}" for name in ("outer", "inner", "other thread", "other process", "late", "short")),
    ]
    rows = SimpleNamespace(
        ts_ns=np.array([10, 0, 10, 0, 0, 11, 5]),
        dur_ns=np.array([10, 50, 10, 50, 50, 20, 14]),
        tid=np.array([1, 1, 1, 2, 1, 1, 1]),
        pid=np.array([1, 1, 1, 1, 2, 1, 1]),
        name=np.arange(7),
    )
    step: Any = SimpleNamespace(profile=SimpleNamespace(rows=rows, texts=texts))
    assert graph_breaks._modules_around(step, np.arange(6, 0, -1), 0) == "outer.inner"


def test_the_device_is_idle_until_the_next_work_begins() -> None:
    class Step(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.start_ns)

    step: Any = Step(start_ns=np.array([30, 10, 12, 50]), finish_ns=np.array([40, 25, 20, 55]), before_ns=9)
    assert graph_breaks._idle_before_ns(step).tolist() == [5, 0, 0, 10]
    step.before_ns = 28
    assert graph_breaks._idle_before_ns(step).tolist() == [2, 0, 0, 10]
