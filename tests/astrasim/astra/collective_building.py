"""Networks, systems and cases for tests of collectives."""

from hypothesis import strategies as st

from forerun.astrasim.astra.collective_cases import implementations
from forerun.astrasim.astra.system import system_from
from forerun.core.network.network_file import Network, NetworkDim

CASE = {
    "case": "one",
    "collective": "all_reduce",
    "bytes": 1 << 20,
    "topology": ["Ring"],
    "npus_count": [8],
    "bandwidth_GBps": [50],
    "latency_ns": [500],
    "implementation": ["ring"],
    "splits": 4,
    "active_chunks": 1,
    "opt": "localBWAware",
    "policy": "LIFO",
    "endpoint_delay": 10,
    "local_mem_bw": 1600,
}
"""64440 ns: E + 14 steps of (floor(500 + 32768 / 53.687) + E), 7 of them reduced (60 ns), for each of 4 chunks"""


def system(*algorithms, splits=1, active=1, optimization="localBWAware", **keys):
    return system_from(
        {
            "preferred-dataset-splits": splits,
            "active-chunks-per-dimension": active,
            "collective-optimization": optimization,
            "local-mem-bw": 1600,
            **implementations(list(algorithms)),
            **keys,
        },
        "test",
    )


dimensions = st.builds(
    NetworkDim,
    topology=st.sampled_from(["Ring", "FullyConnected", "Switch"]),
    sizes=st.sampled_from([2, 3, 4, 5, 8]).map(lambda n: (n,)),
    bandwidth_gbps=st.floats(1, 500),
    latency_ns=st.floats(0, 2000),
)
networks = (
    st.lists(dimensions, min_size=1, max_size=3)
    .map(lambda dims: Network(tuple(dims)))
    .filter(lambda network: network.n_npus <= 32)
)
