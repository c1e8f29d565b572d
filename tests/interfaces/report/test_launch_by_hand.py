"""Python text of launch scripts, and torchtitan's families of models, by known answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.launch import accelerate, megatron
from forerun.interfaces.report.launch.python_text import Call, Code, python_text
from forerun.interfaces.report.launch.tools import NOTES, launch_files
from forerun.interfaces.report.launch.torchtitan_model import family_of, shared_experts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Code("a.b"), "a.b"),
        ("a.b", '"a.b"'),
        ('a"\\', '"a\\"\\\\"'),
        (1.5, "1.5"),
        (None, "None"),
        ([1, "a", Code("b")], '[1, "a", b]'),
        ({"a": 1, "b": [2]}, '{"a": 1, "b": [2]}'),
        (Call("F", {"x": 1, "y": Call("G", {})}), "F(x=1, y=G())"),
    ],
)
def test_a_short_expression_is_one_line(value, text):
    assert python_text(value) == text


def test_a_line_of_more_than_100_columns_is_broken():
    assert python_text([Code("x" * 98)]) == f"[{'x' * 98}]"
    assert python_text([Code("x" * 99)]) == f"[\n    {'x' * 99},\n]"
    assert python_text([Code("x" * 96)], 2) == f"[{'x' * 96}]"
    assert python_text([Code("x" * 97)], 2) == f"[\n      {'x' * 97},\n  ]"
    assert python_text("x" * 200) == f'"{"x" * 200}"'
    long = Code("y" * 60)
    assert python_text(Call("F", {"a": {"k": long, "m": long}, "b": [1]})).splitlines() == [
        "F(", "    a={", f'        "k": {long.text},', f'        "m": {long.text},', "    },", "    b=[1],", ")",
    ]  # fmt: skip


class Refused(Exception):
    """What a fake translation raises."""


def translation(model):
    def refuse_model(why):
        raise Refused(why)

    return SimpleNamespace(model=model, refuse_model=refuse_model)


DENSE, QWEN, EXPERTS, LATENT = map(load_model, ("llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v3"))


def with_moe(model, **changes):
    return replace(model, moe=replace(model.moe, **changes))


@pytest.mark.parametrize(
    ("model", "family"),
    [
        (DENSE, "llama3"),
        (QWEN, "qwen3"),
        (EXPERTS, "qwen3"),
        (LATENT, "deepseek_v3"),
        (with_moe(LATENT, shared_ffn=3 * LATENT.moe.expert_ffn), "deepseek_v3"),
        (with_moe(LATENT, shared_ffn=0), "deepseek_v3"),
        (replace(DENSE, head_dim=2 * DENSE.head_dim), "qwen3"),
        (replace(DENSE, qk_norm=True), "qwen3"),
    ],
)
def test_families_of_torchtitan(model, family):
    assert family_of(translation(model)) == family


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (with_moe(LATENT, shared_ffn=LATENT.moe.expert_ffn + 1), "deepseek_v3 has no qk_norm"),
        (replace(LATENT, qk_norm=True), "deepseek_v3 has no qk_norm"),
        (replace(LATENT, tied_embeddings=True), "deepseek_v3 has no qk_norm"),
        (replace(LATENT, moe=None), "latent attention without them is not there"),
        (with_moe(EXPERTS, n_dense_layers=1), "experts in every layer and no shared expert"),
        (with_moe(EXPERTS, shared_ffn=64), "experts in every layer and no shared expert"),
        (replace(EXPERTS, qk_norm=False), "in no family"),
        (replace(DENSE, mlp="gelu"), "have no gelu feed-forward"),
        (replace(DENSE, norm="layernorm"), "have no layernorm"),
        (replace(DENSE, position="learned"), "have no learned positions"),
        (replace(DENSE, causal=False), "attention without a causal mask"),
        (replace(DENSE, qkv_bias=True), "have no biases"),
        (replace(DENSE, out_bias=True), "have no biases"),
        (replace(DENSE, mlp_bias=True), "have no biases"),
        (replace(DENSE, head_bias=True), "have no biases"),
        (replace(DENSE, token_types=2), "norms, types or heads of BERT"),
        (replace(DENSE, embedding_norm=True), "norms, types or heads of BERT"),
        (replace(DENSE, pooler=True), "norms, types or heads of BERT"),
        (replace(DENSE, head_transform=True), "norms, types or heads of BERT"),
        (replace(DENSE, block_norms=False), "layers without norms"),
        (replace(DENSE, final_norm=False), "layers without norms"),
        (replace(DENSE, sliding_window=128), "sliding window"),
        (with_moe(EXPERTS, capacity_factor=1.0), "capacity of experts"),
        (with_moe(EXPERTS, shared_gate=True, shared_ffn=8), "gate on shared experts"),
    ],
)
def test_what_torchtitan_has_not_is_named(model, why):
    with pytest.raises(Refused, match=why):
        family_of(translation(model))


def test_shared_experts_are_counted_in_experts():
    assert shared_experts(with_moe(LATENT, shared_ffn=3 * LATENT.moe.expert_ffn)) == 3


def test_ranks_of_several_nodes_meet_at_the_first_one(monkeypatch):
    monkeypatch.setattr(accelerate, "bash", lambda t, environment, words: words)
    monkeypatch.setattr(accelerate, "remark_nodes", lambda t, nodes: None)

    def words(world_size):
        t = SimpleNamespace(plan=SimpleNamespace(world_size=world_size), cluster=SimpleNamespace(node_size=8))
        return accelerate._script(t, [], ["--option"])

    alone = ["accelerate launch", f'--config_file "$HERE/{accelerate.CONFIG}"']
    last = ["--option", '"${SCRIPT:?your training script}"']
    assert words(8) == [*alone, *last]
    assert words(16) == [
        *alone, '--machine_rank "${NODE_RANK:-0}"', '--main_process_ip "${MASTER_ADDR:?the first node}"',
        '--main_process_port "${MASTER_PORT:-29500}"', *last,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "lines", "said"),
    [
        ({}, [], ("implied", "activation_offload")),
        ({"activation_offload": 0.5}, ["--cpu-offloading-num-layers 6"], ("give", "activation_offload")),
        ({"activation_offload": 0.5, "pp": 2}, [], ("note", "activation_offload")),
        ({"activation_offload": 0.5, "activation_checkpointing": "full"}, [], ("note", "activation_offload")),
        ({"activation_offload": 0.01}, [], ("note", "activation_offload")),
        ({"activation_offload": 1.0}, [], ("note", "activation_offload")),
        ({"offload": "optimizer"}, ["--offload-optimizer-states"], ("give", "offload")),
        ({"offload": "optimizer", "zero_stage": 2}, [], ("implied_if", False, "offload")),
        ({"offload": "optimizer", "fsdp": 1}, [], ("implied_if", False, "offload")),
        ({"offload": "none"}, [], ("implied_if", True, "offload")),
    ],
)
def test_what_megatron_offloads(fields, lines, said):
    usual = {"offload": "none", "fsdp": 8, "zero_stage": 1, "activation_offload": 0.0, "pp": 1}
    plan = SimpleNamespace(**{**usual, "activation_checkpointing": "none", **fields})
    told = []

    def tell(name):
        return lambda *arguments: told.append((name, *arguments[: 2 if name == "implied_if" else 1]))

    names = ("give", "note", "implied", "implied_if", "remark")
    t = SimpleNamespace(plan=plan, model=SimpleNamespace(n_layers=12), **{name: tell(name) for name in names})
    assert megatron._offload(t) == lines
    assert said in told


@pytest.mark.parametrize(
    ("fields", "noted"),
    [({"shard_min_mib": 5}, True), ({"shard_min_mib": 5, "zero_stage": 1}, False), ({}, False)],
)
def test_shards_of_large_parameters_alone_are_noted_where_parameters_are_sharded(fields, noted):
    plan = Plan(1024, dp_shard=8, stack="deepspeed", **fields)
    files = launch_files(plan, DENSE, load_cluster("h100-sxm"), "deepspeed")
    assert ("shard_min_mib" in files[NOTES]) == noted
