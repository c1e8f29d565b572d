"""Digests: equal for equal content, different for different content, in any process."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_requests import request, setup

from forerun.answers.experiment.digest import digest
from forerun.answers.experiment.handlers import EventHandler, on
from forerun.common.content import content
from forerun.core.network.patterns import TimedBy

HERE = Path(__file__).parent


class Counter(EventHandler):
    def __init__(self, start: int) -> None:
        self.start = start
        self.itself = self


def made(seconds: float) -> Any:
    def pattern(size: float, ranks: int) -> float:
        return seconds * size * ranks

    return pattern


def slow(size: float, ranks: int, seconds: float = 1.0) -> float:
    return seconds


def test_equal_requests_have_equal_digests_in_any_process() -> None:
    imports = "from small_requests import request; from forerun.answers.experiment.digest import digest"
    script = f"{imports}; print(digest('x', request()))"
    out = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == digest("x", request())


def test_whatever_a_simulation_depends_on_changes_the_digest() -> None:
    base = setup()
    variants = [
        request(),
        request(n=21),
        request(disturbance={"seed": 1}),
        request(disturbance={"slow_ranks": {1: 2.0}}),
        request(batch_schedule=((1, 4),)),
        request(sample="image"),
        request(handlers=(Counter(1),)),
        request(handlers=(Counter(2),)),
        request(setup(micro_batch=9)),
        request(dataclasses.replace(base, slow_links=1.5)),
        request(dataclasses.replace(base, model=dataclasses.replace(base.model, ffn_hidden=2049))),
        request(dataclasses.replace(base, pattern=TimedBy(made(1.0)))),
        request(dataclasses.replace(base, pattern=TimedBy(made(2.0)))),
    ]
    assert len({digest("x", each) for each in variants}) == len(variants)
    assert digest("x", variants[0]) != digest("y", variants[0]) != digest("y", variants[0], 1)


def test_what_is_only_shown_does_not() -> None:
    one, other = request(), dataclasses.replace(request(), name="renamed", echo=("1 Gb/s",), config={"a": 1})
    assert digest("x", one) == digest("x", other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (True, 1),
        (0.1, 0.1 + 2**-56),
        ((1, (2, 3)), (1, 2, 3)),
        ({"a": 1}, {"a": "1"}),
        ({1, 2}, (1, 2)),
        (np.array([1, 2]), np.array([1.0, 2.0])),
        (np.array([1, 2]), np.array([[1, 2]])),
        (functools.partial(slow, 1), functools.partial(slow, 2)),
        (Path("/a"), Path("/b")),
        (Counter(1).on_run_start, Counter(2).on_run_start),
        (on("iteration_end")(slow), on("run_end")(slow)),
        (made(1.0), made(2.0)),
        (Counter, Path),
        (range(3), range(4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_different_things_have_different_content(one: Any, other: Any) -> None:
    assert json.dumps(content(one)) == json.dumps(content(one))
    assert json.dumps(content(one)) != json.dumps(content(other))


def test_the_order_of_mappings_and_sets_is_nothing() -> None:
    assert content({"a": 1, "b": 2}) == content({"b": 2, "a": 1})
    assert content({"x", "y", "z"}) == content({"z", "y", "x"})


def test_ones_own_code_counts_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for number, text in enumerate(("return 1.0", "return 2.0")):
        (tmp_path / f"own{number}.py").write_text(f"def pattern(size, ranks):\n    {text}\n")
        module = __import__(f"own{number}")
        module.pattern.__module__ = "own"
        found.append(content(module.pattern))
    assert found[0][:2] == found[1][:2] == ["own", "pattern"]
    assert found[0] != found[1]
