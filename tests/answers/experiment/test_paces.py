"""Which iterations are built anew, and the presets that a name stands for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forerun.answers.analysis.setup import Setup
from forerun.answers.experiment import run
from forerun.answers.experiment.description.read import preset_names, preset_path, read_experiment
from forerun.answers.experiment.request import Request
from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan


def request(batches=(), lengths=()):
    setup = Setup(load_model("gpt2-small"), Plan(1024, micro_batch=4), load_cluster("h100-sxm"))
    return Request("run", setup, batch_schedule=batches, seq_len_schedule=lengths)


@pytest.fixture
def built(monkeypatch):
    """Micro batch and sequence length of the setups that are built, whose memory is their product."""
    made = []

    def pace(setup):
        made.append((setup.plan.micro_batch, setup.plan.seq_len))
        found = SimpleNamespace(peak_reserved_gib=setup.plan.micro_batch * setup.plan.seq_len)
        return SimpleNamespace(stepper=SimpleNamespace(simulation=SimpleNamespace(prediction=found)))

    monkeypatch.setattr(run, "Pace", pace)
    return made


def test_schedules_hold_from_their_iteration_on():
    asked = request(((2, 8), (5, 16)), ((3, 2048),))
    shapes = [run.scheduled(asked, i).plan for i in range(7)]
    assert [plan.micro_batch for plan in shapes] == [4, 4, 8, 8, 8, 16, 16]
    assert [plan.seq_len for plan in shapes] == [1024] * 3 + [2048] * 4
    assert run.scheduled(asked, 1) is asked.setup
    notes = [run._Paces(asked).note(i) for i in (1, 2, 3, 5)]
    assert notes[0] == ""
    assert "batch 8" in notes[1]
    assert "sequence" not in notes[1]
    assert "batch 8" in notes[2]
    assert "sequence 2048" in notes[2]
    assert "batch 16" in notes[3]


def test_a_shape_is_built_once_as_long_as_it_is_among_the_last_ones_used(built):
    paces = run._Paces(request(tuple((i, 1 + i) for i in range(run._KEPT + 1))))
    for i in range(run._KEPT):
        paces.at(i)
    paces.at(0)
    assert len(built) == run._KEPT
    paces.at(run._KEPT)  # the second one goes, as the first was used again
    paces.at(0)
    assert len(built) == run._KEPT + 1
    paces.at(1)
    assert built[-1] == (2, 1024)
    assert len(built) == run._KEPT + 2


def test_the_fullest_iteration_is_kept(built):
    paces = run._Paces(request(((1, 32), (2, 8))))
    for i in range(3):
        paces.at(i)
    assert paces.fullest.peak_reserved_gib == 32 * 1024


@pytest.mark.parametrize("starts", [(3, 1), (1, 1), (-1, 2)])
def test_a_schedule_rises(starts):
    wrong = tuple((start, 8) for start in starts)
    with pytest.raises(ForerunError, match="iterations of the batch schedule must rise from 0 or later"):
        run._Paces(request(wrong))
    with pytest.raises(ForerunError, match="iterations of the sequence length schedule must rise"):
        run._Paces(request((), wrong))
    assert run._Paces(request(((0, 8), (1, 8))))


def test_a_preset_is_a_file_of_its_name():
    name = preset_names()[0]
    assert preset_path(f" {name.upper()} ") == preset_path(name)
    assert preset_path(name).name == f"{name}.yaml"
    assert read_experiment(f" {name.upper()}").given == read_experiment(preset_path(name)).given
    with pytest.raises(UnknownName, match=name):
        preset_path("nothing")
    with pytest.raises(UnknownName, match="experiment or file"):
        read_experiment("nothing")
