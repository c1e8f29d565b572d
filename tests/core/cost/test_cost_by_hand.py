"""Costs multiplied out by hand: matrix products, what a step's rows cost the host, periodic work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.common.units import PS_PER_S, PS_PER_US
from forerun.core.cost.attention import AttentionRates, attention_s
from forerun.core.cost.checkpoint import SavedState, load_s, save_cost
from forerun.core.cost.convolution import convolution_s
from forerun.core.cost.gemm import DGRAD, WGRAD, GemmRates, gemm_rates, gemm_s
from forerun.core.cost.periodic import (
    CheckpointConstants,
    GcConstants,
    MetricsConstants,
    ProfileConstants,
    SnapshotConstants,
    periodic_constants,
)
from forerun.core.cost.rates import rates_of
from forerun.core.cost.step_costs import Launching, step_costs
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Attention, Gemm
from forerun.core.program.types import Collective, OpTable
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.storage import Storage
from forerun.describe.cluster.types import Cluster, KernelRates
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack

# -- matrix products ---------------------------------------------------------------------------------------------------

RATES = GemmRates(
    flops_per_s=1e12,
    peak_flops_per_s=2e12,
    bytes_per_s=1e9,
    launch_s=1e-3,
    wave_outputs=100.0,
    depth_pad=10.0,
    slowdown=0.0,
    slowdown_tau_s=1.0,
    overlap=1.0,
    odd_rows=0.0,
    quant_passes=0.0,
    input_bytes=2.0,
    output_bytes=4.0,
    dgrad_rate=0.5,
    wgrad_rate=0.25,
    accumulate_exposed=0.75,
)
"""round numbers, with which computing and moving bytes do not overlap at all"""
M, N, K = 64, 128, 256
RESULT = M * N
COMPUTE_S = 2 * (RESULT + 100) * (K + 10) / 1e12
MOVE_S = ((M + N) * K * 2 + RESULT * 4) / 1e9


def product_s(rates: GemmRates = RATES, **options: float) -> float:
    return float(gemm_s(M, N, K, rates, **options))  # type: ignore[arg-type]


def test_a_product_launches_computes_and_moves_its_operands_and_result() -> None:
    assert product_s() == pytest.approx(1e-3 + COMPUTE_S + MOVE_S, rel=1e-12)
    assert product_s(replace(RATES, overlap=2.0)) == pytest.approx(1e-3 + (COMPUTE_S**2 + MOVE_S**2) ** 0.5, rel=1e-12)


def test_gradients_have_rates_of_their_own() -> None:
    assert product_s(role=DGRAD) == pytest.approx(1e-3 + COMPUTE_S / 0.5 + MOVE_S, rel=1e-12)
    assert product_s(role=WGRAD) == pytest.approx(1e-3 + COMPUTE_S / 0.25 + MOVE_S, rel=1e-12)


def test_a_stack_may_be_faster_up_to_the_peak() -> None:
    assert product_s(speed=1.5) == pytest.approx(1e-3 + COMPUTE_S / 1.5 + MOVE_S, rel=1e-12)
    assert product_s(speed=5.0) == pytest.approx(1e-3 + COMPUTE_S / 2 + MOVE_S, rel=1e-12)


def test_a_batch_has_one_last_wave_and_grouped_products_one_each() -> None:
    batch_s, grouped_s = (2 * (3 * RESULT + 100 * kernels) * (K + 10) / 1e12 for kernels in (1, 3))
    assert product_s(batch=3) == pytest.approx(1e-3 + batch_s + 3 * MOVE_S, rel=1e-12)
    assert product_s(batch=3, kernels=3) == pytest.approx(1e-3 + grouped_s + 3 * MOVE_S, rel=1e-12)


def test_a_result_that_is_added_to_a_buffer_is_read_and_written_there() -> None:
    operands_s, added_s = (M + N) * K * 2 / 1e9, 2 * RESULT * 4 / 1e9
    assert product_s(accumulate_bytes=4) == pytest.approx(1e-3 + COMPUTE_S + operands_s + added_s, rel=1e-12)
    hidden = replace(RATES, overlap=2.0)
    overlapped_s = (COMPUTE_S**2 + (operands_s + added_s / 4) ** 2) ** 0.5
    assert product_s(hidden, accumulate_bytes=4) == pytest.approx(1e-3 + overlapped_s + 0.75 * added_s, rel=1e-12)


def test_long_products_run_at_a_lower_clock() -> None:
    ideal_s = 2 * RESULT * K / 1e12
    slow = replace(RATES, slowdown=0.5, slowdown_tau_s=ideal_s)
    assert product_s(slow) == pytest.approx(1e-3 + COMPUTE_S * 1.25 + MOVE_S, rel=1e-12)


def test_odd_rows_and_quantising_cost_more() -> None:
    odd = replace(RATES, odd_rows=0.5)
    assert product_s(odd) == product_s()
    even_s, odd_s = (float(gemm_s(rows, N, K, RATES)) for rows in (64, 65))
    assert odd_s < float(gemm_s(65, N, K, odd)) < odd_s + 0.5 * (odd_s - 1e-3)
    assert even_s < odd_s
    assert product_s(replace(RATES, quant_passes=2.0)) == pytest.approx(product_s() + 2 * 3 * M * K / 1e9, rel=1e-12)


@pytest.mark.parametrize(
    ("m", "n", "k", "role", "slower"),
    [
        (64, 129, 256, 0, True),
        (64, 132, 256, 0, True),
        (64, 128, 257, 0, True),
        (65, 128, 256, 0, False),
        (65, 128, 256, WGRAD, True),
        (64, 128, 257, WGRAD, False),
        (64, 136, 256, 0, False),
    ],
)
def test_rows_that_do_not_start_at_16_bytes_are_slow(m: int, n: int, k: int, role: int, slower: bool) -> None:
    """Rows of a forward product have n and k elements of 2 bytes, those of a weight gradient n and m."""
    plain = float(gemm_s(m, n, k, RATES, role=role)) - 1e-3
    found = float(gemm_s(m, n, k, replace(RATES, unaligned=0.5), role=role)) - 1e-3
    assert found == pytest.approx(1.5 * plain if slower else plain)


@pytest.mark.parametrize(("unaligned", "is_padded"), [(0.05, False), (0.099, False), (0.109, True), (0.2, True)])
def test_compiled_products_are_padded_where_that_saves_more_than_a_tenth(unaligned: float, is_padded: bool) -> None:
    rates = replace(RATES, unaligned=unaligned, bytes_per_s=1e15)
    plain = float(gemm_s(64, 129, 256, replace(rates, unaligned=0.0))) - 1e-3
    copies = 2 * (64 + 129) * 256 * 2 / 1e15
    found = float(gemm_s(64, 129, 256, rates, pads=True)) - 1e-3
    assert found == pytest.approx(plain + copies if is_padded else (1 + unaligned) * plain)
    large = replace(rates, unaligned=0.2, bytes_per_s=1e9)  # the copies take longer than they save
    assert gemm_s(64, 129, 256, large, pads=True) == gemm_s(64, 129, 256, large)


# -- convolutions ------------------------------------------------------------------------------------------------------


def test_a_convolution_reads_and_writes_once_what_it_is_said_to() -> None:
    shape = Gemm(M, N, K, batch=3, operand_bytes=5000)
    compute = 2 * (3 * RESULT + 100) * (K + 10) / 1e12
    assert float(convolution_s(shape, RATES)) == pytest.approx(1e-3 + compute + (5000 + 3 * RESULT * 4) / 1e9)
    known = replace(shape, result_bytes=4 * 1024)
    depth = 3 * RESULT * K / 1024
    compute = 2 * (1024 + 100) * (depth + 10) / 1e12
    assert float(convolution_s(known, RATES)) == pytest.approx(1e-3 + compute + (5000 + 4096) / 1e9)
    compute = 2 * (1024 + 100) * (depth + 10) / 0.5e12
    assert float(convolution_s(replace(known, role=DGRAD), RATES)) == pytest.approx(1e-3 + compute + 9096 / 1e9)


def test_a_deep_weight_gradient_is_split_and_its_parts_added() -> None:
    """16 outputs of depth 64,000: sqrt(100 x 64,000 / (16 x 10)) = 200 parts."""
    shape = Gemm(4, 4, 64_000, role=WGRAD, operand_bytes=7000)
    compute = 2 * (16 * 200 + 100) * (64_000 / 200 + 10) / 0.25e12
    memory = (7000 + 16 * 4 + 16 * 200 * 8) / 1e9
    assert float(convolution_s(shape, RATES)) == pytest.approx(1e-3 + compute + memory)
    shallow = Gemm(40, 40, 10, role=WGRAD, operand_bytes=7000)
    compute = 2 * (1600 + 100) * (10 + 10) / 0.25e12
    assert float(convolution_s(shallow, RATES)) == pytest.approx(1e-3 + compute + (7000 + 1600 * 4) / 1e9)


def test_long_convolutions_run_at_a_lower_clock_and_stacks_may_be_faster() -> None:
    shape, rates = Gemm(4096, 4096, 4096, operand_bytes=0), replace(RATES, slowdown=0.5, slowdown_tau_s=0.05)
    ideal = 2 * 4096**3 / 1.5e12
    compute = 2 * (4096**2 + 100) * (4096 + 10) / 1.5e12 * (1 + 0.5 * ideal / (ideal + 0.05))
    assert float(convolution_s(shape, rates, 1.5)) == pytest.approx(1e-3 + compute + 4096**2 * 4 / 1e9)
    assert convolution_s(shape, rates, 9.0) == convolution_s(shape, rates, 2.0)


def test_elements_of_products_have_the_bytes_of_their_dtype_and_of_its_block_scales() -> None:
    """mxfp8 has a byte of scale for 32 elements, nvfp4 half a byte an element and a byte of scale for 16."""
    device = load_cluster("b200").device
    operands = {
        dtype: gemm_rates(device, dtype).input_bytes for dtype in ("tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
    }
    assert operands == {"tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
    assert [gemm_rates(device, dtype).output_bytes for dtype in operands] == [4, 2, 2, 2, 2, 2]


# -- attention ---------------------------------------------------------------------------------------------------------

FUSED = AttentionRates(
    flops_per_s=1e12,
    peak_flops_per_s=2e12,
    backward_rate=0.5,
    extra_keys=32.0,
    backward_extra_keys=32.0,
    launch_s=1e-3,
    tail_rows=300.0,
    slowdown=0.0,
    slowdown_tau_s=1.0,
    bytes_per_s=1e15,
    padded=2.0,
    calibrated=True,
    element_bytes=2.0,
)
"""round numbers, and a memory so fast that only computing counts"""


def attention_time(rates: AttentionRates = FUSED, causal: bool = False, backward: bool = False, **more: float) -> float:
    """2 sequences, 8 heads of size 64 (values of 32) and 4 of keys, 256 queries against 512 keys."""
    shape = Attention(*(np.float64(size) for size in (2, 8, 4, 256, 512, 64, causal, backward, 32)))
    return float(attention_s(shape, rates, **more))


PER_PAIR_S = 2 * 2 * (64 + 32) / 1e12
"""a query and a key meet in two products, on heads of twice their size"""


def test_attention_computes_all_pairs_some_extra_keys_and_an_uneven_end() -> None:
    pairs = 2 * 8 * 256 * (512 + 32) + 300 * (512 + 32)
    assert attention_time() == pytest.approx(1e-3 + pairs * PER_PAIR_S, rel=1e-9)
    assert attention_time(speed=1.5) == pytest.approx(1e-3 + pairs * PER_PAIR_S / 1.5, rel=1e-9)
    assert attention_time(speed=9.0) == pytest.approx(1e-3 + pairs * PER_PAIR_S / 2, rel=1e-9)


def test_a_causal_mask_leaves_out_half_of_the_square_on_the_diagonal() -> None:
    pairs = 2 * 8 * 256 * (512 - 128 + 32) + 300 * (512 + 32)
    assert attention_time(causal=True) == pytest.approx(1e-3 + pairs * PER_PAIR_S, rel=1e-9)


def test_its_backward_pass_has_two_and_a_half_times_the_products_at_a_rate_of_its_own() -> None:
    assert attention_time(backward=True) - 1e-3 == pytest.approx(2.5 / 0.5 * (attention_time() - 1e-3), rel=1e-9)


def test_long_attention_runs_at_a_lower_clock() -> None:
    ideal_s = 2 * 8 * 256 * 512 * PER_PAIR_S
    slow = attention_time(replace(FUSED, slowdown=0.5, slowdown_tau_s=ideal_s, tail_rows=0.0))
    assert slow - 1e-3 == pytest.approx(1.25 * 2 * 8 * 256 * (512 + 32) * PER_PAIR_S, rel=1e-9)


def test_attention_that_computes_at_once_moves_its_operands() -> None:
    """Queries and output, keys and values in two bytes; three times that backward."""
    fast = replace(FUSED, flops_per_s=1e30, peak_flops_per_s=1e30, bytes_per_s=1e9)
    size = 2 * 2 * (256 * 8 + 512 * 4) * (64 + 32)
    assert attention_time(fast) == pytest.approx(1e-3 + size / 1e9)
    assert attention_time(fast, backward=True) == pytest.approx(1e-3 + 3 * size / 1e9)


# -- rows of a step ----------------------------------------------------------------------------------------------------

H100 = load_cluster("h100-sxm")
STACK = replace(
    load_stack("torchtitan"),
    issue_us=6.0,
    compiled_issue_us=2.0,
    kernel_gap_us=1.0,
    launch_blocking_us=0.5,
    overlap_slowdown=0.25,
)
GROUPS = (CommGroup("tp", 8, 1, 8),)


def rows() -> OpTable:
    ops = OpTableBuilder()
    ops.memory("three kernels", 1e8, 1e8, launches=3)
    ops.collective("gather", Collective.ALL_GATHER, 0, 1e8)
    ops.host_copy("copy", 1e9)
    ops.gemm("product", 4096, 4096, 4096)
    return ops.build()


def test_launches_cost_the_host_by_who_issues_them() -> None:
    def issue_us(launching: Launching) -> list[float]:
        costs = step_costs(rows(), GROUPS, H100, STACK, launching, 8)
        return (costs.issue_ps / PS_PER_US).tolist()

    assert issue_us(Launching()) == [18, 6, 6, 6]
    assert issue_us(Launching(compiled=True)) == [6, 2, 2, 2]
    assert issue_us(Launching(compiled_ops=(0,))) == [6, 6, 6, 6]
    graphs = issue_us(Launching(cuda_graphs=True))
    assert graphs[0] == pytest.approx(3 * graphs[1])
    assert 0 < graphs[1] < 0.1


def test_python_around_an_operation_costs_the_host_once_and_only_where_it_runs() -> None:
    """Eager kernels have it, whatever their number; collectives and copies, compiled and captured ops don't."""
    stack, slow = replace(STACK, module_us=100.0), replace(H100, host_speed=0.5)

    def issue_us(launching: Launching, cluster: Cluster) -> list[float]:
        return (step_costs(rows(), GROUPS, cluster, stack, launching, 8).issue_ps / PS_PER_US).tolist()

    assert issue_us(Launching(), H100) == [118, 6, 6, 106]
    assert issue_us(Launching(), slow) == [218, 6, 6, 206]
    assert issue_us(Launching(compiled_ops=(0,)), H100) == [6, 6, 6, 106]
    assert issue_us(Launching(compiled=True), H100) == [6, 2, 2, 2]
    assert max(issue_us(Launching(cuda_graphs=True), H100)) < 1


def test_every_kernel_pays_the_gap_to_the_next_and_graphs_have_none() -> None:
    eager, graphs = (step_costs(rows(), GROUPS, H100, STACK, Launching(cuda_graphs=on), 8) for on in (False, True))
    assert ((eager.duration_ps - graphs.duration_ps) / PS_PER_US).tolist() == [3 * 1.5, 0, 0, 1.5]


def test_kernels_are_slowed_by_collectives_and_not_the_other_way_round() -> None:
    costs = step_costs(rows(), GROUPS, H100, STACK, Launching(), 8)
    assert costs.slow_compute.tolist() == [0.25, 0, 0, 0.25]
    assert costs.slow_network.tolist() == [0, 0, 0, 0]
    assert costs.network_op.tolist() == [False, True, False, False]


def test_rates_of_stack_and_cluster_multiply() -> None:
    cluster = replace(H100, rates=KernelRates(gemm=0.5, network=0.8))
    rates = rates_of(cluster, replace(STACK, gemm_rate=0.9, memory_rate=0.7, network_rate=0.5, attention_rate=0.6))
    assert (rates.gemm, rates.memory, rates.network, rates.attention) == pytest.approx((0.45, 0.7, 0.4, 0.6))


def test_plans_say_what_is_compiled() -> None:
    def launching(**fields: bool) -> Launching:
        return Launching.of_plan(load_model("llama-3.1-8b"), Plan(seq_len=8, **fields), STACK)  # type: ignore[arg-type]

    assert launching() == Launching()
    assert launching(compile=True) == Launching(compiled=True)
    assert launching(compile=True, graph_breaks=True) == Launching()
    assert launching(compile=True, cuda_graphs=True) == Launching(True, cuda_graphs=True)


def test_without_peer_access_a_collective_takes_the_way_through_host_memory() -> None:
    """100 MB of which 7 / 8 pass each GPU's way, at 2 GB/s for each of 8 GPUs that share it."""
    slow = replace(H100.links[0], peer_to_peer=False, host_path_bytes_per_s=2e9)
    costs = step_costs(rows(), GROUPS, replace(H100, links=(slow, H100.links[1])), STACK, Launching(), 8)
    assert costs.duration_ps[1] / PS_PER_S == pytest.approx(7 / 8 * 1e8 / 2e9)


# -- work that a step does now and then --------------------------------------------------------------------------------


def test_periodic_work_of_the_host() -> None:
    assert GcConstants(100, 50, 0.1, "").collection_s(4) == pytest.approx((100 + 4 * 50 * 0.1) * 1e-6)
    profiler = ProfileConstants(2, 3, 5, "")
    assert (profiler.recording_s(10), profiler.export_s(10)) == pytest.approx((20e-6, 150e-6))
    history = SnapshotConstants(2, 3, 100, "")
    assert (history.recording_s(10), history.dump_s(10), history.dump_s(1000)) == pytest.approx((20e-6, 30e-6, 300e-6))
    assert MetricsConstants(2, 3, 10, 100, "").log_s(1e-3) == pytest.approx(2e-3 + 130e-6)
    assert CheckpointConstants(1, 1, 1, 3.0, "").new_memory_bytes_per_s == 3e9


def test_tensors_take_host_time_when_they_are_saved_and_loaded() -> None:
    few, storage = SavedState(10e9, 80e9, 20e9, 160e9, 0), Storage(2e9, 8e9)
    many, constants = replace(few, tensors=1000), periodic_constants().checkpoint
    saved = [save_cost(state, storage, 20e9, "disabled").stall_s for state in (few, many)]
    assert saved[1] - saved[0] == pytest.approx(1000 * constants.save_us_per_tensor * 1e-6)
    staged = [save_cost(state, storage, 20e9, "async_with_pinned_mem").stall_s for state in (few, many)]
    assert staged[1] - staged[0] == pytest.approx(1000 * constants.stage_us_per_tensor * 1e-6)
    loaded = [load_s(state, storage, 20e9) for state in (few, many)]
    assert loaded[1] - loaded[0] == pytest.approx(1000 * constants.load_us_per_tensor * 1e-6)
    assert np.isclose(save_cost(few, storage, 20e9, "async").stall_s, 10e9 / min(20e9, constants.new_memory_gb_s * 1e9))
