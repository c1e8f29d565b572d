"""Many tasks in this process or in others: order, who answers, and how workers end."""

import multiprocessing
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from forerun.common import processes
from forerun.common.errors import ForerunError
from forerun.common.processes import Processes, available_cpus, default_workers

TASKS = list(range(11))


def here(task):
    return task * 10, os.getpid() == PARENT


PARENT = os.getpid()


def test_one_worker_answers_in_this_process():
    with Processes(here, workers=1, worth_a_pool=0) as pool:
        assert list(pool.run(TASKS)) == [(10 * task, True) for task in TASKS]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker imports this module again")
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_workers_answer_in_order_and_this_process_takes_the_first_task(chunk):
    with Processes(here, workers=2, worth_a_pool=len(TASKS), chunk=chunk) as pool:
        assert list(pool.run(TASKS)) == [(10 * task, task == 0) for task in TASKS]
        assert list(pool.run([5])) == [(50, False)]  # the workers are there, so they also get few tasks


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker imports this module again")
def test_workers_answer_all_tasks_that_begin_beside_this_process():
    with Processes(here, workers=2, worth_a_pool=1) as pool:
        assert list(pool.begin(TASKS)) == [(10 * task, False) for task in TASKS]
        assert list(pool.begin([])) == []


def test_with_one_worker_tasks_that_begin_are_answered_when_they_are_read():
    done = []
    with Processes(done.append, workers=1, worth_a_pool=1) as pool:
        answers = pool.begin(TASKS)
        assert done == []
        next(answers)
        assert done == TASKS[:1]


def test_few_tasks_start_no_workers():
    with Processes(here, workers=2, worth_a_pool=len(TASKS) + 1) as pool:
        assert list(pool.run(TASKS)) == [(10 * task, True) for task in TASKS]


def test_a_worker_starts_no_others(monkeypatch):
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    with Processes(here, workers=2, worth_a_pool=0) as pool:
        assert list(pool.run(TASKS)) == [(10 * task, True) for task in TASKS]


@pytest.mark.parametrize("workers", [0, -1])
def test_less_than_one_worker_is_refused(workers):
    with pytest.raises(ForerunError, match=f"workers must be at least 1, got {workers}"):
        Processes(here, workers, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_the_pool_ends_with_the_block_and_waits_only_where_nothing_failed(fails):
    asked = []
    pool = Processes(here, workers=2, worth_a_pool=0)
    pool._pool = SimpleNamespace(shutdown=lambda **how: asked.append(how))
    pool.__exit__(*((KeyError, KeyError(), None) if fails else (None, None, None)))
    assert asked == [{"wait": not fails, "cancel_futures": True}]


def test_a_worker_ends_with_its_parent(monkeypatch):
    parents, slept = iter([7, 7, 1]), []

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        processes._end_with(7)
    assert ended.value.code == 1
    assert len(slept) == 2


def test_a_worker_leaves_interrupts_to_its_parent_and_watches_it(monkeypatch):
    handled, started = [], []
    monkeypatch.setattr(processes.signal, "signal", lambda *what: handled.append(what))
    monkeypatch.setattr(processes.threading, "Thread", lambda **how: SimpleNamespace(start=lambda: started.append(how)))
    monkeypatch.setattr(processes, "_adopted", [None])
    processes._adopt(here)
    assert handled == [(signal.SIGINT, signal.SIG_IGN)]
    assert started == [{"target": processes._end_with, "args": (os.getppid(),), "daemon": True}]
    assert processes._answer_chunk([1, 2]) == [(10, True), (20, True)]


@pytest.mark.parametrize(("platform", "workers"), [("linux", 6), ("darwin", 1)])
def test_there_are_as_many_workers_as_cpus_where_processes_can_fork(monkeypatch, platform, workers):
    monkeypatch.setattr(processes.sys, "platform", platform)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)) if process == 0 else {0})
    assert default_workers() == workers


@pytest.mark.parametrize(("found", "cpus"), [(4, 4), (None, 1)])
def test_elsewhere_the_machines_cpus_count(monkeypatch, found, cpus):
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: found)
    assert available_cpus() == cpus


@pytest.mark.parametrize(("platform", "method"), [("linux", "fork"), ("win32", "spawn")])
def test_workers_fork_where_they_can(monkeypatch, platform, method):
    asked = []
    monkeypatch.setattr(processes.sys, "platform", platform)
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: asked.append(name))
    monkeypatch.setattr(processes, "ProcessPoolExecutor", lambda *what, **how: (what, how))
    what, how = Processes(here, workers=3, worth_a_pool=0)._start()
    assert (asked, what) == ([method], (3, None))
    assert how == {"initializer": processes._adopt, "initargs": (here,)}
