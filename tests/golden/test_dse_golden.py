"""Points of a design space from STAGE's flags alone: generated, replayed, every figure of every rank exact."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from forerun.astrasim.astra.case import read_case
from forerun.astrasim.astra.fold_ranks import CollectiveTimes
from forerun.astrasim.astra.replay import replay
from forerun.astrasim.dse.definition import read_exploration
from forerun.astrasim.dse.evaluate import figures_of
from forerun.astrasim.dse.explore import evaluator_of
from forerun.astrasim.dse.space import Point
from forerun.astrasim.dse.workload import Strategy
from forerun.astrasim.stage.first_generation import generate, load_stage_args

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT.parent / "shared" / "golden" / "dse"
POINTS = sorted(path.parent for path in GOLDEN.glob("*/*/metrics.json"))
FULL_SIZE = [folder for folder in POINTS if folder.parent.name.endswith(("_L80", "_L96"))]
pytestmark = pytest.mark.skipif(not POINTS, reason="the reference results are not here")
LEARNT: dict[str, CollectiveTimes] = {}
"""folder of a system -> what its points have shown about collectives, as in an exploration"""


def name(folder):
    return str(folder.relative_to(GOLDEN))


def expected(folder):
    (system,) = json.loads((folder / "metrics.json").read_text())["systems"].values()
    return system["per_rank"]


def machine_of(folder):
    (machine,) = read_case(folder).machines.values()
    return machine


@pytest.mark.parametrize("folder", POINTS, ids=name)
def test_a_point_from_flags_alone_is_exact(folder):
    machine = machine_of(folder)
    times = LEARNT.setdefault(folder.parent.name, CollectiveTimes(machine.system, machine.network))
    traces = generate(load_stage_args(folder / "stage_args.json"))
    statistics = replay(list(traces), traces.groups, machine, times=times).statistics
    figures = expected(folder)
    assert len(figures) == len(statistics) == 64
    for rank, of_rank in figures.items():
        mine = asdict(statistics[int(rank)])
        assert {key: mine[key] for key in of_rank} == of_rank, f"rank {rank}"


@pytest.mark.parametrize("folder", FULL_SIZE, ids=name)
def test_the_example_explores_the_full_size_points(folder):
    """Inputs of the example file are those of the reference."""
    exploration = read_exploration(ROOT / "examples" / "dse-llama-gpt.yaml")
    workload, system = ("llama-70b", "system-1") if "llama" in folder.parent.name else ("gpt-175b", "system-2")
    flags = json.loads((folder / "stage_args.json").read_text())
    strategy = Strategy(*(flags[axis] for axis in ("dp", "tp", "sp")), activation_recompute=True)
    point = Point(workload, system, strategy)
    assert point in exploration.points
    assert len(exploration.points) == 112
    axes = exploration.workloads[workload].axes(strategy)
    figures = figures_of(evaluator_of(exploration).replay(point), axes)
    assert figures.time_ns == max(rank["wall_cycles_finished"] for rank in expected(folder).values())
    assert figures.peak_memory_bytes == max(rank["peak_memory_bytes"] for rank in expected(folder).values())
