"""Random topologies of every registered kind."""

import numpy as np
from hypothesis import strategies as st

from forerun.core.network.topology.registry import TOPOLOGIES, make

small = st.integers(1, 5)
sizes_of = {
    "Ring": st.tuples(st.integers(2, 20)),
    "FullyConnected": st.tuples(st.integers(2, 12)),
    "Switch": st.tuples(st.integers(2, 20)),
    "Mesh2D": st.tuples(small, small),
    "Torus2D": st.tuples(small, small),
    "Torus3D": st.tuples(small, small, small),
    "Tree": st.tuples(st.integers(2, 30)),
    "FatTree": st.tuples(st.integers(2, 60)),
    "Rail": st.tuples(small, small),
    "Dragonfly": st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)),
}
options_of = {
    "Tree": st.fixed_dictionaries({}, optional={"arity": st.integers(2, 4), "npu_nodes": st.booleans()}),
    "FatTree": st.fixed_dictionaries(
        {"radix": st.sampled_from([8, 12])},
        optional={"oversubscription": st.sampled_from([1, 2]), "edge_oversubscription": st.sampled_from([1, 2])},
    ),
    "Rail": st.fixed_dictionaries({}, optional={"node_bandwidth_gbps": st.just(450.0)}),
    "Dragonfly": st.fixed_dictionaries({}, optional={"global_latency_ns": st.just(2000.0)}),
}


@st.composite
def topologies(draw, names=tuple(TOPOLOGIES)):
    name = draw(st.sampled_from(names))
    sizes = draw(sizes_of[name].filter(lambda sizes: np.prod(sizes) > 1))
    return make(name, sizes, 50.0, 500.0, **draw(options_of.get(name, st.just({}))))
