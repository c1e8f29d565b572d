"""Who answers tasks: processes here or a Ray cluster, chosen in one place for all commands."""

import pytest

from forerun.common.errors import ForerunError
from forerun.common.processes import Processes
from forerun.common.ray_cluster import RayCluster
from forerun.common.workers import HERE, Workers


def test_tasks_are_answered_in_their_order():
    for workers in (HERE, Workers(1), Workers(2)):
        with workers.answering(abs, str, 3) as answers:
            assert list(answers.run([-3, 1, -2, -1])) == [3, 1, 2, 1]


def test_an_executor_is_local_or_ray():
    with pytest.raises(ForerunError, match="executor must be local or ray, got 'mars'"):
        Workers(executor="mars")
    with pytest.raises(ForerunError, match="Ray address auto needs executor ray, but the executor is local"):
        Workers(ray_address="auto")
    with pytest.raises(ForerunError, match="workers must be at least 1, got 0"):
        Workers(0).answering(abs, str, 1)


def test_the_executor_decides_who_answers(monkeypatch):
    monkeypatch.setattr("forerun.common.ray_cluster._import_ray", object)
    assert isinstance(Workers(executor="ray", ray_address="auto").answering(abs, str, 1), RayCluster)
    assert isinstance(Workers(2).answering(abs, str, 1), Processes)
