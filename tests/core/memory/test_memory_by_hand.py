"""Memory of small programs, communicators and reserved memory, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from random_programs import program

from forerun.core.engine.simulate import Timeline
from forerun.core.memory import outside, reserved
from forerun.core.memory.outside import OutsideModel, communicator_bytes, context_bytes, outside_bytes
from forerun.core.memory.over_time import MemoryOverTime, memory_over_time
from forerun.core.memory.profile import profile
from forerun.core.memory.reserved import Reserved, ReserveModel
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import N_CATEGORIES, Category, Program
from forerun.core.program.unfold import unfold
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.stacks.catalog import load_stack

MIB = 2**20
H100 = load_cluster("h100-sxm")
PYTORCH = load_stack("pytorch")


# -- reserved memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (200, Reserved(140 * MIB, 106 * MIB, True, False)),
        (140, Reserved(140 * MIB, 106 * MIB, True, False)),
        (139, Reserved(139 * MIB, 106 * MIB, True, True)),
        (106, Reserved(106 * MIB, 106 * MIB, True, True)),
        (105, Reserved(140 * MIB, 106 * MIB, False, False)),
    ],
)
def test_reserved_memory_has_slack_until_it_is_short(
    available: int, expected: Reserved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 MiB, of which 60 come and go: half of these is lost where there is plenty, a tenth where there is not."""
    monkeypatch.setattr(reserved, "reserve_model", lambda: ReserveModel(0.5, 0.1, 20, "here"))
    assert reserved.reserved(100 * MIB, 40 * MIB, available * MIB) == expected


def test_more_resident_than_allocated_is_no_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved, "reserve_model", lambda: ReserveModel(0.5, 0.1, 20, "here"))
    assert reserved.reserved(40 * MIB, 50 * MIB, 99 * MIB) == Reserved(40 * MIB, 40 * MIB, True, False)


# -- communicators -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> OutsideModel:
    """A receiving side takes 13 MiB, a sending side 12; two channels for each NIC, at most 10."""
    protocols = {"ll": 1.0, "ll128": 4.0, "simple": 8.0}
    made = OutsideModel(0.5, 1.5, "here", protocols, {"nvswitch": 16}, 3, 2, 10, 3, 7.0, "here")
    monkeypatch.setattr(outside, "outside_model", lambda: made)
    return made


@pytest.mark.parametrize(
    ("nodes", "ranks", "mib"),
    [
        (1, 1, 0),
        (1, 2, 16 * 13),
        (1, 3, 16 * 2 * 13),
        (1, 8, 16 * 2 * 13),
        (2, 1, 2 * 25),
        (3, 1, 2 * 2 * 25),
        (9, 1, 2 * 3 * 25),
        (2, 2, 4 * (25 + 2 * 13) / 2),
        (4, 8, 10 * (3 * 25 + 14 * 13) / 8),
    ],
)
def test_a_communicator_has_buffers_for_its_channels(model: OutsideModel, nodes: int, ranks: int, mib: float) -> None:
    assert communicator_bytes(CommGroup("dp", nodes * ranks, nodes, ranks), H100) == int(mib * MIB)


def test_other_links_have_other_channels_and_kernels_may_load_at_once(model: OutsideModel) -> None:
    other = replace(H100, links=(replace(H100.links[0], kind="pcie"), H100.links[1]))
    assert communicator_bytes(CommGroup("dp", 2, 1, 2), other) == 3 * 13 * MIB
    assert context_bytes(PYTORCH) == 512 * MIB
    assert context_bytes(replace(PYTORCH, lazy_kernels=False)) == 1536 * MIB
    assert (model.receive_bytes, model.send_bytes, model.transfer_bytes) == (13 * MIB, 12 * MIB, 7 * MIB)
    assert outside.least_communicator_bytes(H100) == 50 * MIB


def test_neighbours_of_a_pipeline_have_a_communicator_on_either_side(model: OutsideModel) -> None:
    stack = replace(PYTORCH, communicators=())
    inside, across = CommGroup("pp_0", 2, 1, 2, 1, 1), CommGroup("pp_0", 2, 2, 1, 8, 1)
    plain = CommGroup("dp", 2, 1, 2)
    assert outside_bytes([plain], stack, H100) == (512 + 208) * MIB
    assert outside_bytes([inside], stack, H100) == (512 + 2 * 208) * MIB
    assert outside_bytes([across], stack, H100) == (512 + 2 * 50 + 2 * 7) * MIB


def test_a_stack_makes_communicators_of_axes_joined_and_of_the_world(model: OutsideModel) -> None:
    every = [CommGroup.on_mesh(axis, size, inner, 8) for axis, size, inner in (("tp", 2, 1), ("dp_all", 4, 2))]
    whole = communicator_bytes(CommGroup.on_mesh("world", 8, 1, 8), H100)
    for names, added in ((("world",), whole), (("tp+dp_all",), whole), (("tp+none",), 0), (("tp",), 208 * MIB)):
        stack = replace(PYTORCH, communicators=names)
        assert outside_bytes([], stack, H100, every) == 512 * MIB + added


# -- allocated memory --------------------------------------------------------------------------------------------------


def small() -> Program:
    """Twice: 10 bytes are kept and 7 come and go at node 0; 5 more come and 4 that were there go at node 1."""
    block = BlockBuilder()
    block.node(0)
    block.node(1)
    block.tensor(10, Category.ACTIVATION, 0, -1)
    block.tensor(7, Category.TEMPORARY, 0, 0)
    block.tensor(5, Category.LOGITS, 1, -1)
    block.tensor(4, Category.GRADIENT, -1, 1)
    made = program([block.build("b")], [[0, 0]])
    resident = np.zeros(N_CATEGORIES, np.int64)
    resident[Category.GRADIENT], resident[Category.PARAMETER] = 8, 100
    return replace(made, rank_classes=(replace(made.rank_classes[0], resident_bytes=resident),))


def test_the_peak_is_where_most_is_allocated_at_once() -> None:
    """108 at the start, then 125 and 118; 123, 119; 136 and 129; 134 before the last 4 go."""
    (found,) = profile(small())
    assert (found.peak_bytes, found.peak_step, found.peak_node) == (136, 1, 0)
    assert found.by_category == {"parameter": 100, "gradient": 4, "activation": 20, "temporary": 7, "logits": 5}
    assert found.step_bytes.tolist() == [108, 119]
    assert found.owner(small(), 0) == "op0 in b of layer 1, micro batch 1"
    (bare,) = profile(small(), without=(Category.ACTIVATION,))
    assert (bare.peak_bytes, bare.peak_step) == (116, 1)


def test_memory_over_time_changes_as_the_device_gets_there() -> None:
    flat = unfold(small())
    times = np.array([10, 30, 20, 50], np.int64)
    timeline = Timeline.__new__(Timeline)
    object.__setattr__(timeline, "start_ps", times)
    found = memory_over_time(small(), flat, timeline, 0)
    assert found.total.tolist() == [108, 125, 118, 123, 119, 136, 129, 134, 130]
    assert found.time_ps.tolist() == [0, 10, 10, 30, 30, 30, 30, 50, 50]
    assert (found.peak, found.rank_class) == (5, "class 0")
    few = memory_over_time(small(), flat, timeline, 0, points=4)
    assert few.total.tolist() == [108, 125, 118, 136, 129, 130]
    least = memory_over_time(small(), flat, timeline, 0, points=2)
    assert least.total.tolist() == [108, 118, 136, 130], "the first, the lowest and highest after it, and the last"
    assert isinstance(few, MemoryOverTime)
