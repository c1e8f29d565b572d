"""Saved Programs are predicted as the plans that they were built from."""

from dataclasses import replace

import numpy as np
import pytest
from saved_programs import H100, MODEL, plan_of, program_of, with_group_ranks

import forerun
from forerun.answers.analysis.predict import simulate
from forerun.answers.analysis.predict_program import predict_program, read_program
from forerun.answers.analysis.tables import HOST, kernel_times, module_times, stream_times
from forerun.common.errors import ForerunError
from forerun.core.cost.measured import Curve, KernelProfile, Measured, NetworkProfile
from forerun.core.network.on_topology import load_network
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.storage import save
from forerun.core.program.types import N_CATEGORIES, Category, Collective, Phase, Program, RankClass, Stream
from forerun.describe.cluster.catalog import load_cluster

PLANS = {
    "FSDP": dict(dp_shard=8),
    "TP": dict(dp_shard=4, tp=2, activation_checkpointing="full"),
    "PP": dict(dp_shard=2, pp=2, n_microbatches=8),
}
SAME = (
    *("step_time_s", "peak_allocated_gib", "peak_reserved_gib", "fits", "tokens_per_s_per_gpu", "bubble_s"),
    *("exposed_comm_s", "breakdown", "bottleneck", "memory_by_category_gib", "peak_owner", "n_gpus", "coverage"),
    *("dollars_per_billion_tokens", "network"),
)


@pytest.mark.parametrize("network", [None, "switch:8@450/300ns"])
@pytest.mark.parametrize("name", PLANS)
def test_a_program_is_predicted_as_its_plan(name, network):
    plan = plan_of(**PLANS[name])
    topology = None if network is None else load_network(network)
    found = predict_program(program_of(plan), H100, network=topology).prediction
    expected = simulate(MODEL, plan, H100, network=topology).prediction
    for figure in SAME:
        assert getattr(found, figure) == getattr(expected, figure), figure
    assert found.hfu == pytest.approx(expected.hfu, rel=1e-3)
    assert found.plan is None
    assert found.mfu == pytest.approx(expected.mfu, rel=1e-3)  # the formula counts norms' weights too


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_model_flops_leave_recomputation_out(checkpointing):
    plan = plan_of(dp_shard=8, activation_checkpointing=checkpointing)
    simulation = predict_program(program_of(plan), H100)
    expected = simulate(MODEL, plan, H100)
    assert simulation.model_flops_per_token == pytest.approx(expected.model_flops_per_token, rel=1e-3)


def test_the_nodes_of_another_cluster_count():
    nvl72 = load_cluster("gb200-nvl72")
    plan = plan_of(dp_shard=64, attention="flash2")  # the kernel of the recorded step, not that of the device
    found = predict_program(with_group_ranks(program_of(plan, H100)), nvl72).prediction
    assert found.step_time_s == simulate(MODEL, plan, nvl72).prediction.step_time_s


def test_a_folded_run_has_the_same_figures(monkeypatch):
    program = program_of(plan_of(dp_shard=2, pp=2, n_microbatches=16))
    whole = predict_program(program, H100, whole_timeline=True)
    monkeypatch.setattr("forerun.answers.analysis.predict_program._MANY_NODES", 0)
    folded = predict_program(program, H100)
    assert len(folded.flat) < len(whole.flat)
    for figure in ("step_time_s", "peak_allocated_gib", "mfu", "breakdown"):
        assert getattr(folded.prediction, figure) == pytest.approx(getattr(whole.prediction, figure))


# -- what meta says ----------------------------------------------------------------------------------------------------


def test_a_program_has_the_stack_that_its_imports_tell_unless_another_one_is_named():
    program = program_of(plan_of(dp_shard=8))
    told = replace(program, meta={**program.meta, "stack": "simple-fsdp"})
    named = predict_program(program, H100, stack="simple-fsdp").prediction
    found = predict_program(told, H100).prediction
    assert found.step_time_s == named.step_time_s != predict_program(program, H100).prediction.step_time_s
    assert predict_program(told, H100, stack="pytorch").prediction.step_time_s != found.step_time_s
    assert any(line.startswith("stack: simple-fsdp, whose") for line in found.explain)
    assert not any(line.startswith("stack: simple-fsdp, whose") for line in named.explain)


def test_compiled_ops_are_issued_faster():
    program = program_of(plan_of(dp_shard=8))
    everything = list(range(len(program.ops)))
    eager = predict_program(program, H100)
    compiled = predict_program(replace(program, meta={**program.meta, "compiled_ops": everything}), H100)
    launched = program.ops.launches > 0
    ratio = compiled.costs.issue_ps[launched] / eager.costs.issue_ps[launched]
    assert np.allclose(ratio, 2.5 / 6.0)


def test_guesses_of_the_source_are_warnings_and_explained():
    note = "aten.my_op: costed by its bytes"
    prediction = predict_program(program_of(plan_of(dp_shard=8), notes=[note]), H100, n_gpus=16).prediction
    assert note in prediction.warnings
    lines = "\n".join(prediction.explain)
    assert note in lines
    assert "traced with torch 2.13.0 at 8 ranks" in lines
    assert "scaled from 8 to 16 ranks" in lines


def test_without_meta_what_is_not_known_is_none(tmp_path):
    program = replace(program_of(plan_of(dp_shard=8)), meta={})
    path = tmp_path / "mine.program"
    save(program, path)
    prediction = forerun.predict_program(path, "h100-sxm").prediction
    assert (prediction.model, prediction.n_gpus) == ("mine", 8)
    assert prediction.tokens_per_s_per_gpu is None
    assert prediction.dollars_per_billion_tokens is None
    assert prediction.mfu is not None
    told = forerun.predict_program(path, "h100-sxm", tokens_per_step=8 * 4096).prediction
    assert told.tokens_per_s_per_gpu == pytest.approx(4096 / told.step_time_s)
    assert told.step_time_s == prediction.step_time_s


def test_a_program_of_one_kernel_needs_no_products():
    ops, block = OpTableBuilder(), BlockBuilder()
    block.node(ops.memory("copy", 1e9, 1e9))
    zero = np.zeros(1, np.int32)
    rank = RankClass("rank", 1, zero, zero, zero, np.zeros(N_CATEGORIES, np.int64))
    program = Program(ops.build(), (block.build("only"),), (rank,), (), (), ("all",))
    prediction = predict_program(program, H100).prediction
    assert prediction.mfu is None
    assert prediction.step_time_s > 0
    assert prediction.bottleneck == "memory_bound"


def test_means_over_ranks_weigh_classes_by_their_ranks():
    ops, busy, idle = OpTableBuilder(), BlockBuilder(), BlockBuilder()
    busy.node(ops.gemm("product", 4096, 4096, 4096))
    idle.node(ops.memory("copy", 1e3, 1e3))
    step = np.zeros(1, np.int32)
    nothing = np.zeros(N_CATEGORIES, np.int64)
    classes = (RankClass("one", 1, step, step, step, nothing), RankClass("others", 3, step + 1, step, step, nothing))
    program = Program(ops.build(), (busy.build("busy"), idle.build("idle")), classes, (), (), ("all",))
    prediction = predict_program(program, H100).prediction
    peak = H100.device.peak_flops["bf16"]
    assert prediction.hfu == pytest.approx(2 * 4096**3 / 4 / prediction.step_time_s / peak)
    assert prediction.mfu == pytest.approx(prediction.hfu)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n_gpus=12), "12 GPUs"),
        (dict(tokens_per_step=0), "tokens per step must be at least 1"),
        (dict(network=load_network("switch:4@450/300ns")), "4 NPUs"),
    ],
)
def test_impossible_questions_say_why(options, message):
    with pytest.raises(ForerunError, match=message):
        predict_program(
            program_of(plan_of(dp_shard=4, tp=2) if "n_gpus" not in options else plan_of(tp=8)), H100, **options
        )


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "torn.program"
    save(program_of(plan_of(dp_shard=8)), path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ForerunError, match=r"torn\.program"):
        read_program(path)
    save(program_of(plan_of(dp_shard=8), world_size=-1), path)
    with pytest.raises(ForerunError, match=r"torn\.program: .*world_size"):
        read_program(path)


# -- measurements ------------------------------------------------------------------------------------------------------


def one_layer() -> Program:
    """A product, then an all-gather over 8 ranks, 16 MiB."""
    ops, block = OpTableBuilder(), BlockBuilder()
    product = block.node(ops.gemm("product", 4096, 4096, 4096))
    gather = ops.collective("gather", Collective.ALL_GATHER, 0, 2.0**24)
    block.node(gather, Stream.GATHER, Phase.FORWARD, after=(product,))
    block.temporary(2**24, 1, Category.COMMUNICATION)
    step = np.zeros(1, np.int32)
    rank = RankClass("rank", 8, step, step, step, np.zeros(N_CATEGORIES, np.int64))
    return Program(ops.build(), (block.build("layer"),), (rank,), (CommGroup("dp", 8, 1, 8),), (), ("all",))


def test_measurements_replace_shipped_times():
    kernels = KernelProfile(gemm={("bf16", 4096, 4096, 4096, 1): 5e-3})
    network = NetworkProfile({(Collective.ALL_GATHER, 8, 1): Curve((2.0**24,), (7e-3,))})
    shipped = predict_program(one_layer(), H100)
    measured = predict_program(one_layer(), H100, measured=Measured(kernels, network))
    assert shipped.prediction.missing is None
    assert measured.prediction.missing == ()
    assert measured.prediction.coverage == 1.0
    # the gap to the next kernel comes on top, as for every kernel
    assert measured.prediction.step_time_s == pytest.approx(12e-3 + 6e-6 + 1e-6, rel=1e-6)
    assert measured.prediction.step_time_s > 4 * shipped.prediction.step_time_s


def test_what_measurements_lack_is_listed_by_time_and_comes_from_the_model():
    shipped = predict_program(one_layer(), H100).prediction
    nothing = predict_program(one_layer(), H100, measured=Measured(KernelProfile(), NetworkProfile({}))).prediction
    assert nothing.step_time_s == shipped.step_time_s
    assert len(nothing.missing) == 2
    assert nothing.missing[0].startswith("gemm m 4096 n 4096 k 4096 batch 1 bf16: not measured")
    assert nothing.missing[1].startswith("all_gather over 8 ranks, stride 1: not measured")
    only_network = predict_program(one_layer(), H100, measured=Measured(network=NetworkProfile({}))).prediction
    assert len(only_network.missing) == 1


def test_a_plan_takes_measurements_too():
    plan = plan_of(dp_shard=8)
    slow = Measured(network=NetworkProfile({(Collective.ALL_GATHER, 8, 1): Curve((1e6, 1e9), (1.0, 2.0))}))
    found = forerun.predict(MODEL, plan, H100, measured=slow)
    assert found.step_time_s > 3.0
    assert any(line.startswith("reduce_scatter over 8 ranks") for line in found.missing)
    assert forerun.predict(MODEL, plan, H100).missing is None


def test_a_search_with_measurements_finds_what_an_exhaustive_one_finds():
    quick = Measured(network=NetworkProfile({(Collective.ALL_REDUCE, 2, 1): Curve((1e3, 1e9), (1e-6, 1e-4))}))
    fixed = dict(tp=[1, 2], pp=1, cp=1, activation_checkpointing="none")
    options = dict(fixed=fixed, measured=quick, keep=3, workers=1)
    short = forerun.search(MODEL, H100, 4, 4096, 8, **options)
    whole = forerun.search(MODEL, H100, 4, 4096, 8, exhaustive=True, **options)
    assert [each.plan for each in short.top(3)] == [each.plan for each in whole.top(3)]
    assert [each.step_time_s for each in short.top(3)] == [each.step_time_s for each in whole.top(3)]


# -- tables ------------------------------------------------------------------------------------------------------------


def test_tables_add_up():
    simulation = predict_program(program_of(plan_of(dp_shard=8)), H100, whole_timeline=True)
    spent = (simulation.timeline.end_ps - simulation.timeline.start_ps).sum() / 1e12
    kernels, streams = kernel_times(simulation, 0), stream_times(simulation, 0)
    modules = module_times(simulation, 0, 1)
    assert sum(row.total_s for row in kernels) == pytest.approx(spent)
    assert sum(row.busy_s for row in streams if row.name != HOST) == pytest.approx(spent)
    assert sum(row.total_s for row in modules) == pytest.approx(spent)
    assert sum(row.share for row in modules) == pytest.approx(1.0)
    assert [row.total_s for row in kernels] == sorted((row.total_s for row in kernels), reverse=True)
    assert streams[-1].name == HOST
    for row in modules:
        assert sum(row.by_phase_s.values()) == pytest.approx(row.total_s)
    deeper = module_times(simulation, 0, 2)
    assert {row.name.split(".")[0] for row in deeper} == {row.name for row in modules}
    products = {row.name: row for row in kernels}["head"]
    assert (products.kind, products.count) == ("gemm", 1)


# -- traces ------------------------------------------------------------------------------------------------------------


def gathered(stream, **meta) -> Program:
    """A copy and a gather on `stream`, which a product waits for."""
    ops, block = OpTableBuilder(), BlockBuilder()
    copy = block.node(ops.memory("copy_in", 1e6, 1e6), stream)
    gather = block.node(ops.collective("gather", Collective.ALL_GATHER, 0, 1e9), stream, after=(copy,))
    block.node(ops.gemm("product", 1024, 1024, 1024), after=(gather,))
    step = np.zeros(1, np.int32)
    rank = RankClass("rank", 8, step, step, step, np.zeros(N_CATEGORIES, np.int64))
    return Program(ops.build(), (block.build("layer"),), (rank,), (CommGroup("dp", 8, 1, 8),), (), ("all",), meta)


@pytest.mark.parametrize("stream", [Stream.GATHER, Stream.PP_SEND_BACK, Stream.TP])
def test_a_data_parallel_collective_counts_as_such_on_any_stream(stream):
    prediction = predict_program(gathered(stream, data_parallel=[0]), H100).prediction
    assert prediction.bottleneck == "exposed_data_parallel"


def test_without_knowing_its_groups_a_collective_counts_by_its_stream():
    assert predict_program(gathered(Stream.TP), H100).prediction.bottleneck == "exposed_tensor_parallel"


def test_a_program_that_names_no_stack_and_no_samples_says_nothing_of_them():
    found = predict_program(program_of(plan_of(dp_shard=8)), H100).prediction
    assert not any(line.startswith("stack: ") for line in found.explain)
    assert found.samples_per_s_per_gpu is None


def test_samples_of_a_step_are_shared_by_all_gpus():
    program = program_of(plan_of(dp_shard=8), samples_per_step=24, tokens_per_step=None)
    found = predict_program(program, H100).prediction
    assert found.samples_per_s_per_gpu == pytest.approx(3 / found.step_time_s)
