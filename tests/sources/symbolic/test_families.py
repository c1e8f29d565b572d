"""Every known family builds a Program that holds exactly its parameters, whole and split by tensor parallelism."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ImpossiblePlan
from forerun.core.program.types import OpKind
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.layer_parameters import cross_elements, kind_parameters
from forerun.describe.model.parameters import compute_parameter_count, layer_counts, parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan, refuse
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build, staged_model

CONFIGS = Path(__file__).parents[2] / "describe" / "model" / "reference_configs_v5.json"
KNOWN = json.loads(CONFIGS.read_text())
CLUSTER = load_cluster("h100-sxm")
STACKS = ("torchtitan", "megatron-core")


def spec_of(name: str) -> ModelSpec:
    return spec_from_config(Fields(KNOWN[name]["config"], name), name)


def held(spec: ModelSpec, plan: Plan) -> int:
    """The parameters of all units, where a tied matrix counts once."""
    staged = staged_model(spec, plan, CLUSTER)
    units = [unit for stage in staged.stages for unit, _ in stage]
    return sum(unit.weights.total for unit in units) - spec.tied_embeddings * staged.kernels.tied_elements


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_units_hold_the_parameters_of_the_model(name: str) -> None:
    spec = spec_of(name)
    assert held(spec, Plan(seq_len=1024)) == parameter_count(spec)


def product_flops(spec: ModelSpec, plan: Plan) -> float:
    """The FLOPs of the matrix products of one rank in a step."""
    program = build(spec, plan, CLUSTER)
    (ranks,) = program.rank_classes
    ops = np.concatenate([program.blocks[block].op for block in ranks.block.tolist()])
    ops = ops[ops >= 0]
    return float(program.ops.flops[ops[program.ops.kind[ops] == OpKind.GEMM]].sum())


def expected_flops(spec: ModelSpec, tokens: int) -> float:
    """Returns six FLOPs for each parameter and token that it multiplies, those of an encoder included."""
    expected, encoder = 6.0 * tokens * compute_parameter_count(spec), spec.runs
    if encoder is None:
        return expected
    inside = sum(n * sum(kind_parameters(layer).values()) for layer, n in layer_counts(encoder.stack))
    read = sum(n * cross_elements(layer)[1] for layer, n in layer_counts(spec))
    stem, projector = (sum(n * m for n, m in products) for products in (encoder.stem, encoder.projector))
    return expected + 6.0 * (encoder.tokens * (inside + stem) + encoder.out_tokens * (projector + read))


def length_of(spec: ModelSpec) -> int:
    return min(1024, spec.max_positions or 1024)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_products_are_six_flops_for_each_active_parameter_and_token(name: str, stack: str) -> None:
    spec = spec_of(name)
    flops = product_flops(spec, Plan(seq_len=length_of(spec), dp_shard=2, stack=stack))
    assert flops == pytest.approx(expected_flops(spec, length_of(spec)), rel=0.025)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_tensor_parallelism_halves_a_family_or_is_refused_in_one_line(name: str) -> None:
    spec = spec_of(name)
    plan = Plan(seq_len=length_of(spec), dp_shard=2, tp=2)
    refusal = refuse(spec, plan, CLUSTER)
    if refusal is not None:
        assert "tp 2" in refusal.reason
        assert "\n" not in refusal.reason
        return
    assert product_flops(spec, plan) == pytest.approx(expected_flops(spec, length_of(spec)) / 2, rel=0.06)


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "mamba2-2.7b", "lfm2-1.2b", "falcon-h1-1.5b"])
def test_recurrences_are_not_cut_along_the_sequence(name: str) -> None:
    with pytest.raises(ImpossiblePlan, match=r"would cut the sequence that the .* layers of"):
        check_plan(spec_of(name), Plan(seq_len=1024, cp=2), CLUSTER)


def test_windows_and_chunks_cost_what_their_keys_cost() -> None:
    spec = spec_of("llama-3.1-405b")
    full = _attention_flops(spec)
    assert _attention_flops(replace(spec, attention_chunk=1024)) == pytest.approx(full / 4)
    assert _attention_flops(replace(spec, sliding_window=1024)) == pytest.approx(full / 2)


def _attention_flops(spec: ModelSpec) -> float:
    ops = build(spec, Plan(seq_len=4096), CLUSTER).ops
    return float(ops.flops[ops.is_attention & (np.array(ops.name) == "attention.kernel")].sum())


def test_recurrences_take_longer_with_tokens_and_not_with_their_square() -> None:
    spec = spec_of("mamba2-2.7b")
    short, long = (predict(spec, Plan(seq_len=n, dp_shard=8), CLUSTER).step_time_s for n in (8192, 32768))
    assert short * 3 < long < short * 4.2
