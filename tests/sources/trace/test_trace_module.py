"""trace_module: PyTorch's own parallelism on a module, and few layers for many."""

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from forerun.common.errors import ForerunError  # noqa: E402
from forerun.core.program.counts import op_counts  # noqa: E402
from forerun.core.program.kinds import OpKind  # noqa: E402
from forerun.core.program.types import Collective, Phase  # noqa: E402
from forerun.describe.plan.plan import Plan  # noqa: E402
from forerun.interfaces.api import predict_program  # noqa: E402
from forerun.sources.trace.module import trace_module  # noqa: E402

_FILE = Path(__file__).parents[3] / "examples" / "llama" / "model.py"
_SPEC = importlib.util.spec_from_file_location("llama_example", _FILE)
llama = importlib.util.module_from_spec(_SPEC)
sys.modules["llama_example"] = llama
_SPEC.loader.exec_module(llama)

SEQ = 512
SMALL = llama.LlamaConfig(dim=128, n_layers=6, n_heads=4, n_kv_heads=4, ffn_dim=256, vocab_size=512, seq_len=SEQ)
FEW = replace(SMALL, n_layers=2)
"""for what needs no folded layers"""
MATMULS = ("mm", "addmm", "bmm")


def tokens():
    return torch.empty(1, SEQ, dtype=torch.int64, device="meta")


@cache
def traced(fold=True, config=SMALL, **fields):
    return trace_module(lambda: llama.Llama(config), tokens, Plan(seq_len=SEQ, **fields), fold=fold)


def by_name(program, phases=tuple(Phase), role=0):
    counts = Counter()
    for name, count in zip(program.ops.name, op_counts(program, phases)[role].tolist(), strict=True):
        counts[name] += count
    return +counts


def collectives(program, role=0):
    """(kind, group) -> how often, and bytes."""
    ops, found = program.ops, {}
    for i, count in enumerate(op_counts(program)[role].tolist()):
        if count and ops.kind[i] == OpKind.COLLECTIVE:
            key = (Collective(ops.collective[i]).name, program.groups[ops.group[i]].axis)
            times, size = found.get(key, (0, 0))
            found[key] = (times + count, size + count * int(ops.bytes_comm[i]))
    return found


MODES = {
    "FSDP2": {"dp_shard": 8},
    "TP and SP": {"tp": 4},
    "FSDP2 and TP": {"dp_shard": 2, "tp": 4},
    "full checkpointing": {"dp_shard": 8, "activation_checkpointing": "full"},
    "all of them": {"dp_shard": 2, "tp": 4, "activation_checkpointing": "full"},
}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=pytest.mark.slow if mode == "all of them" else pytest.mark.long) for mode in MODES],
)
def test_a_folded_step_is_the_whole_one(mode):
    fields = MODES[mode]
    folded, whole = traced(**fields), traced(fold=False, **fields)
    assert not [note for note in folded.meta["notes"] if "whole model" in note]
    assert by_name(folded) == by_name(whole)
    assert collectives(folded) == collectives(whole)
    one, other = predict_program(folded, "h100-sxm"), predict_program(whole, "h100-sxm")
    assert one.prediction.step_time_s == other.prediction.step_time_s
    assert [m.peak_bytes for m in one.memory] == [m.peak_bytes for m in other.memory]
    assert np.array_equal(one.timeline.end_ps, other.timeline.end_ps)


@pytest.mark.slow
def test_fsdp_gathers_and_reduces_every_unit_once():
    found = collectives(traced(config=FEW, dp_shard=8))
    units = FEW.n_layers + 2  # embedding, layers, norm with output
    weights = sum(p.numel() for p in llama.Llama(FEW).parameters())
    gathered, gathered_bytes = found["ALL_GATHER", "dp_shard"]
    reduced, reduced_bytes = found["REDUCE_SCATTER", "dp_shard"]
    ends = weights - FEW.n_layers * (weights_of_layer := sum(p.numel() for p in llama.Block(FEW, 0).parameters()))
    # Layers and the embedding are gathered again in backward; norm and output, which come last, are kept.
    head = FEW.dim * FEW.vocab_size + FEW.dim
    assert gathered == 2 * FEW.n_layers + 3 - (ends - head == 0)
    assert gathered_bytes == 2 * (2 * FEW.n_layers * weights_of_layer + 2 * (ends - head) + head)
    assert (reduced, reduced_bytes) == (units, 4 * weights)


@pytest.mark.slow
def test_tied_ends_are_one_unit_that_is_gathered_once():
    def tied():
        model = llama.Llama(FEW)
        model.output.weight = model.tok_embeddings.weight
        return model

    found = collectives(trace_module(tied, tokens, Plan(seq_len=SEQ, dp_shard=8)))
    ends = FEW.dim * FEW.vocab_size + FEW.dim
    layers = FEW.n_layers * sum(p.numel() for p in llama.Block(FEW, 0).parameters())
    assert found["ALL_GATHER", "dp_shard"] == (2 * FEW.n_layers + 1, 2 * (2 * layers + ends))
    assert found["REDUCE_SCATTER", "dp_shard"] == (FEW.n_layers + 1, 4 * (layers + ends))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [("auto", 4), ("bf16", 2)])
def test_ddp_sends_gradients_in_the_dtype_of_the_plan(dtype, width):
    found = collectives(traced(config=FEW, fold=False, dp_replicate=2, zero_stage=0, reduce_dtype=dtype))
    weights = sum(p.numel() for p in llama.Llama(FEW).parameters())
    sizes = {size for (kind, _), (_, size) in found.items() if kind == "ALL_REDUCE"}
    assert sizes == {width * weights}


@pytest.mark.slow
def test_tensor_parallelism_gathers_and_scatters_around_attention_and_feed_forward():
    forward = by_name(traced(config=FEW, tp=4), (Phase.FORWARD,))
    # Two gathers and two scatters a layer; embedding scatters, output gathers, and the loss reduces three times.
    assert forward["all_gather"] == 2 * FEW.n_layers + 1
    assert forward["reduce_scatter"] == 2 * FEW.n_layers + 1
    assert sum(forward[name] for name in MATMULS) == 7 * FEW.n_layers + 1


@pytest.mark.slow
def test_compiled_layers_under_tensor_parallelism_communicate_what_eager_ones_do():
    assert collectives(traced(config=FEW, tp=4, compile=True)) == collectives(traced(config=FEW, tp=4))


@pytest.mark.slow
def test_full_checkpointing_runs_every_layer_twice():
    plain = traced(config=FEW, dp_shard=8)
    program = traced(config=FEW, dp_shard=8, activation_checkpointing="full")
    again = by_name(program, (Phase.RECOMPUTE,))
    assert sum(again[name] for name in MATMULS) == 7 * FEW.n_layers
    assert by_name(program, (Phase.FORWARD,)) == by_name(plain, (Phase.FORWARD,))


@pytest.mark.slow
def test_selective_checkpointing_recomputes_every_second_product():
    program = traced(config=FEW, dp_shard=8, activation_checkpointing="selective")
    again = by_name(program, (Phase.RECOMPUTE,))
    assert sum(again[name] for name in MATMULS) == 3 * FEW.n_layers
    assert not any("attention" in name for name in again)


@pytest.mark.slow
def test_ddp_reduces_all_gradients_and_hsdp_only_shards():
    weights = sum(p.numel() for p in llama.Llama(FEW).parameters())
    found = collectives(traced(config=FEW, dp_replicate=8, zero_stage=0))
    assert found["ALL_REDUCE", "dp_replicate"][1] >= 4 * weights
    found = collectives(traced(config=FEW, dp_replicate=2, dp_shard=4))
    assert found["ALL_REDUCE", "dp_replicate"] == (FEW.n_layers + 2, weights)


@pytest.mark.slow
def test_stages_of_a_pipeline_send_what_others_receive():
    program = traced(pp=2, n_microbatches=4, pp_schedule="ZBV", virtual_stages=2)
    assert len(program.rank_classes) == 2
    sent = [by_name(program, role=role)["send"] for role in range(2)]
    received = [by_name(program, role=role)["recv"] for role in range(2)]
    assert sent == received[::-1]
    assert sum(sent) == 2 * 4 * 2  # activations and gradients of 4 micro batches, between ranks down and up again
    matmuls = [sum(by_name(program, role=role)[name] for name in MATMULS) for role in range(2)]
    assert sum(matmuls) == 3 * 4 * (7 * SMALL.n_layers + 1)


@pytest.mark.long
def test_a_folded_pipeline_is_the_whole_one():
    config = replace(SMALL, n_layers=18)
    fields = {"config": config, "pp": 2, "n_microbatches": 2}
    folded, whole = traced(**fields), traced(fold=False, **fields)
    for role in range(2):
        assert by_name(folded, role=role) == by_name(whole, role=role)
        assert collectives(folded, role) == collectives(whole, role)
    one, other = predict_program(folded, "h100-sxm"), predict_program(whole, "h100-sxm")
    assert np.array_equal(one.timeline.end_ps, other.timeline.end_ps)
    assert [m.peak_bytes for m in one.memory] == [m.peak_bytes for m in other.memory]


@pytest.mark.slow
def test_a_ring_passes_keys_and_values_on():
    program = traced(config=FEW, cp=2, cp_method="ring")
    # Over two ranks keys and values move once in forward and once in backward, their fp32 gradients twice.
    assert by_name(program)["all_to_all"] == 4 * FEW.n_layers
    keys_and_values = 2 * (SEQ // 2) * FEW.dim
    assert collectives(program)["ALL_TO_ALL", "cp"][1] == FEW.n_layers * 2 * keys_and_values * (2 + 4)


@pytest.mark.slow
def test_tokens_travel_to_experts_and_back():
    config = replace(SMALL, n_experts=8, n_layers=2)
    program = traced(config=config, dp_shard=4, ep=2)
    found = collectives(program)
    copies = SEQ * config.top_k
    # Counts once; tokens there and back, and again for their gradients. Routing is balanced.
    assert found["ALL_TO_ALL", "ep"] == (
        config.n_layers * 5,
        config.n_layers * (4 * copies * config.dim * 2 + config.n_experts * 8),
    )
    experts = 3 * config.n_experts * config.dim * config.ffn_dim
    assert found["REDUCE_SCATTER", "dp_expert"] == (config.n_layers, config.n_layers * experts // 2 * 4)
    products = by_name(program, (Phase.FORWARD,))["_grouped_mm"]
    assert products == 3 * config.n_layers


@pytest.mark.slow
def test_keys_that_match_nothing_are_told_and_the_caller_stays_as_it_was():
    feed_forward = {f"layers.*.feed_forward.w{i}": "rowwise" if i == 2 else "colwise" for i in (1, 2, 3)}
    new, available, threads = torch.nn.Parameter.__new__, torch.cuda.is_available(), torch.get_num_threads()

    def model():
        assert torch.get_num_threads() == 1, "threads of autograd's engine would race in a forked process"
        return llama.Llama(replace(SMALL, n_layers=2))

    torch.set_num_threads(2)
    program = trace_module(
        model,
        tokens,
        Plan(seq_len=SEQ, tp=2),
        tp_plan=feed_forward | {"layers.*.attention.w_query": "colwise"},
    )
    assert program.meta["notes"] == ["tp_plan: 'layers.*.attention.w_query' matches no submodule of Llama; skipped"]
    assert by_name(program, (Phase.FORWARD,))["all_reduce"] == 2
    with pytest.raises(ForerunError, match=r"none of its 1 keys matches a submodule of Llama"):
        trace_module(
            lambda: llama.Llama(replace(SMALL, n_layers=2)),
            tokens,
            Plan(seq_len=SEQ, tp=2),
            tp_plan={"layers.*.attention.w_query": "colwise"},
        )
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert torch.nn.Parameter.__new__ is new
    assert torch.cuda.is_available() == available
    assert torch.ones(3).sum().item() == 3


@pytest.mark.slow
def test_a_model_that_fails_is_one_clear_error():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x) @ torch.empty(9, 9, device=x.device)

    with pytest.raises(ForerunError, match=r"aten\.mm.*test_trace_module\.py:\d+"):
        trace_module(Broken, lambda: torch.empty(4, 8), Plan(seq_len=8))
