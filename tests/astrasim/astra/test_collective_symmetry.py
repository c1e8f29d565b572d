"""One rank for all must be what the simulation of all ranks says; and what has to hold whatever the algorithm."""

import numpy as np
import pytest
from collective_building import networks, system
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.astrasim.astra.collective_cases import strided_groups
from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.single import collective_times
from forerun.astrasim.astra.symmetry import is_symmetric
from forerun.astrasim.chakra.trace import CommType
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology

KINDS = [CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.REDUCE_SCATTER, CommType.ALL_TO_ALL]
SIZES = [1, 1000, 65_536, 1_000_003, 1 << 24]


def times_or_error(*arguments, **options):
    try:
        return collective_times(*arguments, **options)[0].tolist()
    except ForerunError as error:
        return str(error)


@settings(max_examples=100)
@given(
    network=networks,
    algorithm=st.sampled_from(["ring", "direct", "direct2", "halvingDoubling", "oneRing", "oneDirect"]),
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES),
    splits=st.integers(1, 5),
    active=st.integers(1, 3),
    optimization=st.sampled_from(["baseline", "localBWAware"]),
)
def test_one_rank_stands_for_all(network, algorithm, kind, size, splits, active, optimization):
    of = system(*[algorithm] * len(network.dims), splits=splits, active=active, optimization=optimization)
    assert times_or_error(network, of, kind, size) == times_or_error(network, of, kind, size, mirror=False)


@settings(max_examples=100)
@given(
    network=networks,
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES),
    splits=st.integers(1, 4),
    data=st.data(),
)
def test_one_rank_stands_for_all_groups(network, kind, size, splits, data):
    n = network.n_npus
    group_size = data.draw(st.sampled_from([k for k in range(2, n + 1) if n % k == 0]))
    stride = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % (group_size * k) == 0]))
    groups = strided_groups(n, group_size, stride)
    of = system(*["ring"] * len(network.dims), splits=splits)
    seen = times_or_error(network, of, kind, size, groups)
    assert seen == times_or_error(network, of, kind, size, groups, mirror=False)


SHIFTED = [
    "ring:6",
    "ring:9",
    "torus2d:4x4",
    "torus2d:5x3",
    "torus2d:3x4",
    "torus3d:3x2x3",
    "ring:3,ring:4",
    "fullyconnected:3,ring:5",
]


@settings(max_examples=150, deadline=None)
@given(
    topology=st.sampled_from([*SHIFTED, "ring:4,torus2d:3x3", "switch:4,ring:4"]),
    aware=st.booleans(),
    algorithm=st.sampled_from(["ring", "direct", "direct2", "halvingDoubling", "oneRing", "oneDirect"]),
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES),
    splits=st.integers(1, 4),
    active=st.integers(1, 3),
    latency=st.sampled_from([0, 1, 137, 500]),
)
def test_one_block_stands_for_all(topology, aware, algorithm, kind, size, splits, active, latency):
    network = parse_topology(",".join(f"{part}@50/{latency}ns" for part in topology.split(",")))
    of = system(*[algorithm] * len(network.dims), splits=splits, active=active)
    seen = times_or_error(network, of, kind, size, (), aware)
    assert seen == times_or_error(network, of, kind, size, (), aware, mirror=False)


@pytest.mark.parametrize("topology", SHIFTED)
@pytest.mark.parametrize("kind", KINDS)
def test_one_block_loads_all_links_with_queues(topology, kind):
    network = parse_topology(",".join(f"{part}@50/137ns" for part in topology.split(",")))
    of = system(*["ring"] * len(network.dims))
    runs = [collective_times(network, of, kind, 1 << 20, (), True, mirror=mirror).run for mirror in (True, False)]
    assert runs[0].n_events < runs[1].n_events
    assert runs[0].link_bytes.tolist() == runs[1].link_bytes.tolist()
    assert runs[0].link_busy_ns.tolist() == runs[1].link_busy_ns.tolist()


def test_a_tie_at_a_link_runs_all_ranks():
    """Both ways round a column messages turn at the same time, so ranks differ by the order of their numbers."""
    network, of = parse_topology("torus2d:4x4@50/500ns"), system("direct")
    run = collective_times(network, of, CommType.ALL_TO_ALL, 1 << 20, (), True).run
    alone = collective_times(network, of, CommType.ALL_TO_ALL, 1 << 20, (), True, mirror=False).run
    assert run.n_events == alone.n_events


def test_the_comparison_covers_both_ways():
    ring, mesh = parse_topology("ring:8@50/500"), parse_topology("mesh2d:4x2@50/500")
    of = system("direct")
    symmetric = []
    for network in (ring, mesh):
        tables = CollectiveTables(of, [8])
        call = tables.call(CommType.ALL_GATHER, 1 << 20, tables.communicator("", tuple(range(8))))
        symmetric.append(is_symmetric(network, tables.phases_of(call), []))
    assert symmetric == [True, False]
    ends = collective_times(mesh, of, CommType.ALL_GATHER, 1 << 20)[0]
    assert len(np.unique(ends)) > 1


@settings(max_examples=60)
@given(
    network=networks,
    algorithm=st.sampled_from(["ring", "direct", "halvingDoubling"]),
    kind=st.sampled_from(KINDS),
    size=st.integers(1000, 1 << 26),
    more=st.integers(1, 1 << 26),
    aware=st.booleans(),
)
def test_more_bytes_never_take_less_time(network, algorithm, kind, size, more, aware):
    of = system(*[algorithm] * len(network.dims))
    small, large = (times_or_error(network, of, kind, each, aware=aware) for each in (size, size + more))
    if isinstance(small, str) or isinstance(large, str):
        assert isinstance(small, str)
        return
    assert max(small) <= max(large)


@pytest.mark.parametrize("topology", ["ring:8", "switch:8", "fully-connected:8", "mesh2d:4x2"])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "halvingDoubling"])
def test_links_carry_what_the_algorithm_sends(topology, algorithm):
    """A reduce-scatter of n bytes lets every rank send n (r - 1) / r, whatever the algorithm, over each hop once."""
    network = parse_topology(f"{topology}@50/500")
    ends, run, _ = collective_times(network, system(algorithm), CommType.REDUCE_SCATTER, 1 << 20, aware=True)
    rank = np.arange(8, dtype=np.int32)
    hops = {
        "ring": lambda: network.topology().hop_counts(rank, (rank + 1) % 8).sum(),
        "direct": lambda: sum(network.topology().hop_counts(rank, (rank + d) % 8).sum() for d in range(1, 8)),
        "halvingDoubling": lambda: sum(
            (4 >> k) * network.topology().hop_counts(rank, rank ^ (1 << k)).sum() for k in range(3)
        ),
    }
    sent = {"ring": 7, "direct": 1, "halvingDoubling": 1}[algorithm] * int(hops[algorithm]()) * (1 << 17)
    assert run.link_bytes.sum() == sent
    assert 0 < run.link_busy_ns.max() <= ends.max()


@pytest.mark.parametrize(
    ("name", "problem"),
    [("all_to_all", "no all-to-all"), ("all_reduce", "power of two")],
)
def test_what_halving_doubling_cannot_do(name, problem):
    network = parse_topology("ring:6@50/500" if name == "all_reduce" else "ring:8@50/500")
    with pytest.raises(ForerunError, match=problem):
        collective_times(network, system("halvingDoubling"), CommType[name.upper()], 1 << 20)


def test_what_would_never_end_is_refused():
    network = parse_topology("ring:1000000@50/500")
    with pytest.raises(ForerunError, match="messages"):
        collective_times(network, system("ring"), CommType.ALL_TO_ALL, 1 << 30, mirror=False)
    with pytest.raises(ForerunError, match="splits"):
        collective_times(network, system("ring", splits=50), CommType.ALL_REDUCE, 1 << 30, mirror=False)
    slow = parse_topology("ring:8@1e-9/500")
    with pytest.raises(ForerunError, match="longer"):
        collective_times(slow, system("ring"), CommType.ALL_TO_ALL, 1 << 40)
