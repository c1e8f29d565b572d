"""Compressed gradients on a predicted step: what they gain, where they break even, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from forerun.answers.analysis import compression
from forerun.answers.analysis.compression import METHODS, effect_of, of_text, under_compression
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError
from forerun.core.cost.gradient_exchange import wires_of
from forerun.core.network.patterns_collectives import AllGather, Nccl, ReduceScatter
from forerun.core.program.groups import CommGroup
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.complete import complete_plan
from forerun.interfaces.cli.main import run

FIELDS = {"seq_len": 1024, "zero_stage": 0, "stack": "megatron-core"}
SETUP = Setup(load_model("llama-3.2-1b"), complete_plan(FIELDS, 16), load_cluster("a100-40gb-sxm"))


@pytest.mark.parametrize("text", ["powersgd:4", "onebit", "topk:0.001"])
def test_compression_pays_below_its_break_even_bandwidth_and_not_above(text):
    how = of_text(text)
    effect = effect_of(SETUP, how)
    assert 0 < effect.wire_share < 1
    assert effect.residual_gib == pytest.approx(1.24e9 * SETUP.gradient_bytes / 2**30, rel=0.1)
    if effect.break_even_bytes_per_s is None:
        return
    for factor, pays in ((0.8, True), (1.25, False)):
        last = replace(SETUP.cluster.links[-1], bytes_per_s=factor * effect.break_even_bytes_per_s)
        setup = replace(SETUP, cluster=replace(SETUP.cluster, links=(*SETUP.cluster.links[:-1], last)))
        plain, compressed = (
            simulate_setup(each, folded=True).prediction.step_time_s for each in (setup, under_compression(setup, how))
        )
        assert (compressed < plain) == pays


def test_between_nodes_a_part_of_the_gradients_is_compressed():
    flat, levels = (effect_of(SETUP, of_text(text)) for text in ("onebit", "onebit@nodes"))
    assert levels.wire_share == flat.wire_share
    assert levels.residual_gib == pytest.approx(flat.residual_gib / 8, rel=0.5)
    assert "between nodes" in levels.method
    gathered, few = (effect_of(SETUP, of_text(text)) for text in ("int8", "int8@nodes"))
    assert few.step_s < gathered.step_s
    assert few.wire_share == pytest.approx(gathered.wire_share / 8)


def test_compression_between_nodes_adds_up():
    setup = under_compression(SETUP, of_text("int8_sum@nodes"))
    wires = wires_of(setup.cluster, 16)
    whole = CommGroup.on_mesh("dp_shard", 16, 1, 8)
    size = np.array([2.0**30])
    part = under_compression(SETUP, of_text("int8_sum")).pattern.seconds(
        size / 8, CommGroup.on_mesh("d", 2, 8, 8), wires
    )
    inside = CommGroup.on_mesh("d", 8, 1, 8)
    around = [each.nccl_lines(inside, wires).seconds(size) for each in (ReduceScatter(), AllGather())]
    assert setup.pattern.seconds(size, whole, wires) == pytest.approx(part + around[0] + around[1])
    assert setup.pattern.seconds(size, inside, wires) == pytest.approx(Nccl().seconds(size, inside, wires))
    apart = CommGroup.on_mesh("d", 2, 8, 8)
    assert setup.pattern.seconds(size, apart, wires) == setup.pattern.method.seconds(size, apart, wires)


def test_one_node_has_nothing_between_nodes():
    small = replace(SETUP, plan=complete_plan(FIELDS, 8))
    with pytest.raises(ForerunError, match="in one node; leave @nodes out"):
        effect_of(small, of_text("int8@nodes"))


def test_the_command_says_what_compression_does(capsys):
    command = ["predict", "llama-3.2-1b", "--cluster", "a100-40gb-sxm", "--gpus", "16", "--seq-len", "1024"]
    command += ["--zero-stage", "0", "--stack", "megatron-core", "--compress-gradients", "fp8_sum", "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gradient_compression"]["step_s"] == pytest.approx(found["step_time_s"], rel=1e-6)
    assert "arXiv" in found["gradient_compression"]["source"]


def test_every_method_says_what_it_does_to_convergence():
    said = yaml.safe_load(Path(compression.__file__).with_suffix(".yaml").read_text())
    assert set(said) == set(METHODS) - {"none", "fp16", "bf16"}
    assert all(each["caveat"] and "arXiv" in each["source"] for each in said.values())
    assert effect_of(SETUP, of_text("bf16")) is None
    assert under_compression(SETUP, of_text("bf16")).plan.reduce_dtype == "bf16"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("powersdg", "did you mean powersgd"),
        ("powersgd:x", "expected a method, powersgd:RANK or topk:DENSITY"),
        ("int8:4", "expected a method"),
        ("powersgd:inf", "expected a method"),
        ("int8@racks", "expected nodes after @, got 'racks'"),
        ("powersgd:4@nodes", "goes with methods that compress each element"),
        ("topk:2", "at most 1"),
    ],
)
def test_mistakes_are_one_line(text, words):
    with pytest.raises(ForerunError, match=words) as error:
        of_text(text)
    assert "\n" not in str(error.value)
    sharded = replace(SETUP, plan=complete_plan({"seq_len": 1024}, 16))
    with pytest.raises(ForerunError, match="reduce-scattered"):
        effect_of(sharded, of_text("int8"))
