"""What Forerun asks of Ray, on a Ray that runs in this process; tests/answers/search has one on Ray itself."""

import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest

from forerun.common import ray_cluster
from forerun.common.errors import ForerunError
from forerun.common.ray_cluster import RayCluster

TASKS = list(range(23))


class TaskError(Exception):
    def __init__(self, cause):
        self.cause = cause


class LocalRay(ModuleType):
    """Ray in one process, which notes what it is asked."""

    def __init__(self, cpus=4):
        super().__init__("ray")
        self.cpus, self.session, self.options, self.stopped = cpus, False, [], 0
        self.waiting = self.most_waiting = 0
        self.chunks = []
        self.exceptions = SimpleNamespace(
            RayError=type("RayError", (Exception,), {}), RayTaskError=TaskError, RaySystemError=OverflowError
        )
        self.wrong = None

    def is_initialized(self):
        return self.session

    def init(self, **options):
        self.options.append(options)
        if options["address"] == "auto" and not self.cpus:
            raise ConnectionError("no cluster runs here")
        self.session = True

    def shutdown(self):
        self.stopped += 1

    def put(self, value):
        return value

    def cluster_resources(self):
        return {"CPU": float(self.cpus)} if self.cpus else {}

    def remote(self, **asked):
        self.asked = asked

        def made(function):
            def call(how, tasks):
                self.waiting += 1
                self.most_waiting = max(self.most_waiting, self.waiting)
                self.chunks.append(len(tasks))
                return function, how, tasks

            return SimpleNamespace(remote=call)

        return made

    def get(self, reference):
        self.waiting -= 1
        if self.wrong is not None:
            raise self.wrong
        function, how, tasks = reference
        try:
            return function(how, tasks)
        except ForerunError as error:
            raise TaskError(error) from None


@pytest.fixture
def ray(monkeypatch):
    found = LocalRay()
    monkeypatch.setitem(sys.modules, "ray", found)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    monkeypatch.setattr(ray_cluster, "_fit", set())
    return found


def cluster(address=None, workers=None, chunk=8, basis=lambda: "basis"):
    return RayCluster(lambda task: 10 * task, basis, address, workers, chunk)


@pytest.mark.parametrize("workers", [None, 1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 8])
def test_answers_come_in_order_from_at_most_so_many_chunks_at_once(ray, workers, chunk):
    with cluster(workers=workers, chunk=chunk) as found:
        assert list(found.run(TASKS)) == [10 * task for task in TASKS]
    assert ray.most_waiting == (len(ray.chunks) if workers is None else workers)
    assert ray.asked == {"num_cpus": 1, "max_retries": 5}


@pytest.mark.parametrize(
    ("cpus", "workers", "chunk", "first"),
    [(4, None, 8, 2), (1, None, 8, 8), (0, None, 50, 11), (4, 1, 50, 11), (64, None, 8, 1)],
)
def test_a_chunk_is_small_enough_for_two_on_each_cpu(ray, cpus, workers, chunk, first):
    ray.cpus = cpus
    with cluster(workers=workers, chunk=chunk) as found:
        list(found.run(TASKS))
    assert ray.chunks[0] == first
    assert sum(ray.chunks) == len(TASKS)


def test_a_cluster_of_its_own_is_small_quiet_and_ends(ray, monkeypatch):
    with cluster(workers=3):
        assert ray.stopped == 0
    (options,) = ray.options
    assert (options["address"], options["num_cpus"]) == ("local", 3)
    assert options["object_store_memory"] == 268_435_456
    assert options["include_dashboard"] is options["log_to_driver"] is False
    assert ray_cluster.os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert ray.stopped == 1


def test_without_a_number_of_workers_every_cpu_of_this_machine_works(ray, monkeypatch):
    monkeypatch.setattr(ray_cluster, "available_cpus", lambda: 7)
    with cluster():
        assert ray.options[0]["num_cpus"] == 7


def test_a_session_of_others_is_used_and_stays(ray):
    ray.session = True
    with cluster() as found:
        assert list(found.run([1])) == [10]
    assert (ray.options, ray.stopped) == ([], 0)


def test_the_address_given_goes_before_that_of_the_environment(ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with cluster():
        pass
    with cluster("local"):
        pass
    assert [options["address"] for options in ray.options] == ["auto"]
    assert "num_cpus" not in ray.options[0]


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_is_asked_before_ray_is(ray, form):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = form.format(server.getsockname()[1])
        with cluster(address):
            assert ray.options[0]["address"] == address
    ray.session = False
    with pytest.raises(ForerunError, match="nothing answers"), cluster(address):
        pass


@pytest.mark.parametrize("address", ["nowhere", "ray://nowhere", "nowhere:99999999", ":80"])
def test_an_address_without_a_host_or_port_is_refused(ray, address):
    with pytest.raises(ForerunError, match="expected HOST:PORT"), cluster(address):
        pass


def test_a_ray_that_refuses_is_named(ray):
    ray.cpus = 0
    with pytest.raises(ForerunError, match=r"^Ray at auto: can't be used: no cluster runs here$"), cluster("auto"):
        pass


def test_a_worker_with_other_files_refuses_and_is_asked_once(ray):
    asked = iter(["here", "here", "there"])
    with cluster(basis=lambda: next(asked), chunk=1, workers=1) as found:
        assert list(found.run([1, 2])) == [10, 20]  # the second chunk finds the basis known
    other = iter(["mine", "other"])
    with pytest.raises(ForerunError, match="differ from those of this machine"):
        cluster(basis=lambda: next(other), workers=1).__enter__()._get(
            (ray_cluster._answers, (None, lambda: "other", "mine"), [1])
        )


def test_lost_workers_and_tasks_that_cannot_be_read_are_one_line(ray):
    with cluster() as found:
        ray.wrong = TaskError(OverflowError("first\nno module here"))
        with pytest.raises(ForerunError, match=r"a worker can't run this \(no module here\)"):
            list(found.run([1]))
        ray.wrong = ray.exceptions.RayError(" gone\nmore")
        with pytest.raises(ForerunError, match=r"same tasks 6 times \(RayError: gone\)"):
            list(found.run([1]))
        ray.wrong = TaskError(KeyError("of a task"))
        with pytest.raises(TaskError):
            list(found.run([1]))


@pytest.mark.parametrize("workers", [0, -2])
def test_less_than_one_worker_is_refused(ray, workers):
    with pytest.raises(ForerunError, match=f"workers must be at least 1, got {workers}"):
        cluster(workers=workers)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ForerunError, match=r"pip install 'forerun\[ray\]'"):
        cluster()
