"""What must hold in every cell of the mode table."""

from pathlib import Path

import pytest
from mode_table import (
    MODES,
    PARTS,
    REASONS,
    SEQUENCE_PARALLEL,
    kinds,
    peak,
    plan_of,
    resident,
    table,
    traced,
    work,
)

from forerun.common.errors import ForerunError
from forerun.core.program.types import Category, Collective, Phase

EXACT = 1e-9
WHOLE = "Llama"
"""the model that every run of the tests takes through every mode but CONTAINED"""
CONTAINED = ("2-D", "3-D", "4-D", "GPipe", "interleaved", "ZB1P")
"""modes of which 5-D, 1F1B and ZBV have all parts"""
SAME_REFUSAL = ("2-D", "3-D", "GPipe", "interleaved", "ZB1P", "ZBV", "CP all-gather")
"""modes that are refused where TP, 1F1B or CP ring is, before what differs between them begins"""


def cells(models):
    """Every mode of `models`. Each refusal once, and nearly every mode of one model, belong to every run; the rest is
    long."""
    return [
        pytest.param(model, mode, marks=[pytest.mark.slow] if _chosen(model, mode) else [pytest.mark.long])
        for model in models
        for mode in MODES
    ]


def _chosen(model, mode):
    if (model, mode) in REASONS:
        return mode not in SAME_REFUSAL
    return model == WHOLE and mode not in CONTAINED


def check_cell(model, mode):
    """The cell is refused with the error that the table explains, or traced with sane figures."""
    if MODES[mode].only not in ("", model):
        pytest.skip(f"only for {MODES[mode].only}")
    if (model, mode) in REASONS:
        with pytest.raises(ForerunError, match=REASONS[model, mode][0]):
            traced(model, mode)
        return
    program, plan = traced(model, mode), plan_of(mode)
    assert set(MODES[mode].kinds) <= kinds(program)
    if mode == "TP":
        assert ({Collective.ALL_GATHER, Collective.REDUCE_SCATTER} <= kinds(program)) == (model in SEQUENCE_PARALLEL)
    _check_work(model, mode, program, plan)
    _check_memory(model, mode, program, plan)


def _check_work(model, mode, program, plan):
    """Matrix products and attention are those of one GPU, for every micro batch, divided over what splits a sample."""
    alone = traced(model, "single GPU", MODES[mode].layers)
    expected = work(alone) * plan.n_microbatches / (plan.tp * plan.cp)
    found = work(program, (Phase.FORWARD, Phase.BACKWARD))
    if plan.tp > 1 and (model, "TP") in PARTS:
        assert expected < found < work(alone) * plan.n_microbatches
    else:
        assert found == pytest.approx(expected, rel=EXACT)
    again = work(program, (Phase.RECOMPUTE,))
    if plan.activation_checkpointing == "none":
        assert again == 0
    elif plan.activation_checkpointing == "full":
        assert again > 0.1 * expected


def _check_memory(model, mode, program, plan):
    alone = traced(model, "single GPU", MODES[mode].layers)
    whole = resident(alone, Category.PARAMETER)
    wide = 1 if plan.master_dtype == "bf16" else 2
    held = resident(program, Category.PARAMETER)
    if plan.offload == "params":
        assert held < 0.1 * whole
    elif plan.fsdp > 1 and plan.tp == plan.pp == plan.ep == 1:
        assert held == pytest.approx(whole * wide / plan.fsdp, rel=0.05)
    elif plan.tp > 1 or plan.pp > 1:
        assert held < whole * wide / plan.fsdp
    elif plan.dp_replicate > 1:
        assert held == pytest.approx(whole * wide, rel=0.05)
    if plan.activation_checkpointing != "none":
        assert peak(program) < peak(traced(model, "FSDP2"))


def check_documentation():
    """docs/tracing.md holds the table as it is."""
    text = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text(encoding="utf-8")
    section = text.partition("## What is traced")[2].partition("\n## ")[0]
    assert table() in section
