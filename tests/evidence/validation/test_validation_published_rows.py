"""Every published row is expressed or says why not, with plans that agree with what was measured."""

from __future__ import annotations

from collections import Counter

import pytest
from published import HARDWARE, MEASUREMENTS, MODELS, needs_measurements

from forerun.describe.model.architecture_table import load_architectures
from forerun.describe.model.parameters import parameter_count
from forerun.describe.stacks.catalog import UNKNOWN_STACK, stack_names
from forerun.evidence.validation.hardware import read_hardware
from forerun.evidence.validation.mapping import Inexpressible, Inputs, map_row
from forerun.evidence.validation.rows import Measurement, read_measurements
from forerun.evidence.validation.wording import named_stack

pytestmark = needs_measurements
Mapped = list[tuple[Measurement, Inputs | str]]


@pytest.fixture(scope="module")
def mapped() -> Mapped:
    models, hardware = load_architectures(MODELS), read_hardware(HARDWARE)
    found: Mapped = []
    for row in read_measurements(MEASUREMENTS):
        try:
            found.append((row, map_row(row, models, hardware)))
        except Inexpressible as error:
            found.append((row, str(error)))
    return found


def test_nearly_every_complete_row_is_expressed(mapped: Mapped) -> None:
    tier_a = [inputs for row, inputs in mapped if row.tier == "A"]
    reasons = Counter(inputs for inputs in tier_a if isinstance(inputs, str))
    share = 1 - reasons.total() / len(tier_a)
    print(f"tier A rows expressed: {len(tier_a) - reasons.total()} of {len(tier_a)} = {share:.1%}")
    assert share >= 0.97, reasons


def test_the_rest_gives_a_reason(mapped: Mapped) -> None:
    reasons = [inputs for _, inputs in mapped if isinstance(inputs, str)]
    assert all(reason and "\n" not in reason for reason in reasons)
    assert len(mapped) == len({row.id for row, _ in mapped}) > 500


def test_plans_agree_with_the_rows(mapped: Mapped) -> None:
    for row, inputs in mapped:
        if isinstance(inputs, str):
            continue
        assert inputs.plan.world_size == row.n_gpus, row.id
        assert inputs.plan.global_batch == row.global_batch_seqs or inputs.notes, row.id
        assert (inputs.model.n_layers, inputs.model.hidden, inputs.model.vocab) == (row.n_layers, row.hidden, row.vocab)
        per_stage = inputs.plan.layers_per_stage
        assert per_stage is None or sum(per_stage) == row.n_layers, row.id


def test_models_have_the_parameters_that_the_sources_count(mapped: Mapped) -> None:
    counts = {
        row.id: (parameter_count(inputs.model), row.n_params_source)
        for row, inputs in mapped
        if row.n_params_source and not isinstance(inputs, str)
    }
    assert len(counts) > 100
    assert {name: pair for name, pair in counts.items() if pair[0] != pair[1]} == {}


def test_complete_rows_run_on_known_software(mapped: Mapped) -> None:
    unknown = {row.framework for row, _ in mapped if row.tier == "A" and named_stack(row) is None}
    assert not unknown


def test_stacks_of_the_rows_are_shipped(mapped: Mapped) -> None:
    assert {named_stack(row) or UNKNOWN_STACK for row, _ in mapped} <= set(stack_names())
