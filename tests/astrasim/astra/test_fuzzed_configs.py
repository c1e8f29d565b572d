"""Whatever stands in system and network files: a result or one line that says what is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import collective, comp, programs, trace

from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.system import system_from
from forerun.astrasim.chakra.trace import CommType
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import network_from

NUMBERS = st.one_of(
    st.integers(-2, 10),
    st.sampled_from(
        [0, 1, 2**31, 2**63, 10**9, 10**30, -1, 1e-300, 1e300, float("nan"), float("inf"), 0.5, True, None, ""]
    ),
)
NAMES = st.sampled_from(["ring", "direct", "direct0", "direct2", "halvingDoubling", "doubleBinaryTree", "oneRing", "x"])
LISTS = st.one_of(st.lists(NAMES, max_size=3), NUMBERS)
SYSTEMS = st.fixed_dictionaries(
    {"local-mem-bw": st.one_of(st.just(1600), NUMBERS), "peak-perf": st.one_of(st.just(900), NUMBERS)},
    optional={
        "scheduling-policy": st.sampled_from(["LIFO", "FIFO", "EXPLICIT", "RANDOM"]),
        "endpoint-delay": NUMBERS,
        "active-chunks-per-dimension": NUMBERS,
        "preferred-dataset-splits": NUMBERS,
        "collective-optimization": st.sampled_from(["baseline", "localBWAware", "none"]),
        "roofline-enabled": NUMBERS,
        "track-local-mem": NUMBERS,
        "all-reduce-implementation": LISTS,
        "all-gather-implementation": LISTS,
        "reduce-scatter-implementation": LISTS,
        "all-to-all-implementation": LISTS,
    },
)
COLUMN = st.one_of(NUMBERS, st.lists(NUMBERS, max_size=3))
NETWORKS = st.fixed_dictionaries(
    {
        "topology": st.one_of(
            st.lists(st.sampled_from(["Ring", "Switch", "FullyConnected", "Mesh2D", "Tree", "x"]), max_size=2), NUMBERS
        ),
        "npus_count": st.one_of(st.just([4]), st.just([[2, 2]]), COLUMN),
        "bandwidth": st.one_of(st.just([50]), COLUMN),
        "latency": st.one_of(st.just([500]), COLUMN),
    }
)
FINE_SYSTEM = {
    "local-mem-bw": 1600,
    "peak-perf": 900,
    "roofline-enabled": 1,
    "track-local-mem": 1,
    "preferred-dataset-splits": 2,
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
}
FINE_NETWORK = {"topology": ["Ring"], "npus_count": [4], "bandwidth": [50], "latency": [500]}


def attempt(traces, system, network, aware):
    """Replay, or None for a proper error."""
    try:
        machine = Machine(system_from(system, "system.json"), network_from(network, "network.yml"), aware=aware)
        if machine.network.n_npus > 64:
            return None
        return replay((traces * 64)[: machine.network.n_npus], {}, machine)
    except ForerunError:
        return None


TRACES = [trace([comp(10**6, 10**4), collective(CommType.ALL_REDUCE, 10**5), collective(CommType.ALL_TO_ALL, 10**4)])]


@settings(max_examples=100)
@given(system=SYSTEMS, aware=st.booleans())
def test_system_files(system, aware):
    result = attempt(TRACES, {**FINE_SYSTEM, **system}, FINE_NETWORK, aware)
    assert result is None or result.wall_ns >= 0


@settings(max_examples=100)
@given(network=NETWORKS, aware=st.booleans())
def test_network_files(network, aware):
    result = attempt(TRACES, FINE_SYSTEM, network, aware)
    assert result is None or result.wall_ns >= 0


@settings(max_examples=40)
@given(traces=programs(), network=NETWORKS, system=SYSTEMS)
def test_all_together(traces, network, system):
    result = attempt(traces, {**FINE_SYSTEM, **system}, network, False)
    assert result is None or result.wall_ns >= 0


@pytest.mark.parametrize("latency", [1e12, 1e17])
def test_times_do_not_wrap_around(latency):
    result = attempt(TRACES, FINE_SYSTEM, {**FINE_NETWORK, "latency": [latency]}, False)
    assert result is None or result.wall_ns > latency


def test_a_replay_of_too_many_chunks_is_refused():
    system = system_from({**FINE_SYSTEM, "preferred-dataset-splits": 900_000}, "system.json")
    with pytest.raises(ForerunError, match="fewer splits"):
        replay(TRACES * 4, {}, Machine(system, network_from(FINE_NETWORK, "network.yml")))
