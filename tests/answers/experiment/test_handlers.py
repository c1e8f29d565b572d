"""Handlers: code of one's own that sees a run in the order of time, and may change what it meets."""

from __future__ import annotations

from typing import Any

import pytest
from small_requests import request, setup

from forerun.answers.experiment.conditions import Conditions
from forerun.answers.experiment.handlers import EventHandler, NodeEvent, on
from forerun.answers.experiment.request import Request
from forerun.answers.experiment.result import Iteration, RunResult
from forerun.answers.experiment.run import run
from forerun.common.errors import ForerunError, UnknownName


class Throttling(EventHandler):
    """Rank 3 gets hot and slows down."""

    def on_iteration_start(self, iteration: int, conditions: Conditions) -> Conditions | None:
        return conditions.slow(3, 1.2, "rank 3 throttles") if iteration >= 50 else None


class Diary(EventHandler):
    """Writes down everything."""

    def __init__(self, of: tuple[int, ...] = ()) -> None:
        self.of = of
        self.kinds: list[str] = []
        self.iterations: list[Iteration] = []
        self.events: list[NodeEvent] = []
        self.conditions: list[Conditions] = []

    def on_run_start(self, request: Request) -> None:
        self.kinds.append("run starts")

    def on_iteration_start(self, iteration: int, conditions: Conditions) -> None:
        self.kinds.append(f"{iteration} starts")
        self.conditions.append(conditions)

    def wants_events(self, iteration: int) -> bool:
        return iteration in self.of

    def on_event(self, event: NodeEvent) -> None:
        self.events.append(event)

    def on_iteration_end(self, iteration: Iteration) -> None:
        self.kinds.append(f"{iteration.first} ends")
        self.iterations.append(iteration)

    def on_run_end(self, result: RunResult) -> None:
        self.kinds.append(f"run of {len(result.iterations)} ends")


def test_a_handler_changes_conditions_from_an_iteration_on() -> None:
    result = run(request(n=80, handlers=(Throttling(),)))
    before, after = result.iterations
    assert (before.first, before.repeats, before.note) == (0, 50, "")
    assert (after.first, after.repeats, after.note, after.slowest_rank) == (50, 30, "rank 3 throttles", 3)
    assert after.step_time_s == pytest.approx(run(request(disturbance={"slow_ranks": {3: 1.2}})).mean_s)
    assert result.total_s == pytest.approx(50 * before.step_time_s + 30 * after.step_time_s)


def test_a_plain_function_is_told_of_every_iteration() -> None:
    times: list[float] = []

    @on("iteration_end")
    def keep(iteration: Iteration) -> None:
        times.append(iteration.step_time_s)

    result = run(request(n=6, handlers=(keep,), disturbance={"compute_jitter": 0.1}))
    assert times == [each.step_time_s for each in result.iterations]


def test_handlers_are_told_in_the_order_of_time() -> None:
    diary = Diary()
    run(request(n=3, handlers=(diary,)))
    middle = ["0 starts", "0 ends", "1 starts", "1 ends", "2 starts", "2 ends"]
    assert diary.kinds == ["run starts", *middle, "run of 1 ends"]
    starts = [each.start_s for each in diary.iterations]
    assert starts == pytest.approx([n * diary.iterations[0].step_time_s for n in range(3)])


@pytest.mark.parametrize("plan", [{}, {"pp": 2, "dp_replicate": 4, "n_microbatches": 4}], ids=["ddp", "pipeline"])
def test_node_events_come_in_the_order_of_time(plan: dict[str, int]) -> None:
    diary = Diary(of=(1, 2))
    result = run(request(setup(**plan), n=4, handlers=(diary,), disturbance={"compute_jitter": 0.1}))
    times = [event.time_s for event in diary.events]
    assert times == sorted(times)
    assert {event.iteration for event in diary.events} == {1, 2}
    for number in (1, 2):
        iteration = result.iterations[number]
        mine = [event for event in diary.events if event.iteration == number]
        assert min(event.time_s for event in mine) >= iteration.start_s
        assert max(event.time_s for event in mine) <= iteration.start_s + iteration.step_time_s + 1e-12
        assert sum(event.starts for event in mine) * 2 == len(mine) == 2 * len(result.simulation.flat)
    running: dict[tuple[str, str], int] = {}
    for event in diary.events:  # streams run one node at a time
        lane = (event.rank_class, event.stream)
        running[lane] = running.get(lane, 0) + (1 if event.starts else -1)
        assert running[lane] in (0, 1)


def test_a_plain_function_sees_nodes_of_the_first_iteration() -> None:
    names: set[str] = set()
    seen: set[int] = set()

    @on("event")
    def note(event: NodeEvent) -> None:
        names.add(event.name)
        seen.add(event.iteration)

    run(request(n=3, handlers=(note,)))
    assert seen == {0}
    assert any("reduce" in name for name in names)


def test_handlers_see_what_those_before_them_left() -> None:
    diary = Diary()
    run(request(n=1, handlers=(Throttling(), diary)))
    assert diary.conditions[0].note == ""

    @on("iteration_start")
    def slow(iteration: int, conditions: Conditions) -> Conditions:
        return conditions.slow(0, 2.0)

    @on("iteration_start")
    def slower(iteration: int, conditions: Conditions) -> Conditions:
        return conditions.slow(0, 1.5)

    diary = Diary()
    run(request(n=1, handlers=(slow, slower, diary)))
    assert diary.conditions[0].compute.tolist() == [3.0] + [1.0] * 7


def test_each_kind_of_event_reaches_its_function() -> None:
    told: list[Any] = []
    handlers = tuple(
        on(kind)(lambda *arguments, kind=kind: told.append((kind, len(arguments))))
        for kind in ("run_start", "iteration_start", "iteration_end", "run_end")
    )
    run(request(n=1, handlers=handlers))
    assert told == [("run_start", 1), ("iteration_start", 2), ("iteration_end", 1), ("run_end", 1)]


def test_a_subscribed_function_may_still_be_called() -> None:
    @on("run_end")
    def double(number: int) -> int:
        return 2 * number

    assert double(4) == 8


def test_what_is_no_handler() -> None:
    with pytest.raises(ForerunError, match="neither an EventHandler nor a function subscribed"):
        run(request(handlers=(print,)))
    with pytest.raises(UnknownName, match="unknown kind of event 'iteration'"):
        on("iteration")(print)  # type: ignore[arg-type]

    @on("iteration_start")
    def wrong(iteration: int, conditions: Conditions) -> float:
        return 2.0

    with pytest.raises(ForerunError, match="must return None or Conditions of 8 ranks"):
        run(request(handlers=(wrong,)))


def test_who_only_watches_changes_nothing() -> None:
    disturbance = {
        "straggler_probability": 0.02,
        "straggler_slowdown": 1.5,
        "warmup_iterations": 3,
        "warmup_slowdown": 2,
    }
    schedules = {"batch_schedule": ((7, 4), (20, 16)), "seq_len_schedule": ((9, 256),)}
    for each in ({}, disturbance):
        alone, watched = (
            run(request(n=40, disturbance=each, handlers=handlers, **schedules)) for handlers in ((), (EventHandler(),))
        )
        assert watched.iterations == alone.iterations
        assert watched.total_s == alone.total_s


def test_thousands_of_iterations_are_told_and_folded() -> None:
    count = [0]

    @on("iteration_end")
    def add(iteration: Iteration) -> None:
        count[0] += 1

    result = run(request(n=20_000, handlers=(add,)))
    assert count == [20_000]
    assert len(result.iterations) == 1
