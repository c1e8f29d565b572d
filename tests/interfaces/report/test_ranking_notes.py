"""What rankings say of plans that carry warnings."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.reading import TIGHT
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.wording import mark, notes_on


@pytest.fixture(scope="module")
def staged():
    """A plan on GPUs without peer access, which a prediction warns of."""
    model = replace(load_model("llama-3.2-1b"), n_layers=2)
    return predict(model, Plan(seq_len=512, dp_shard=8), load_cluster("rtx4090"))


def test_the_mark_is_for_full_memory_only(staged):
    assert staged.warnings
    assert mark(staged) == ""
    assert mark(replace(staged, warnings=(TIGHT, *staged.warnings))) == "!"


def test_every_warning_is_told_once(staged):
    tight = replace(staged, warnings=(TIGHT, *staged.warnings))
    assert notes_on([staged, staged, tight]) == [*staged.warnings, f"! {TIGHT}"]
    assert notes_on([replace(staged, warnings=())]) == []
