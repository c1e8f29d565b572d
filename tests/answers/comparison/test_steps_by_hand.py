"""A step of stated times in parts and lines; ranks, modules and corrections of steps that are written by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.answers.comparison import corrections, ranks
from forerun.answers.comparison.compare import Comparison
from forerun.answers.comparison.corrections import Corrections
from forerun.answers.comparison.matching import Pair, pairs_of
from forerun.answers.comparison.ran_step import COPIES, EXCHANGES, HELD, HOST, WAITING, Line, RanStep, ran_step
from forerun.answers.comparison.ranks import PartDifference, RankDifference, label_of, parts_of, slowest_of
from forerun.core.cost.measured_files import KERNEL_COLUMNS, NETWORK_COLUMNS
from forerun.core.engine.simulate import Timeline
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Attention, GemmRole, Scan
from forerun.core.program.origin import PROFILE
from forerun.core.program.types import Collective, FlatProgram, Phase, Program, RankClass, Stream
from forerun.describe.cluster.types import KernelRates
from forerun.describe.plan.plan import Plan

US_PS = 1_000_000
F, B, U = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
MODULES = ("layers.0.mlp", "layers.1.norm", "layers.12.mlp", "head")
GROUPS = (CommGroup("fsdp", 8, 1, 8), CommGroup("pp", 4, 4, 1, 8), CommGroup("alone", 1, 1, 1))
BACKWARD = Attention(
    batch=2, heads=4, kv_heads=2, seq_q=128, seq_kv=256, head_dim=64, v_head_dim=32, causal=1, backward=1
)


def rank_class(name: str, n_ranks: int = 1, resident: int = 0) -> RankClass:
    no = np.zeros(0, np.int32)
    return RankClass(name, n_ranks, no, no, no, np.array([resident, 2 * resident], np.int64))


def program_of(ops: OpTableBuilder, *classes: RankClass, **meta: object) -> Program:
    return Program(ops.build(), (), classes or (rank_class("rank"),), GROUPS, (), MODULES, dict(meta))


def ran(
    program: Program, nodes: list[tuple[Any, ...]], done_us: float, step_us: float, slowing: float = 0.25
) -> RanStep:
    """Nodes are (op, stream, phase, module, start, end, issued, node before or None, whether it meets), times in us."""
    op, stream, phase, module, start, end, issued, before, meets = zip(*nodes, strict=True)
    pred = [number for number in before if number is not None]
    flat = FlatProgram(
        n_ops=len(program.ops), class_ptr=np.array([0, len(nodes), len(nodes)]), op=np.array(op, np.int32),
        stream=np.array(stream, np.int8), phase=np.array(phase, np.int8), step=np.zeros(len(nodes), np.int32),
        module=np.array(module, np.int32), pred=np.array(pred, np.int32),
        pred_ptr=np.cumsum([0, *(number is not None for number in before)]),
        meeting=np.array([0 if one else -1 for one in meets], np.int32), meeting_size=np.array([2], np.int32),
        sync=np.zeros(len(nodes), np.int8), meeting_channel=np.zeros(1, np.int32), class_names=("rank", "other"),
        channel_names=("pp",),
    )  # fmt: skip
    start_ps, end_ps, issued_ps, done_ps = (
        np.rint(np.array(us) * US_PS).astype(np.int64) for us in (start, end, issued, (done_us, step_us))
    )
    return ran_step(program, flat, Timeline(start_ps, end_ps, issued_ps, done_ps), 0, slowing)


def figures(of: dict[str, float]) -> dict[str, float]:
    """The figures of a step in microseconds."""
    return {name: round(time_s * 1e6, 6) for name, time_s in of.items()}


def test_a_step_in_parts_and_lines() -> None:
    ops = OpTableBuilder()
    product = ops.gemm("linear", 4, 8, 16)
    gap = ops.delay("gap", 2 * US_PS)
    norm = ops.memory("rms_norm", 100.0, 50.0)
    gather = ops.collective("parameters", Collective.ALL_GATHER, 0, 1000.0)
    send = ops.p2p("activations", 1, 300.0)
    copy = ops.host_copy("offload", 64.0)
    update = ops.memory("update", 10.0, 20.0)
    step = ran(
        program_of(ops),
        [
            (product, Stream.COMPUTE, F, 0, 0, 10, 0, None, False),
            (gap, Stream.COMPUTE, F, 1, 10, 12, 0, None, False),
            (norm, Stream.COMPUTE, F, 1, 12, 20, 1, None, False),
            (gather, Stream.GATHER, F, 1, 15, 30, 15, None, False),
            (product, Stream.COMPUTE, B, 2, 32, 42, 20, None, False),
            (send, Stream.PP_SEND, B, 3, 45, 48, 40, 4, True),
            (copy, Stream.COPY, B, 3, 48, 52, 0, None, False),
            (update, Stream.COMPUTE, U, -1, 52, 57, 0, None, False),
            (product, Stream.COMPUTE, U, -1, 57, 60, 0, None, False),
        ],
        done_us=61,
        step_us=70,
    )
    assert (step.name, round(step.step_s * 1e6, 6)) == ("rank", 70.0)
    assert figures(step.parts) == {
        "product": 20.0,
        "optimizer": 8.0,
        "memory": 10.0 - 1.0,  # with the gap; a fifth of 5 us beside the gather is what that adds
        HELD: 1.0,
        "all-gathers over 8 ranks": 10.0,  # from 20 to 30 us
        COPIES: 4.0,
        WAITING: 3.0 + 3.0 + 9.0,  # the send, until its peer is ready, and until the other rank is done
        HOST: 2.0 + 1.0,
    }
    assert figures({"hidden": step.hidden_s, "all": step.communicating_s}) == {"hidden": 5.0, "all": 18.0}
    assert step.launches == 8
    assert figures(step.idle_before) == {"layers.*.mlp": 2.0, "head": 3.0, "the end of the step": 1.0}

    lines = {(line.name, line.phase): line for line in step.lines}
    assert len(step.lines) == len(lines) == 8
    first, second, last = (lines["linear", phase] for phase in ("forward", "backward", "optimizer"))
    for line, part, late_us in ((first, "product", 10), (second, "product", 0), (last, "optimizer", 0)):
        assert (line.part, line.shape, line.count, line.flops, line.work) == (part, (1, 4, 8, 16), 1, 1024.0, "product")
        assert line.moved_bytes == 2 * (4 * 16 + 16 * 8 + 4 * 8)
        assert line.late_s == pytest.approx(late_us * 1e-6)
    assert (first.module, second.module, last.module) == ("layers.*.mlp", "layers.*.mlp", "")
    assert first.ops == (product,)
    talks, sent, other = lines["parameters", "forward"], lines["activations", "backward"], lines["rms_norm", "forward"]
    assert (talks.part, talks.shape) == ("all-gathers over 8 ranks", (Collective.ALL_GATHER, 8, 1000))
    assert (talks.late_s, talks.waiting_s, talks.moved_bytes) == (pytest.approx(15e-6), 0.0, 1000.0)
    assert (sent.part, sent.shape, sent.moved_bytes) == (WAITING, (Collective.SEND_RECV, 4, 300), 300.0)
    assert (sent.time_s, sent.waiting_s) == (pytest.approx(3e-6), pytest.approx(3e-6))
    assert (other.part, other.work, other.shape, other.moved_bytes) == ("memory", "norm", (), 150.0)
    assert (other.time_s, other.held_s) == (pytest.approx(10e-6), pytest.approx(1e-6))
    copied, updated = lines["offload", "backward"], lines["update", "optimizer"]
    assert (copied.part, copied.moved_bytes, copied.held_s) == (COPIES, 64.0, 0.0)
    assert (updated.part, updated.moved_bytes) == ("optimizer", 30.0)


def test_runs_of_the_same_work_are_one_line_and_what_moves_nothing_in_no_time_is_none() -> None:
    ops = OpTableBuilder()
    product, nothing = ops.gemm("linear", 1, 1, 1), ops.memory("view", 0.0, 0.0)
    nodes = [(product, Stream.COMPUTE, F, 0, 10 * n, 10 * n + 4, 0, None, False) for n in range(3)]
    nodes += [(nothing, Stream.COMPUTE, F, 0, 30, 30, 0, None, False)]
    (line,) = ran(program_of(ops), nodes, 30, 30).lines
    assert (line.count, line.flops, line.moved_bytes) == (3, 6.0, 18.0)
    assert line.time_s == pytest.approx(12e-6)


@pytest.mark.parametrize(
    ("gap", "kernel", "talk", "time_us"),
    [
        ((10, 20), (20, 40), None, 30.0),
        ((10, 20.000001), (20.000001, 40), None, 19.999999),  # longer than ten microseconds
        ((11, 20), (20, 40), None, 20.0),  # the host waits before it
        ((10, 20), (21, 40), None, 19.0),  # something else holds the kernel up
        ((10, 20), (20, 40), (0, 10), 30.0),
        ((10, 20), (20, 40), (0, 12), 20.0),  # a collective runs in the gap
    ],
)
def test_a_short_gap_counts_with_the_kernel_after_it(gap: Any, kernel: Any, talk: Any, time_us: float) -> None:
    ops = OpTableBuilder()
    product, delay = ops.gemm("linear", 1, 1, 1), ops.delay("gap", 1)
    norm, gather = ops.memory("norm", 1.0, 1.0), ops.collective("gather", Collective.ALL_GATHER, 0, 1.0)
    nodes = [
        (product, Stream.COMPUTE, F, 0, 0, 10, 0, None, False),
        (delay, Stream.COMPUTE, F, 0, *gap, 0, None, False),
        (norm, Stream.COMPUTE, F, 0, *kernel, 0, None, False),
    ]
    nodes += [] if talk is None else [(gather, Stream.GATHER, F, 0, *talk, 0, None, False)]
    step = ran(program_of(ops), nodes, 40, 40, slowing=0.0)
    (line,) = (line for line in step.lines if line.name == "norm")
    assert round(line.time_s * 1e6, 6) == time_us


def test_kernels_of_other_streams_and_transfers_are_not_held_up() -> None:
    """A gather runs from 0 to 30 us; with a slowing of 1 a kernel beside it takes half of its time longer."""
    ops = OpTableBuilder()
    product, norm = ops.gemm("linear", 1, 1, 1), ops.memory("norm", 1.0, 1.0)
    gather, send = ops.collective("gather", Collective.ALL_GATHER, 0, 1.0), ops.p2p("send", 1, 1.0)
    step = ran(
        program_of(ops),
        [
            (gather, Stream.GATHER, F, 0, 0, 30, 0, None, False),
            (product, Stream.COMPUTE, F, 0, 10, 40, 0, None, False),
            (norm, Stream.TP, F, 0, 10, 30, 0, None, False),
            (send, Stream.PP_SEND, F, 0, 30, 40, 0, None, False),
        ],
        40,
        40,
        slowing=1.0,
    )
    assert {line.name: round(line.held_s * 1e6, 6) for line in step.lines} == {
        "gather": 0.0, "linear": 10.0, "norm": 0.0, "send": 0.0
    }  # fmt: skip
    assert figures(step.parts) == {"product": 20.0, HELD: 10.0, "all-gathers over 8 ranks": 10.0, HOST: 0.0}


@pytest.mark.parametrize("source", ["", PROFILE])
def test_what_a_kernel_counts_as(source: str) -> None:
    ops = OpTableBuilder()
    scan = Scan(**dict.fromkeys(Scan.__dataclass_fields__, 1))
    kinds = {
        ops.attention("attention", BACKWARD): ("attention_backward", "attention"),
        ops.attention("attention", replace(BACKWARD, backward=0)): ("attention", "attention"),
        ops.scan("scan", scan, "mamba2", "bf16", 1.0, (1.0, 1.0), 1): ("recurrence", "recurrence"),
        ops.collective("a", Collective.REDUCE_SCATTER, 0, 1.0): ("reduce-scatters over 8 ranks", "collective"),
        ops.collective("b", Collective.BROADCAST, 1, 1.0): ("broadcasts over 4 ranks", "collective"),
        ops.memory("nvjet_hsh", 1.0, 1.0): ("product", "product") if source else ("memory", "other"),
        ops.memory("ncclDevKernel_AllGather", 1.0, 1.0): (
            ("kernels that exchange without NCCL", "exchange") if source else ("memory", "other")
        ),
    }
    nodes = [(row, Stream.COMPUTE, F, 0, 10 * row, 10 * row + 5, 0, None, False) for row in kinds]
    step = ran(program_of(ops, source=source), nodes, 70, 70)
    assert {line.ops[0]: (line.part, line.work) for line in step.lines} == kinds


# -- ranks -------------------------------------------------------------------------------------------------------------


def line(part: str, time_s: float, shape: tuple[int, ...] = (), **more: Any) -> Line:
    usual: dict[str, Any] = {"work": "w", "name": part, "module": "m", "phase": "forward", "ops": (0,), "count": 1}
    usual |= {"waiting_s": 0.0, "late_s": 0.0, "held_s": 0.0, "flops": 0.0, "moved_bytes": 0.0}
    return Line(part=part, time_s=time_s, shape=shape, **{**usual, **more})


def step_of(step_s: float, *lines: Line, **parts: float) -> RanStep:
    return RanStep(
        "a", step_s, {name.replace("_over_", " over "): time_s for name, time_s in parts.items()}, lines, 0, 0
    )


def test_parts_of_two_steps() -> None:
    measured = step_of(9.0, line("product", 5.0, held_s=1.0), line("product", 2.0), product=6.0, host=3.0)
    predicted = step_of(7.0, line("memory", 1.0, held_s=0.25), product=5.0, memory=2.0)
    assert parts_of(measured, predicted) == [
        PartDifference("product", "matrix products", 6.0, 5.0, 6.0, 0.0),
        PartDifference(HOST, "host, while the GPU runs nothing", 3.0, 0.0, 0.0, 0.0),
        PartDifference("memory", "memory-bound kernels", 0.0, 2.0, 0.0, 0.75),
    ]
    rank = RankDifference(0, 0, 0, "a", measured, predicted)
    assert [part.part for part in rank.parts] == [HOST, "product", "memory"]
    assert label_of("all-gathers over 8 ranks") == "all-gathers over 8 ranks"


def rank_of(measured: RanStep, predicted: RanStep, number: int = 0, cls: int = 0) -> RankDifference:
    return RankDifference(number, number, cls, f"stage {cls}", measured, predicted)


def test_the_rank_that_waits_least_sets_the_pace() -> None:
    usual = step_of(5.0, waiting=0.5)
    of = [rank_of(step_of(10.0, waiting=waiting_s), usual) for waiting_s in (4.0, 1.0, 2.0)]
    assert [one.work_s for one in of] == [(6.0, 4.5), (9.0, 4.5), (8.0, 4.5)]
    assert slowest_of(of) == 1


def test_collectives_over_other_numbers_of_ranks_are_named_without_them() -> None:
    measured = step_of(
        9.0, line("gathers over 8", 1.0), line("sums over 4", 1.0),
        gathers_over_8=1.0, gathers_over_2=2.0, sums_over_4=3.0, mean_over_2=4.0, product=5.0,
    )  # fmt: skip
    predicted = step_of(7.0, line("gathers over 16", 1.0), gathers_over_16=5.0, sums_over_4=6.0, product=1.0)
    first, second = ranks._same_collectives(measured, predicted)
    assert first.parts == {"gathers": 3.0, "sums over 4": 3.0, "mean over 2": 4.0, "product": 5.0}
    assert second.parts == {"gathers": 5.0, "sums over 4": 6.0, "product": 1.0}
    assert [one.part for one in (*first.lines, *second.lines)] == ["gathers", "sums over 4", "gathers"]
    hidden = step_of(9.0, line("gathers over 2", 1.0), product=9.0)  # no part of the step
    first, second = ranks._same_collectives(hidden, predicted)
    assert (first.lines[0].part, second.lines[0].part) == ("gathers", "gathers")
    assert second.parts["gathers"] == 5.0


def test_kernels_that_exchange_without_nccl_count_as_the_predicted_all_to_alls() -> None:
    deep_ep = line(EXCHANGES, 3.0, work="exchange", name="dispatch")
    measured = replace(step_of(9.0, deep_ep), parts={EXCHANGES: 2.0, "product": 7.0})
    sent = line("all-to-alls over 64 ranks", 1.0, name="experts", shape=(4, 64, 100))
    predicted = replace(step_of(5.0, sent), parts={"all-to-alls over 64 ranks": 1.0, "product": 4.0})
    first, second = ranks._same_collectives(measured, predicted)
    assert first.parts == {"all-to-alls": 2.0, "product": 7.0}
    assert second.parts == {"all-to-alls": 1.0, "product": 4.0}
    (pair,) = pairs_of(first.lines, second.lines)
    assert (pair.measured_s, pair.predicted_s, pair.shape) == (3.0, 1.0, (4, 64, 100))
    by_nccl = replace(measured, lines=(deep_ep, line("all-to-alls over 64 ranks", 1.0, shape=(4, 64, 100))))
    assert ranks._same_collectives(by_nccl, predicted)[0].lines[0].part == EXCHANGES


def simulated(n_gpus: int, stages: int, plan: Plan | None, **meta: object) -> Any:
    program = program_of(OpTableBuilder(), *(rank_class(f"stage {n}", n_gpus // stages) for n in range(stages)), **meta)
    return SimpleNamespace(program=program, subject=SimpleNamespace(n_gpus=n_gpus, plan=plan))


def test_the_stage_of_each_rank_follows_from_the_plan_or_the_roles_of_a_program() -> None:
    usual = Plan(1024, tp=2, pp=2, dp_shard=2)
    assert ranks._stated_classes(simulated(8, 2, usual), 8) == (0, 0, 0, 0, 1, 1, 1, 1)
    last = replace(usual, mesh_order="tp-pp-cp-dp_shard-dp_replicate")
    assert ranks._stated_classes(simulated(8, 2, last), 8) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert ranks._stated_classes(simulated(8, 2, usual), 16) is None
    assert ranks._stated_classes(simulated(8, 4, usual), 8) is None
    assert ranks._stated_classes(simulated(8, 2, None), 8) is None
    assert ranks._stated_classes(simulated(8, 2, None, roles={"ranks": [0, 4]}), 8) == (0, 0, 0, 0, 1, 1, 1, 1)


def beside(monkeypatch: pytest.MonkeyPatch, measured: list[int], stages: list[int], plan: Plan | None) -> Any:
    """Steps whose numbers of products are given; ranks and stages that have equal numbers are alike."""
    simulation = simulated(4, len(stages), plan)
    steps = {True: measured, False: stages}
    run: Any = SimpleNamespace(program=program_of(OpTableBuilder(), *[rank_class("r")] * len(measured), world_size=4))
    run.flat = run.timeline = simulation.flat = simulation.timeline = None
    simulation.costs, simulation.slowest = SimpleNamespace(slow_compute=np.array([0.1, 0.3, 0.2])), 1

    def of(program: Program, _flat: Any, _timeline: Any, number: int, slowing: float) -> RanStep:
        assert slowing == 0.3
        return step_of(1.0, line("product", 1.0, (1, 2, 3, 4), count=steps[program is run.program][number]))

    monkeypatch.setattr(ranks, "ran_step", of)
    return ranks.beside(run, simulation)


def test_ranks_are_beside_the_stage_with_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes = beside(monkeypatch, [30, 10], [10, 20, 30], None)
    assert [(one.rank, one.run_class, one.rank_class, one.stage) for one in found] == [
        (0, 0, 2, "stage 2"),
        (1, 1, 0, "stage 0"),
    ]
    assert notes == ()
    found, _ = beside(monkeypatch, [10], [10, 10, 10], None)
    assert found[0].rank_class == 1  # of equal ones that which sets the pace


def test_a_rank_that_is_more_like_another_stage_than_its_own_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(1024, pp=2, dp_shard=2)
    found, notes = beside(monkeypatch, [99], [101, 99], plan)
    assert (found[0].rank_class, notes) == (
        0,
        ("rank 0 is of stage 0 and has kernels like those of stage 1; is --mesh-order the run's?",),
    )
    found, notes = beside(monkeypatch, [1000], [1008, 1000], plan)
    assert (found[0].rank_class, notes) == (0, ())


# -- the comparison ----------------------------------------------------------------------------------------------------


def comparison(of: list[RankDifference], measured_s: float, slowest: int = 0, **more: Any) -> Comparison:
    imported: Any = SimpleNamespace(measured_s=measured_s, **more)
    pairs = pairs_of(of[slowest].measured.lines, of[slowest].predicted.lines)
    nothing: Any = None
    return Comparison(imported, nothing, nothing, tuple(of), slowest, pairs, ())


def test_what_a_replay_misses_is_a_part_from_a_ten_thousandth_on() -> None:
    one = rank_of(step_of(10.0, product=7.0, host=3.0), step_of(8.0, product=8.0))
    found = comparison([one], 10.0005)
    assert [(part.part, part.lost_s) for part in found.parts] == [(HOST, 3.0), ("product", -1.0)]
    assert (found.predicted_s, found.slowdown) == (8.0, pytest.approx(10.0005 / 8 - 1))
    for measured_s in (12.0, 9.0):
        missed = comparison([one], measured_s)
        assert sum(part.lost_s for part in missed.parts) == pytest.approx(measured_s - 8.0)
        (part,) = (part for part in missed.parts if part.part == "replay")
        assert part[2:] == (measured_s - 10.0, 0.0, measured_s - 10.0, 0.0)
    assert [part.part for part in comparison([one], 12.0).parts] == [HOST, "replay", "product"]


def test_each_stage_has_the_rank_that_waits_least() -> None:
    step = step_of(1.0)
    of = [
        rank_of(step_of(9.0, line(f"part {number}", 1.0), waiting=waiting_s), step, number, cls)
        for number, (cls, waiting_s) in enumerate([(0, 3.0), (1, 1.0), (0, 2.0), (1, 5.0)])
    ]
    found = comparison(of, 9.0, slowest=1)
    assert [one.rank for one in found.stages] == [1, 2]
    assert [pair.part for pair in found.pairs_of_stages] == ["part 1", "part 2"]
    assert (found.rank.rank, found.measured, found.predicted) == (1, of[1].measured, step)


def test_measured_work_counts_for_the_modules_of_the_predicted() -> None:
    measured = [
        line("product", 6.0, module="Linear"),
        line("memory", 2.0, module="mlp"),
        line("copies", 1.0, module=""),
    ]
    predicted = [
        line("product", 3.0, module="mlp"), line("product", 1.0, module="head"), line("memory", 1.5, module="mlp"),
    ]  # fmt: skip
    found = comparison([rank_of(step_of(9.0, *measured), step_of(6.0, *predicted))], 9.0)
    # products: three quarters of 6 s for mlp
    assert found.modules == (
        ("mlp", 4.5 + 2.0, 3.0 + 1.5),
        ("(none)", 1.0, 0.0),
        ("head", 1.5, 1.0),
    )
    assert [module.lost_s for module in found.modules] == [2.0, 1.0, 0.5]


def test_the_peak_and_the_graph_breaks_are_those_of_the_rank_that_sets_the_pace() -> None:
    classes = (rank_class("a", resident=0), rank_class("b", resident=2**29))
    more = {"program": program_of(OpTableBuilder(), *classes), "graph_breaks": ("first", "second")}
    of = [rank_of(step_of(1.0), step_of(1.0), number, number) for number in (0, 1)]
    assert comparison(of, 1.0, 1, **more).measured_peak_gib == 1.5
    assert comparison(of, 1.0, 0, **more).measured_peak_gib is None
    assert comparison(of, 1.0, 1, **more).graph_breaks == "second"


def test_helpers_of_either_side_join_the_attention_that_takes_most_time() -> None:
    wide, narrow = (1, 2, 3, 4, 5), (1, 2, 3, 4, 6)
    measured = [line("attention", 3.0, wide), line("attention", 1.0, narrow), line("attention", 0.5, name="dot")]
    predicted = [line("attention", 2.0, wide), line("attention", 9.0, narrow), line("attention", 0.25, name="row sums")]
    predicted += [line("attention_backward", 1.0, name="backward")]
    pairs = {pair.shape: pair for pair in pairs_of(measured, predicted)}
    assert (pairs[wide].measured_s, pairs[wide].predicted_s) == (3.5, 2.25)
    assert (pairs[narrow].measured_s, pairs[narrow].predicted_s) == (1.0, 9.0)
    assert pairs[()] == Pair((), (predicted[-1],))


# -- corrections -------------------------------------------------------------------------------------------------------


def busy(**of: tuple[float, float]) -> Any:
    """A comparison of which each part keeps a GPU busy for (predicted, measured) seconds."""
    parts = [PartDifference(name.replace("__", " over "), "", 0.0, 0.0, two, one) for name, (one, two) in of.items()]
    return SimpleNamespace(stages=[SimpleNamespace(parts=parts[::2]), SimpleNamespace(parts=parts[1::2])])


def test_rates_are_predicted_over_measured_seconds_of_all_stages() -> None:
    of = {"product": (3.0, 2.0), "attention": (1.0, 2.0), "attention_backward": (1.0, 4.0), "memory": (1.0, 2.0)}
    of |= {"optimizer": (2.0, 1.0), "all-gathers__8": (1.0, 3.0), "reduce-scatters__4": (2.0, 2.0), "host": (9.0, 1.0)}
    of |= {"broadcasts__2": (1.0, 3.0), "kernels": (9.0, 1.0)}
    assert corrections._rates(busy(**of)) == KernelRates(
        gemm=1.5, attention=0.5, attention_backward=0.5, memory=1.0, network=0.5
    )
    assert corrections._busy_s(busy(product=(3.0, 2.0)))["product"] == (3.0, 2.0)


def test_rates_of_work_that_a_side_lacks_are_one_and_none_is_beyond_ten() -> None:
    lacking = {"product": (3.0, 0.0), "attention": (0.0, 2.0), "attention_backward": (2.0, 1.0)}
    assert corrections._rates(busy(**lacking)) == KernelRates(attention_backward=2.0)
    far = {"product": (30.0, 2.0), "memory": (2.0, 30.0), "attention": (1.0, 2.0)}
    assert corrections._rates(busy(**far)) == KernelRates(gemm=10.0, memory=0.1, attention=0.5)


def rows_of(columns: tuple[str, ...], rows: tuple[Any, ...]) -> list[dict[str, object]]:
    named = [dict(zip(columns, row, strict=True)) for row in rows]
    return [{name: value for name, value in row.items() if value != ""} for row in named]


def corrected(
    monkeypatch: pytest.MonkeyPatch, ops: OpTableBuilder, ratio: float, gap: int = 0, **meta: object
) -> Corrections:
    """Every op takes 6 us in the prediction, and `ratio` times as long in the profile."""
    program = program_of(ops, **meta)
    costs = SimpleNamespace(duration_ps=np.full(len(ops), 6 * US_PS))
    subject = SimpleNamespace(stack=None, launching=None)
    found: Any = SimpleNamespace(simulation=SimpleNamespace(program=program, costs=costs, subject=subject))
    monkeypatch.setattr(corrections, "_ratios", lambda _: dict.fromkeys(range(len(ops)), ratio))
    monkeypatch.setattr(corrections, "_rates", lambda _: KernelRates(gemm=2.0))
    monkeypatch.setattr(corrections, "gap_ps", lambda *_: np.full(len(ops), gap * US_PS))
    return corrections.corrections(found)


def test_kernels_of_a_prediction_become_rows_of_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = OpTableBuilder()
    ops.gemm("a", 4, 8, 16, batch=3, role=GemmRole.DGRAD)
    ops.gemm("b", 4, 8, 16, batch=3, role=GemmRole.DGRAD)
    ops.gemm("grouped", 4, 8, 16, batch=3, kernels=3)
    ops.gemm("accumulating", 4, 8, 16, accumulate_bytes=4)
    ops.attention("attention", BACKWARD, kernel="flash3")
    ops.memory("norm", 100.0, 50.0, launches=2)
    ops.memory("view", 0.0, 0.0)
    ops.host_copy("offload", 64.0)
    ops.host_copy("nothing", 0.0)
    ops.delay("gap", 5)
    found = corrected(monkeypatch, ops, 2.0, gap=3)
    assert rows_of(KERNEL_COLUMNS, found.kernels) == [
        {"kind": "gemm", "time_us": "9", "dtype": "bf16", "m": 4, "n": 8, "k": 16, "batch": 3, "layout": "dgrad"},
        {"kind": "attention", "time_us": "9", "batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 128, "seq_kv": 256,
         "head_dim": 64, "v_head_dim": 32, "causal": 1, "backward": 1, "kernel": "flash3"},
        {"kind": "memory", "time_us": "4.5", "bytes": 75.0, "op": "norm"},
        {"kind": "host_copy", "time_us": "12", "bytes": 64.0},
    ]  # fmt: skip
    assert (found.collectives, found.rates) == ((), KernelRates(gemm=2.0))
    assert (found.kernel_columns, found.network_columns) == (KERNEL_COLUMNS, NETWORK_COLUMNS)


def test_rows_of_one_shape_have_the_mean_time_and_none_is_below_a_microsecond(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = OpTableBuilder()
    ops.gemm("a", 4, 8, 16)
    ops.gemm("b", 4, 8, 16)
    program = program_of(ops)
    found: Any = SimpleNamespace(simulation=SimpleNamespace(program=program))
    (row,) = corrections._kernel_rows(found, {1: 3e-6, 0: 1e-6})
    assert row[KERNEL_COLUMNS.index("time_us")] == "2"
    (least,) = corrected(monkeypatch, ops, 0.5, gap=3).kernels
    assert least[KERNEL_COLUMNS.index("time_us")] == "1"


def test_collectives_of_a_prediction_become_rows_of_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = OpTableBuilder()
    ops.collective("a", Collective.ALL_GATHER, 0, 1000.0)
    ops.collective("b", Collective.ALL_GATHER, 0, 1000.0)
    ops.collective("c", Collective.ALL_REDUCE, 1, 500.0)
    ops.collective("alone", Collective.ALL_REDUCE, 2, 500.0)
    ops.collective("nothing", Collective.ALL_REDUCE, 1, 0.0)
    ops.collective("experts", Collective.ALL_TO_ALL, 1, 500.0, dispatcher="deepep")
    ops.p2p("send", 1, 500.0)
    found = corrected(monkeypatch, ops, 1.5, gap=3)
    assert rows_of(NETWORK_COLUMNS, found.collectives) == [
        {"collective": "all_gather", "ranks": 8, "stride": 1, "bytes": 1000.0, "time_us": "9"},
        {"collective": "all_reduce", "ranks": 4, "stride": 8, "bytes": 500.0, "time_us": "9"},
    ]
    assert found.kernels == ()
