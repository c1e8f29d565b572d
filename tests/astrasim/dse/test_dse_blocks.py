"""Folding by histories and by blocks: groups that see different distances, few ranks simulated, every rank exact."""

import pytest
from dse_files import changed, write

from forerun.astrasim.astra import replay as replaying
from forerun.astrasim.astra.replay import replay
from forerun.astrasim.dse.definition import read_exploration
from forerun.astrasim.dse.workload import traces_of
from forerun.common.errors import ForerunError

THREE = ["ring"] * 3
NETWORKS = {
    "ring": {"topology": ["Ring"], "npus_count": [16]},
    "wide": {"topology": ["Ring", "Ring"], "npus_count": [8, 2]},
    "mixed": {"topology": ["Ring", "Switch", "FullyConnected"], "npus_count": [6, 2, 2]},
    "mesh": {"topology": ["Mesh2D", "Ring"], "npus_count": [[3, 2], 2]},
}


def outcome(traces, groups, machine, fold):
    """(figures of every rank, simulated ranks), or why there are none: some strategies deadlock on a mesh."""
    try:
        result = replay(traces, groups, machine, fold=fold)
    except ForerunError as error:
        return str(error), 0
    return result.statistics, len(set(result.actor_of_rank))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_rank_of_every_strategy_is_that_of_the_whole_run(tmp_path, monkeypatch, name):
    network = {**NETWORKS[name], "bandwidth": 50.0, "latency": 500.0}
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    algorithms = THREE[: len(network["topology"])]
    changes = [(f"systems.torus.system.{kind}-implementation", algorithms) for kind in kinds]
    exploration = read_exploration(write(tmp_path, changed(*changes, ("systems.torus.network", network))))
    machine, n_ranks = exploration.machines["torus"], exploration.points[0].strategy.n_ranks
    blocks = set()
    for point in exploration.points[:: 1 + len(exploration.points) // 30]:
        traces = traces_of(exploration.workloads["tiny"].args(point.strategy))
        folded, whole = (outcome(traces, traces.groups, machine, fold) for fold in (True, False))
        with monkeypatch.context() as without:
            without.setattr(replaying, "run_histories", lambda *_: None)
            block = outcome(list(traces), traces.groups, machine, fold=True)
        assert folded[0] == block[0] == whole[0]
        assert folded[1] <= block[1] <= whole[1]
        blocks.add(block[1])
    assert blocks & set(range(2, n_ranks)), "some point is simulated by a block of several ranks"
