"""The worker and its process, what the planner keeps, and what a search tells, by hand."""

from __future__ import annotations

from types import SimpleNamespace as Hand
from typing import Any

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan
from forerun.interfaces.serve import planner, searching, worker
from forerun.interfaces.serve.question import (
    AboutPlan,
    AboutRows,
    Question,
)
from forerun.interfaces.serve.searching import Answered, Task
from forerun.interfaces.serve.worker import SUPERSEDED, WAITING, Cancelled, Job

OWN = "http://127.0.0.1:8765"
Patch = pytest.MonkeyPatch


# -- the worker --------------------------------------------------------------------------------------------------------


def events(job: Job) -> list[Any]:
    return list(iter(job.next, None))


def job(heard: Any = None, key: tuple[str, str] = ("page", "plans")) -> Job:
    return Job("a task", key, heard or (lambda _: None))


class Pipe:
    """The server's end of the pipe to a process: the messages that come, and those that are sent."""

    def __init__(self, *messages: Any) -> None:
        self.coming, self.sent, self.waits = list(messages), [], []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def poll(self, patience_s: float = 0.0) -> bool:
        self.waits.append(patience_s)
        return bool(self.coming)

    def recv(self) -> Any:
        message = self.coming.pop(0)
        if isinstance(message, Exception):
            raise message
        return message


def process_of(pipe: Pipe) -> Any:
    made = worker._Process.__new__(worker._Process)
    made._ours, made._number = pipe, 0
    made._process = Hand(kill=lambda: pipe.sent.append("killed"), is_alive=lambda: True)
    return made


def test_events_reach_the_page_and_objects_the_server() -> None:
    heard: list[object] = []
    one, pipe = job(heard.append), Pipe({"kind": "space"}, "an object", {"kind": "answer"}, None, "left")
    made = process_of(pipe)
    assert made.do(one) is True
    one.tell(None)
    assert (events(one), heard) == ([{"kind": "space"}, {"kind": "answer"}], ["an object"])
    assert (pipe.sent, pipe.coming) == ([(1, "a task")], ["left"])
    pipe.coming = [None]
    assert made.do(job()) is True
    assert pipe.sent[-1] == (2, "a task")


def test_a_process_that_ends_is_an_error_of_its_job() -> None:
    for error in (EOFError(), OSError()):
        one = job()
        assert process_of(Pipe(error)).do(one) is False
        one.tell(None)
        (event,) = events(one)
        assert (event["kind"], event["message"][:35]) == ("error", "the search ended without an answer;")


def test_a_job_that_is_cancelled_has_a_while_to_end(monkeypatch: Patch) -> None:
    clock = Hand(now=10.0)
    monkeypatch.setattr(worker.time, "monotonic", lambda: clock.now)

    class Slow(Pipe):
        def poll(self, patience_s: float = 0.0) -> bool:
            clock.now += 0.1
            return False

    one, pipe = job(), Slow()
    one.cancel()
    assert process_of(pipe).do(one) is False
    one.tell(None)
    assert (pipe.sent, events(one)) == ([(1, "a task"), (1, None), "killed"], [SUPERSEDED])
    assert clock.now == pytest.approx(10.4)  # asked at 10.0; killed when more than 0.3 s have gone by
    ending, quick = job(), Pipe(SUPERSEDED, None)
    ending.cancel()
    assert process_of(quick).do(ending) is True
    assert quick.sent == [(1, "a task"), (1, None)]


def test_a_newer_job_of_the_same_key_ends_the_one_before() -> None:
    made = worker.Worker.__new__(worker.Worker)
    made._lock, made._open, made._waiting = worker.threading.Lock(), [], worker.queue.SimpleQueue()
    first = made.start("a", ("page", "plans"), lambda _: None)
    other = made.start("b", ("page", "scaling"), lambda _: None)
    newer = made.start("c", ("page", "plans"), lambda _: None)
    assert [each.is_cancelled for each in (first, other, newer)] == [True, False, False]
    for each in (first, other, newer):
        each.tell(None)
    assert [events(each) for each in (first, other, newer)] == [[], [WAITING], [WAITING]]
    assert [made._waiting.get().task for _ in range(3)] == ["a", "b", "c"]
    assert len(made._open) == 3


def test_a_job_that_is_cancelled_while_it_waits_is_not_done(monkeypatch: Patch) -> None:
    asked: list[Any] = []

    class Process:
        def __init__(self, work: Any) -> None:
            self.is_alive = True
            asked.append(work)

        def do(self, one: Job) -> bool:
            asked.append(one.task)
            return False

    monkeypatch.setattr(worker, "_Process", Process)
    made = worker.Worker.__new__(worker.Worker)
    made._work, made._process = "work", None
    gone = job()
    gone.cancel()
    made._do(gone)
    gone.tell(None)
    assert (events(gone), asked) == ([SUPERSEDED], [])
    made._do(job())
    assert (asked, made._process) == (["work", "a task"], None)
    made._do(job())
    assert asked == ["work", "a task"] * 2
    made._process = alive = Process("other")
    alive.do = lambda one: True
    made._do(job())
    assert made._process is alive
    alive.is_alive = False
    made._do(job())
    assert asked[-2:] == ["work", "a task"]


class Asked(Pipe):
    """The end of the process: a task comes when it is asked for, and whatever ends a task while it is done."""

    def poll(self, patience_s: float = 0.0) -> bool:
        return bool(self.coming) and isinstance(self.coming[0], tuple) and self.coming[0][1] is None


def served(*messages: Any, work: Any) -> list[Any]:
    """What the process answers until its pipe is closed."""
    pipe = Asked(*messages, EOFError())
    worker._serve(pipe, work)
    return pipe.sent


def test_a_process_does_its_tasks_until_the_server_has_gone() -> None:
    def work(task: Any, tell: Any, check: Any) -> None:
        tell({"task": task})
        if task == "wrong":
            raise ForerunError("it is\n  wrong")
        if task == "bug":
            raise KeyError(task)

    assert served((1, "a"), (3, "wrong"), (4, "bug"), work=work) == [
        {"task": "a"}, None,
        {"task": "wrong"}, {"kind": "error", "message": "it is wrong"}, None,
        {"task": "bug"}, {"kind": "error", "message": "a bug of Forerun: KeyError; please report what you asked"}, None,
    ]  # fmt: skip
    assert served(work=work) == []
    assert served((9, None), (1, "a"), work=work) == [{"task": "a"}, None]  # ends a task that has ended


def test_a_task_is_ended_by_its_own_number_only() -> None:
    def work(task: Any, tell: Any, check: Any) -> None:
        tell("begins")
        check("any", "arguments")
        tell("ends")

    assert served((1, "a"), (7, None), (2, "b"), (6, None), (2, None), (3, "c"), work=work) == [
        "begins", "ends", None, SUPERSEDED, None, "begins", "ends", None,
    ]  # fmt: skip


def test_a_task_may_end_in_the_middle_and_a_broken_pipe_is_no_fault_of_it() -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise Cancelled

    told: list[Any] = []
    assert worker._fault(lambda task, tell, check: (tell(task), check()), "a", told.append, check) == SUPERSEDED
    assert told == ["a"]

    def broken(*_: Any) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        worker._fault(broken, "a", told.append, lambda: None)


def test_jobs_end_one_after_the_other_whatever_happens_in_them(monkeypatch: Patch) -> None:
    class Process:
        is_alive = True

        def __init__(self, work: Any) -> None:
            self.work = work

        def do(self, one: Job) -> bool:
            if one.task == "bug":
                raise KeyError(one.task)
            one.tell({"done": one.task, "by": self.work})
            return True

    monkeypatch.setattr(worker, "_Process", Process)
    made = worker.Worker("work")
    started = [made.start(task, ("page", task), lambda _: None) for task in ("a", "bug", "c")]
    told = [list(iter(lambda one=one: one._events.get(timeout=30), None)) for one in started]
    assert [[event for event in of_job if event != WAITING] for of_job in told] == [
        [{"done": "a", "by": "work"}],
        [{"kind": "error", "message": "a bug of Forerun: KeyError; please report what you asked"}],
        [{"done": "c", "by": "work"}],
    ]
    assert made._open == []


# -- the planner -------------------------------------------------------------------------------------------------------


def question(gpus: int = 8, **changes: Any) -> Question:
    usual = {"model": "gpt2-small", "cluster": "h100-sxm", "gpus": gpus, "seq_len": 1024, "global_batch": 64}
    return Question(**{**usual, **changes})


@pytest.fixture
def plans(monkeypatch: Patch) -> Any:
    """A planner without a process, whose jobs are (task, key)."""
    monkeypatch.setattr(planner, "Worker", lambda work: Hand(start=lambda task, key, heard: (task, key)))
    return planner.Planner()


def answer(asked: Question, whole: bool = True, **result: Any) -> Answered:
    return Answered(Hand(question=asked), Hand(**result), whole)


def test_the_newest_answers_are_kept(plans: Any) -> None:
    kept = planner._KEPT
    for gpus in range(1, kept + 1):
        plans._heard(answer(question(gpus)))
    assert plans.known(question(1)) is not None  # asked again, and so the newest
    plans._heard(answer(question(kept + 1)))
    assert plans.known(question(2)) is None
    assert all(plans.known(question(gpus)) for gpus in (1, *range(3, kept + 2)))
    with pytest.raises(ForerunError, match="no longer kept; ask it again"):
        plans.kept(question(2))
    assert plans.kept(question(3)).asked.question == question(3)


def test_a_question_is_searched_unless_its_whole_answer_is_kept(plans: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(planner, "answer_event", lambda answered: "the answer")
    task, key = plans.ask(question(), "page")
    assert (task.kind, task.most_plans, key) == ("plans", planner.MOST_PLANS, ("page", "plans"))
    plans._heard(answer(question(), whole=False))
    assert plans.ask(question(), "page")[1] == ("page", "plans")
    plans._heard(answer(question()))
    done = plans.ask(question(), "page")
    assert (events(done), done.key) == (["the answer"], ("page", "plans"))
    task, key = plans.scale(question(), "page")
    assert (task.kind, key) == ("scaling", ("page", "scaling"))
    assert plans.command(question()).startswith("forerun plan gpt2-small --cluster h100-sxm --gpus 8")


def test_dropped_models_are_kept_up_to_a_number(plans: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(planner, "config_model", lambda config, place, name: (config, place, name))
    assert plans.drop_model("a.json", 1) == "dropped a.json"
    assert plans._dropped["dropped a.json"] == (1, "a.json", "a")
    plans.drop_model(".json", 2)
    assert plans._dropped["dropped .json"][2] == "model"
    for number in range(planner._MODELS - 2):
        plans.drop_model(f"{number}", number)
    assert len(plans._dropped) == planner._MODELS
    plans.drop_model("last", 3)
    assert (len(plans._dropped), "dropped a.json" in plans._dropped, "dropped .json" in plans._dropped) == (
        planner._MODELS, False, True,
    )  # fmt: skip


def test_a_plan_is_found_by_its_number_or_its_fields(plans: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(plans, "_predicted", lambda made, plan: ("predicted", plan))
    usual = Plan(1024, dp_shard=8, micro_batch=8)
    ranked = Hand(plan=usual)
    table: Any = type("Table", (), {"__len__": lambda self: 3, "plan": lambda self, row: f"plan {row}"})()
    outcome = Hand(table=table, predictions={1: "known"})
    fields = {"dp_shard": 8, "micro_batch": 8}
    assert plans.found(AboutPlan(question=question(), plan=fields))[1:] == (usual, ("predicted", usual))
    plans._heard(answer(question(), outcome=outcome, ranked=[Hand(plan=None), ranked]))
    assert plans.found(AboutPlan(question=question(), row=1))[1:] == ("plan 1", "known")
    assert plans.found(AboutPlan(question=question(), row=2))[1:] == ("plan 2", ("predicted", "plan 2"))
    with pytest.raises(ForerunError, match="row: the search has 3 plans"):
        plans.found(AboutPlan(question=question(), row=3))
    assert plans.found(AboutPlan(question=question(), plan=fields))[1:] == (usual, ranked)
    other = {**fields, "compile": True}
    assert plans.found(AboutPlan(question=question(), plan=other))[2][0] == "predicted"
    with pytest.raises(ForerunError, match="give a plan, or its row"):
        plans.found(AboutPlan(question=question()))


def test_rows_are_listed_up_to_a_number(plans: Any, monkeypatch: Patch) -> None:
    plans._heard(answer(question()))
    monkeypatch.setattr(planner, "matching", lambda result, wanted, status: list(range(100)))
    monkeypatch.setattr(planner, "row_record", lambda result, row: row)
    assert plans.rows(AboutRows(question=question())) == {"n": 100, "rows": list(range(planner.LISTED))}


def test_neighbours_that_fit_come_first_the_fastest_before_the_others(plans: Any, monkeypatch: Patch) -> None:
    steps = {"a": (3.0, True), "b": (1.0, False), "c": (2.5, True)}
    own = Hand(step_time_s=2.0)
    monkeypatch.setattr(plans, "found", lambda about: (Hand(question=question()), "plan", own))
    monkeypatch.setattr(planner, "neighbours", lambda result, plan: [
        Hand(plan=name, row=ord(name), field=name, value=7, also=("x",)) for name in steps
    ])  # fmt: skip
    monkeypatch.setattr(plans, "_predicted", lambda made, plan: Hand(step_time_s=steps[plan][0], fits=steps[plan][1]))
    monkeypatch.setattr(planner, "place_record", lambda prediction, row: {"fits": prediction.fits, "row": row})
    monkeypatch.setattr(planner, "plan_words", lambda plan: plan)
    monkeypatch.setattr(planner, "_why", lambda own, other: "why")
    plans._heard(answer(question()))
    found = plans.neighbours(AboutPlan(question=question(), row=0))
    assert [(each["field"], each["change"]) for each in found] == [("c", 0.25), ("a", 0.5), ("b", -0.5)]
    assert (found[0]["value"], found[0]["also"], found[0]["words"], found[0]["why"]) == ("7", ["x"], "c", "why")
    assert [each["place"]["row"] for each in found] == [ord("c"), ord("a"), ord("b")]


# -- what a search tells -----------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: Patch) -> list[Any]:
    monkeypatch.setattr(searching, "place_record", lambda prediction: prediction.step_time_s)
    monkeypatch.setattr(searching, "answer_record", lambda result: {"of": result})
    return []


def asked(**changes: Any) -> Any:
    usual = {"place": ("gpt", "h100", 8, 1024, 64), "searched": {}, "choices": ("s",), "model": "gpt", "where": "h100"}
    return Hand(question=question(**changes), **usual)


def test_likely_plans_are_told_first_those_that_fit_before_the_others(told: Any, monkeypatch: Patch) -> None:
    found = [Hand(step_time_s=3.0, fits=True), Hand(step_time_s=1.0, fits=False), Hand(step_time_s=2.0, fits=True)]
    monkeypatch.setattr(searching, "make_spaces", lambda *place: "spaces")
    monkeypatch.setattr(searching, "Spaces", Hand(of=lambda spaces, tally: Hand(table=range(10))))
    monkeypatch.setattr(searching, "first_look", lambda model, where, table: found)
    checked: list[int] = []
    searching._look(Task(asked(), "plans", 10), told.append, lambda: checked.append(1))
    assert told[0] == {"kind": "space", "plans": 10}
    assert [event["top"] for event in told[1:]] == [[3.0], [3.0, 1.0], [2.0, 3.0, 1.0]]
    assert {event["proved"] for event in told[1:]} == {False}
    assert len(checked) == 3
    with pytest.raises(ForerunError, match="10 plans are possible, and this server searches at most 9"):
        searching._look(Task(asked(), "plans", 9), told.append, lambda: None)
    told.clear()
    monkeypatch.setattr(searching, "Spaces", Hand(of=lambda spaces, tally: Hand(table=())))
    searching._look(Task(asked(), "plans", 9), told.append, lambda: None)
    assert told == [{"kind": "space", "plans": 0}]


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_an_answer_is_told_proved_and_then_whole(objective: str, told: list[Any], monkeypatch: Patch) -> None:
    given: dict[str, Any] = {}

    def search(*place: Any, found: Any, proved: Any, **options: Any) -> str:
        given.update(options)
        found([Hand(step_time_s=2.0)])
        proved("first")
        found([Hand(step_time_s=1.0)])  # proved places are shown already
        return "last"

    monkeypatch.setattr(searching, "search", search)
    made = asked(objective=objective)
    searching._search(made, told.append, lambda *_: None)
    assert told == [
        {"kind": "places", "proved": False, "top": [2.0]},
        Answered(made, "first", False), {"kind": "answer", "whole": False, "of": "first"},
        Answered(made, "last", True), {"kind": "answer", "whole": True, "of": "last"},
    ]  # fmt: skip
    assert (given["workers"], given["pareto"], given["objective"]) == (1, searching._FRONT, objective)
    assert given["choices"] == (("s",) if objective == "time" else None)


@pytest.mark.parametrize(("gpus", "sizes"), [(8, [2, 4, 8, 16, 32]), (1, [1, 2, 4]), (2, [1, 2, 4, 8])])
def test_a_scaling_curve_is_told_point_by_point(
    gpus: int, sizes: list[int], told: list[Any], monkeypatch: Patch
) -> None:
    def sweep(model: Any, cluster: Any, n_gpus: list[int], seq_len: int, batches: list[int], **options: Any) -> Any:
        assert (options["objective"], options["workers"], batches) == ("tokens", 1, [64])
        best = None if n_gpus == [2] else Hand(step_time_s=1.0 / n_gpus[0])
        return Hand(points=(Hand(best=best, n_gpus=n_gpus[0]),))

    monkeypatch.setattr(searching, "sweep", sweep)
    monkeypatch.setattr(searching, "replace", lambda one, points: Hand(points=points))
    monkeypatch.setattr(searching, "sweep_record", lambda one: {"points": [{"gpus": p.n_gpus} for p in one.points]})
    made = asked()
    made.place = ("gpt", "h100", gpus, 1024, 64)
    searching._scale(made, told.append, lambda: None)
    assert [len(event["points"]) for event in told] == list(range(1, len(sizes) + 1))
    assert [event["done"] for event in told] == [False] * (len(sizes) - 1) + [True]
    assert [(row["gpus"], row["best"]) for row in told[-1]["points"]] == [
        (n, None if n == 2 else 1.0 / n) for n in sizes
    ]


def test_a_task_is_a_search_or_a_curve(monkeypatch: Patch) -> None:
    done: list[str] = []
    for name in ("_look", "_search", "_scale"):
        monkeypatch.setattr(searching, name, lambda *_, name=name: done.append(name))
    searching.work(Task(asked(), "plans", 9), print, print)
    searching.work(Task(asked(), "scaling", 9), print, print)
    assert done == ["_look", "_search", "_scale"]
