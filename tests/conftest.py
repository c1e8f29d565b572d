"""Settings of all tests; modules beside this file can be imported by every test."""

import gc
import os

import pytest
from hypothesis import Phase, settings

# Each worker has one core. Threads of BLAS, which numpy starts when it is imported, would wait for each other there.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# The first call of a compiled function takes seconds, so no example has a deadline. Every run draws other examples, so
# that few of them are enough in each.
settings.register_profile("forerun", deadline=None, max_examples=50)
# What benchmarks/mutants uses: it wants to know soon whether a test fails, and not on which smallest example.
settings.register_profile("first-failure", deadline=None, max_examples=30, phases=(Phase.explicit, Phase.generate))
settings.load_profile("forerun")


@pytest.fixture(scope="session", autouse=True)
def _traced_in_forks():
    """What is traced in this process runs in forks of it, which have imported torch."""
    import warm_process

    with pytest.MonkeyPatch.context() as patch:
        warm_process.install(patch)
        yield


def pytest_collection_finish() -> None:
    """Garbage collections leave out the modules and the eleven thousand tests, which stay to the end: going through
    them takes a second."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: a worker that gets one of them last keeps the other waiting.

    Before them come those that compile most: the first of them takes one worker, the rest the other, and what either
    compiles neither compiles again.
    """
    compiles = {item.path: mark.args[0] for item in items if (mark := item.get_closest_marker("compiles"))}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (-compiles.get(item.path, 0), item.path not in slow))


@pytest.fixture(scope="module")
def equal_clocks():
    """Lets GPUs that train together run at one clock, where the known answer of a test is that of equal GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.core.cost.step_costs.slowest_clock", lambda n_gpus: 1.0)
        yield
