"""ZeRO-3 as DeepSpeed of 2021 runs it: each parameter by itself, through lists of pieces, the host waiting."""

from dataclasses import replace

import numpy as np

from forerun.answers.analysis.predict import predict
from forerun.core.program.types import Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build

MODEL = replace(load_model("gpt3-175b"), n_layers=2)
CLUSTER = load_cluster("a100-80gb")
PLAN = Plan(seq_len=2048, dp_shard=64, activation_checkpointing="full", precision="fp16", stack="deepspeed")


def runs(program: Program, name: str) -> dict[float, int]:
    """How often ops of this name run in a step, by the bytes that they move or write."""
    found: dict[float, int] = {}
    steps = program.rank_classes[0]
    for number, count in enumerate(np.bincount(steps.block, minlength=len(program.blocks))):
        for op in program.blocks[number].op:
            if program.ops.name[op] == name:
                size = float(max(program.ops.bytes_comm[op], program.ops.bytes_written[op]))
                found[size] = found.get(size, 0) + int(count)
    return found


def test_small_parameters_stay_and_far_ones_are_gathered_again_after_recomputation():
    h = MODEL.hidden
    matrices = {2.0 * h * n for n in (h, 3 * h, 4 * h)}
    again = runs(build(MODEL, PLAN, CLUSTER), "layer.gather")
    assert set(again) == matrices
    # two layers, forward and backward; all but the last matrix are used again only after 10**9 elements
    assert again == {2.0 * h * h: 6, 2.0 * h * 3 * h: 6, 2.0 * h * 4 * h: 10}
    kept = runs(build(MODEL, replace(PLAN, activation_checkpointing="none"), CLUSTER), "layer.gather")
    assert kept == {2.0 * h * h: 4, 2.0 * h * 3 * h: 4, 2.0 * h * 4 * h: 8}
    assert len(runs(build(MODEL, PLAN, CLUSTER), "layer.reduce")) > 3, "vectors are reduced like matrices"


def test_every_piece_of_a_list_is_copied_and_costs_the_host():
    program = build(MODEL, PLAN, CLUSTER)
    assert runs(program, "layer.gather.pieces") == runs(program, "layer.gather")
    pieces = [i for i, name in enumerate(program.ops.name) if name.endswith((".pieces", ".cut"))]
    assert set(program.ops.launches[pieces].tolist()) == {64}
    plain = replace(load_stack("deepspeed"), list_collectives=False)
    assert not any(name.endswith(".pieces") for name in build(MODEL, PLAN, CLUSTER, plain).ops.name)
    few, many = (predict(MODEL, replace(PLAN, dp_shard=n), CLUSTER).step_time_s for n in (64, 1024))
    assert many > 1.5 * few
