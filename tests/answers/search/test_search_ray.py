"""The search on Ray finds what it finds in local processes, also when a worker is lost half-way."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kept_search import FIXED, small_search
from ray_search import Watched, deadly, faulty, here

from forerun.answers.search.result import SearchResult
from forerun.common.errors import ForerunError
from forerun.common.ray_cluster import RayCluster
from forerun.interfaces.cli.main import run
from forerun.interfaces.report.records_of_searches import search_record, write_csv

WIDE = {name: values for name, values in FIXED.items() if name != "reshard_after_forward"}
FEW = {**WIDE, "pp": 1, "tp": 1}
wide_search = partial(small_search, fixed=WIDE, keep=100)


def test_ray_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ForerunError, match=r"Ray is not installed; pip install 'forerun\[ray\]'"):
        small_search(None, executor="ray")


def test_bad_executors_are_named() -> None:
    with pytest.raises(ForerunError, match="executor must be local or ray, got 'dask'"):
        small_search(None, executor="dask")
    with pytest.raises(ForerunError, match=r"Ray address 10\.0\.0\.1:6379 needs executor ray"):
        small_search(None, ray_address="10.0.0.1:6379")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes with a CPU each, beside a head without one."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'forerun[ray]')")
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    store = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
    for _ in range(2):
        cluster.add_node(num_cpus=1, **store)
    yield cluster
    cluster.shutdown()
    patch.undo()


def files_of(result: SearchResult, folder: Path) -> tuple[bytes, dict[str, Any]]:
    write_csv(folder / "out.csv", result)
    return (folder / "out.csv").read_bytes(), search_record(result, 5)


@pytest.mark.slow
def test_it_finds_what_local_processes_find(two_nodes: Any, tmp_path: Path) -> None:
    local = wide_search(None)
    store = tmp_path / "s.sqlite"
    on_ray = wide_search(store, executor="ray", ray_address=two_nodes.address, workers=None)
    assert repr(on_ray) == repr(local)
    assert files_of(on_ray, tmp_path) == files_of(local, tmp_path)
    assert wide_search(store) == local


@pytest.fixture(scope="module")
def watched_locally(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return wide_search(None, predictor=Watched(tmp_path_factory.mktemp("local")))


def workers_in(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


@pytest.mark.slow
def test_a_worker_that_is_killed_half_way_changes_nothing(
    two_nodes: Any, tmp_path: Path, watched_locally: SearchResult
) -> None:
    killed, seen = [], []

    def kill_one(done: int, total: int) -> None:
        seen.append((done, total))
        if done == total // 2:
            killed.append(min(workers_in(tmp_path)))
            os.kill(killed[0], signal.SIGKILL)

    options = {"executor": "ray", "ray_address": two_nodes.address, "workers": None, "progress": kill_one}
    on_ray = wide_search(None, predictor=Watched(tmp_path, 0.01), **options)
    assert len(workers_in(tmp_path)) >= 3, "two, and one in place of the killed one"
    assert os.getpid() not in workers_in(tmp_path)
    assert repr(on_ray) == repr(watched_locally)
    assert on_ray.impossible["refused by the simulation"] > 0
    total = seen[-1][1]
    assert [done for done, _ in seen] == [*range(1, total + 1), total], "nothing lost or counted twice"


@pytest.mark.slow
def test_a_node_that_is_lost_half_way_changes_nothing(
    two_nodes: Any, tmp_path: Path, watched_locally: SearchResult
) -> None:
    extra, lost = two_nodes.add_node(num_cpus=1, object_store_memory=100 * 2**20), []

    def lose_node(done: int, total: int) -> None:
        if not lost and done >= total // 4 and len(workers_in(tmp_path)) == 3:
            two_nodes.remove_node(extra, allow_graceful=False)
            lost.append(done)

    options = {"executor": "ray", "ray_address": two_nodes.address, "workers": None, "progress": lose_node}
    on_ray = wide_search(None, predictor=Watched(tmp_path, 0.02), **options)
    assert lost
    assert repr(on_ray) == repr(watched_locally)


@pytest.mark.slow
def test_work_that_kills_every_worker_is_one_line(two_nodes: Any) -> None:
    with pytest.raises(
        ForerunError,
        match=r"^Ray: workers were lost with the same tasks 6 times \(WorkerCrashedError: .*see Ray's logs",
    ):
        small_search(None, executor="ray", ray_address=two_nodes.address, fixed=FEW, predictor=deadly)


@pytest.mark.slow
def test_a_fault_is_raised_as_it_is_in_a_process(two_nodes: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        small_search(None, executor="ray", ray_address=two_nodes.address, fixed=FEW, predictor=faulty)


@pytest.mark.slow
def test_a_worker_with_other_files_is_refused(two_nodes: Any) -> None:
    with (
        RayCluster(str, here, two_nodes.address, None) as cluster,
        pytest.raises(ForerunError, match="its Forerun, or its files, differ from those of this machine"),
    ):
        list(cluster.run([1, 2, 3]))


@pytest.mark.slow
def test_a_worker_that_lacks_what_it_is_to_run_is_one_line(
    two_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def predictor(model, plan, cluster):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    predictor = importlib.import_module("only_here").predictor
    with pytest.raises(ForerunError, match=r"^Ray: a worker can't run this \(.*No module named 'only_here'\); install"):
        small_search(None, executor="ray", ray_address=two_nodes.address, fixed=FEW, predictor=predictor)


@pytest.mark.slow
def test_the_command_runs_a_cluster_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'forerun[ray]')")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    question = "plan gpt2-small --cluster h100-sxm --gpus 8 --seq-len 512 --global-batch 32 --pp 1 --tp 1,2 --json"
    printed = []
    for executor in ("local", "ray"):
        assert run([*question.split(), "--workers", "2", "--executor", executor]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"Ray at 127\.0\.0\.1:1: nothing answers \(Connection refused\); is it running\?"),
        ("somewhere", "Ray address 'somewhere': expected HOST:PORT"),
        ("ray://127.0.0.1:1", "nothing answers"),
        ("127.0.0.1:port", "expected HOST:PORT"),
    ],
)
def test_addresses_without_a_cluster(address: str, message: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'forerun[ray]')")
    with pytest.raises(ForerunError, match=message):
        small_search(None, executor="ray", ray_address=address)


def test_fewer_than_one_worker() -> None:
    with pytest.raises(ForerunError, match="workers must be at least 1, got 0"):
        RayCluster(str, here, None, 0)
