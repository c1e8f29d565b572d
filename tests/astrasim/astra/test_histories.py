"""Folding by histories: ranks that run one trace are simulated together while nothing happens to them apart."""

from dataclasses import replace

import numpy as np
import pytest
from collective_building import system
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import collective, comp, programs, trace

from forerun.astrasim.astra.fold_histories import run_histories
from forerun.astrasim.astra.ranks import lower_ranks
from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.chakra.trace import CommType
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology

GROUPS = {
    "a0": (0, 1, 2, 3),
    "a1": (4, 5, 6, 7),
    "b0": (0, 2, 4, 6),
    "b1": (1, 3, 5, 7),
    "c0": (0, 1),
    "c1": (2, 3),
    "c2": (4, 5),
    "c3": (6, 7),
    "d0": (0, 4),
    "d1": (1, 5),
    "d2": (2, 6),
    "d3": (3, 7),
    "e0": (5, 4, 0, 1, 7, 6, 2, 3),
    "f0": (0, 7, 3),
    "f1": (1, 2, 4, 5, 6),
}
UNLIKE = [collective(CommType.ALL_GATHER, 10**6, "f0")]
TOPOLOGIES = ["ring:8", "ring:4,ring:2", "mesh2d:4x2", "torus2d:2x4", "switch:4,ring:2", "fullyconnected:2,ring:4"]
ACTIVE = {"roofline-enabled": 1, "peak-perf": 1}


def machine_of(topology, splits=1, active=1, **keys):
    network = parse_topology(",".join(f"{part}@50/500" for part in topology.split(",")))
    return Machine(system(*["ring"] * len(network.dims), splits=splits, active=active, **ACTIVE, **keys), network)


def histories(traces, machine, groups=GROUPS):
    ranks = lower_ranks(traces, machine.system, machine.memory, "ascending")
    return run_histories(ranks, groups, machine.system, machine.network, "ascending")


def times_of_ranks(run, of_rank, names):
    """(ranks, nodes) of each of these columns of a run."""
    columns = [getattr(run.result, name).reshape(len(run.result.finish_ns), -1) for name in names]
    return [column[np.array(of_rank)].tolist() for column in columns]


@settings(deadline=None, max_examples=200)
@given(
    traces=programs(8, GROUPS, messages=False),
    slower=st.integers(1, 9),
    topology=st.sampled_from(TOPOLOGIES),
    splits=st.integers(1, 4),
    active=st.integers(1, 3),
    endpoint=st.sampled_from([0, 10, 300]),
)
def test_every_rank_has_the_times_of_all_messages(traces, slower, topology, splits, active, endpoint):
    machine = machine_of(topology, splits, active, **{"endpoint-delay": endpoint})
    traces = [replace(one, num_ops=one.num_ops * slower) for one in traces]
    found = histories(traces, machine)
    try:
        whole = replay(traces, GROUPS, machine, fold=False)
    except ForerunError:
        assert found is None
        return
    assert replay(traces, GROUPS, machine).statistics == whole.statistics
    if found is not None:
        names = ["start_ns", "end_ns", "finish_ns"]
        expected = times_of_ranks(whole.run, range(8), names)
        assert times_of_ranks(found.run, found.of_rank, names) == expected
        distinct = {str([column[rank] for column in expected]) for rank in range(8)}
        assert len(found.run.result.finish_ns) == len(distinct), "equal ranks are simulated once"


def test_ranks_that_never_differ_are_one_history_and_those_behind_a_longer_hop_another():
    nodes = [comp(10**6, 10), collective(CommType.ALL_GATHER, 10**6, "a0", after=[0]), comp(10**6, 10, after=[1])]
    traces = [replace(trace(nodes), group_names=(f"a{rank // 4}",)) for rank in range(8)]
    found = histories(traces, machine_of("ring:8"))
    # The ring's last hop, from rank 3 back to rank 0, is 3 links long: only the message to rank 3 never comes over it.
    assert found.of_rank.tolist() == [0 if rank % 4 == 3 else 1 for rank in range(8)]
    assert len(found.run.result.finish_ns) == 2
    assert len(histories(traces, machine_of("switch:8")).run.result.finish_ns) == 1


@pytest.mark.parametrize(
    ("traces", "why"),
    [
        ([trace([comp(10, 10)])] * 7 + [trace([comp(20, 10)])], "traces differ"),
        ([trace([collective(CommType.ALL_REDUCE, 10**6)])] * 8, "all ranks of two dimensions run two phases"),
        (
            [replace(trace(UNLIKE), group_names=("f0" if rank in GROUPS["f0"] else "f1",)) for rank in range(8)],
            "groups have unlike sizes",
        ),
    ],
)  # fmt: skip
def test_what_is_not_alike_is_left_to_others(traces, why):
    assert histories(traces, machine_of("ring:4,ring:2")) is None, why


def test_more_histories_than_there_is_room_for_at_first():
    """Each ring of 64 in a ring of 128 sets one rank more apart: the first whose messages go no long way."""
    n, inner = 128, 64
    groups = {f"in{i}": tuple(range(i * inner, (i + 1) * inner)) for i in range(n // inner)}
    nodes = []
    for k in range(24):
        nodes.append(collective(CommType.ALL_GATHER, 10**4 * (1 + k), "in0", after=[len(nodes) - 1] if k else []))
        nodes.append(comp(10**5, 10, after=[len(nodes) - 1]))
    traces = [replace(trace(nodes), group_names=(f"in{rank // inner}",)) for rank in range(n)]
    machine = machine_of(f"ring:{n}")
    found, whole = histories(traces, machine, groups), replay(traces, groups, machine, fold=False)
    assert len(found.run.result.finish_ns) == 25
    assert times_of_ranks(found.run, found.of_rank, ["end_ns"]) == times_of_ranks(whole.run, range(n), ["end_ns"])


@pytest.mark.parametrize("kernel_ns", [9, 10, 11])
@pytest.mark.parametrize("waits", [False, True])
def test_a_ring_and_a_kernel_that_end_at_the_same_time(kernel_ns, waits):
    """Where the last event of the ring is when the kernel starts, other ranks decide which of them ends first.

    If another kernel waits for the slot, it starts before the one that waits for the ring, or after it.
    """
    machine, chain = machine_of("ring:8", **{"endpoint-delay": 10}), [collective(CommType.ALL_GATHER, 10**6, "a0")]

    def of_ranks(nodes):
        return [replace(trace(nodes), group_names=(f"a{rank // 4}",)) for rank in range(8)]

    end_ns = int(histories(of_ranks(chain), machine).run.result.end_ns.min())
    kernels = [comp((end_ns - kernel_ns) * 1000, 1), comp(kernel_ns * 1000, 1, after=[1])]
    after = [comp(5000, 1, after=[0]), collective(CommType.ALL_GATHER, 10**5, "a0", after=[0])]
    traces = of_ranks([*chain, *kernels, *after, *[comp(7000, 1)] * waits])
    found, whole = histories(traces, machine), replay(traces, GROUPS, machine, fold=False)
    assert (found is None) == (waits and kernel_ns == 10)
    assert replay(traces, GROUPS, machine).statistics == whole.statistics
