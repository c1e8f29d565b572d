"""A pipeline is traced with few layers in each stage, where those left out can be put in again."""

import json
from types import SimpleNamespace

import pytest

from forerun.describe.plan.plan import Plan

torch = pytest.importorskip("torch", reason="tracing needs torch")
module_program = pytest.importorskip("forerun.sources.trace.inside.parallelize.module_program")
PIPELINE = {"seq_len": 16, "pp": 2, "n_microbatches": 4}
EVERY_SECOND = {"activation_checkpointing": "full", "checkpoint_every": 2}


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.product = torch.nn.Linear(4, 4)


def layers_left(tmp_path, count, settings=(), per_stage=2, last=()):
    """The layers of a model of `count` after it is shortened, and how often they repeat as the parent is told."""
    with torch.device("meta"):
        ends = [torch.nn.Linear(4, 4) for _ in last]
        model = torch.nn.Sequential(torch.nn.ModuleList([*(Layer() for _ in range(count)), *ends]))
    described = tmp_path / "described.json"
    request = SimpleNamespace(
        plan=Plan(**PIPELINE | dict(settings)), per_stage=per_stage, depths=(1, 2), described=lambda rank: described
    )
    module_program._shorten(SimpleNamespace(job=SimpleNamespace(rank=0)), request, model)
    repeats = json.loads(described.read_text())["repeats"] if described.exists() else None
    return sum(isinstance(part, Layer) for part in model.modules()), repeats


@pytest.mark.parametrize(
    ("count", "settings", "left", "repeats"),
    [
        (16, {}, 4, 8),
        (10, {}, 4, 5),
        (24, EVERY_SECOND, 8, 6),
        (20, EVERY_SECOND, 8, 5),
        (24, {"virtual_stages": 2, "pp_schedule": "Interleaved1F1B"}, 8, 6),
    ],
)
def test_each_stage_keeps_as_many_layers_as_are_asked_for(tmp_path, count, settings, left, repeats):
    assert layers_left(tmp_path, count, settings) == (left, repeats)


@pytest.mark.parametrize(
    ("count", "settings", "others"),
    [
        (8, {}, {}),  # no more than twice the deepest variant
        (17, {}, {}),
        (18, EVERY_SECOND, {}),
        (16, {"layers_per_stage": (8, 8)}, {}),
        (16, {"balance_ends": True}, {}),
        (16, {}, {"per_stage": None}),
        (16, {}, {"last": ("a layer of another kind",)}),
    ],
)
def test_models_whose_stages_differ_stay_whole(tmp_path, count, settings, others):
    assert layers_left(tmp_path, count, settings, **others) == (count, None)
