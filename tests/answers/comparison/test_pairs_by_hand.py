"""Pairs of work, verdicts in words, and the host's speed of a correction, of figures that are written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.answers.comparison import compare, corrections, ran_step, ranks
from forerun.answers.comparison.corrections import with_host
from forerun.answers.comparison.matching import Pair, pairs_of
from forerun.answers.comparison.ran_step import COPIES, HELD, HOST, LAST_PARTS, PARTS, WAITING, Line
from forerun.answers.comparison.ranks import PartDifference
from forerun.answers.comparison.verdict import verdict
from forerun.core.program.kinds import Attention, Gemm
from forerun.describe.cluster.types import KernelRates


def line(part: str, name: str, time_s: float, shape: tuple[int, ...] = (), **more: Any) -> Line:
    usual: dict[str, Any] = {"work": "w", "module": "m", "phase": "forward", "ops": (0,), "count": 1}
    usual |= {"waiting_s": 0.0, "late_s": 0.0, "held_s": 0.0, "flops": 0.0, "moved_bytes": 0.0}
    return Line(part=part, name=name, time_s=time_s, shape=shape, **{**usual, **more})


def names(pairs: tuple[Pair, ...]) -> list[tuple[list[str], list[str]]]:
    return [([one.name for one in pair.measured], [one.name for one in pair.predicted]) for pair in pairs]


def test_figures_of_a_pair() -> None:
    measured = (line("product", "a", 2.0, (1, 2, 3, 4), count=3, held_s=0.5), line("product", "b", 3.0, count=9))
    predicted = (line("product", "c", 1.0, (1, 2, 3, 4), count=2, flops=8.0, module="n", phase="backward"),)
    pair = Pair(measured, predicted)
    assert (pair.name, pair.kernel, pair.part, pair.shape) == ("c", "b", "product", (1, 2, 3, 4))
    assert (pair.measured_s, pair.predicted_s, pair.lost_s, pair.alone_s) == (5.0, 1.0, 4.0, (4.5, 1.0))
    assert pair.counts == (3, 2)
    assert (pair.modules, pair.phase) == (("n",), "backward")
    assert (pair.rate(predicted, "flops"), pair.rate(measured, "flops"), pair.rate((), "flops")) == (8.0, None, None)
    alone = Pair(measured[1:], ())
    assert (alone.name, alone.modules, alone.phase, alone.counts) == ("b", ("m",), "forward", (9, 0))
    assert Pair((), predicted).kernel == ""
    assert Pair((line("p", "a", 1, (1,)),), (line("p", "a", 1, (2,)),)).shape == ()


def test_work_is_joined_by_name_then_by_shape_then_by_kind() -> None:
    measured = [
        line("product", "gemm", 2.0, (1, 8, 8, 8)),
        line("product", "other", 1.0, (1, 4, 4, 4)),
        line("memory", "norm kernel", 3.0, work="norm", phase="backward"),
        line("memory", "copy kernel", 0.5, work="moving"),
        line("optimizer", "adam kernel", 1.0),
        line("all-reduce", "nccl", 5.0, (1, 8, 1000)),
        line("unknown", "lonely", 9.0),
    ]
    predicted = [
        line("product", "gemm", 1.0, (1, 8, 8, 8)),
        line("product", "linear", 1.0, (1, 4, 4, 4)),
        line("memory", "norm", 1.0, work="norm", phase="backward"),
        line("memory", "norm", 1.0, work="norm", phase="forward"),
        line("memory", "move", 1.0, work="moving", phase="backward"),
        line("optimizer", "adamw", 1.0),
        line("all-reduce", "gradients", 5.5, (1, 8, 1024)),
        line("all-gather", "parameters", 7.0, (2, 8, 9)),
    ]
    assert names(pairs_of(measured, predicted)) == [
        (["lonely"], []),
        (["norm kernel"], ["norm"]),
        (["gemm"], ["gemm"]),
        (["adam kernel"], ["adamw"]),
        (["other"], ["linear"]),
        (["nccl"], ["gradients"]),
        (["copy kernel"], ["move"]),
        ([], ["norm"]),
        ([], ["parameters"]),
    ]


def test_products_without_shapes_are_one_pair() -> None:
    measured = [line("product", "a", 1.0), line("product", "b", 2.0)]
    predicted = [line("product", "c", 1.0, (1, 2, 2, 2)), line("product", "d", 1.0, (1, 3, 3, 3))]
    assert names(pairs_of(measured, predicted)) == [(["a", "b"], ["c", "d"])]
    shaped = [line("product", "a", 1.0, (1, 9, 9, 9))]
    assert len(pairs_of(shaped, predicted)) == 3


def found(parts: list[PartDifference], pairs: tuple[Pair, ...] = (), measured_s: float = 1.2, **more: Any) -> Any:
    usual = {
        "parts": parts, "pairs": pairs, "measured_s": measured_s, "predicted_s": 1.0, "slowdown": measured_s - 1.0,
        "ranks": [0], "measured": SimpleNamespace(idle_before={}), "graph_breaks": (),
    }  # fmt: skip
    program = SimpleNamespace(ops=SimpleNamespace(group=[0]), groups=[SimpleNamespace(nodes=4)], rank_classes=[0])
    return SimpleNamespace(**{**usual, "simulation": SimpleNamespace(program=program), **more})


def part(name: str, measured_s: float, predicted_s: float, busy: tuple[float, float] | None = None) -> PartDifference:
    return PartDifference(name, name, measured_s, predicted_s, *(busy or (measured_s, predicted_s)))


@pytest.mark.parametrize(
    ("measured_s", "words"),
    [
        (1.2, "20.0% slower than predicted"),
        (0.9, "10.0% faster than predicted"),
        (1.005, "as fast as predicted, within 0.5%"),
        (1.0, "as fast as predicted, within 0.1%"),
    ],
)
def test_the_head_of_a_verdict(measured_s: float, words: str) -> None:
    assert verdict(found([], measured_s=measured_s)) == words


def test_parts_of_a_verdict_are_those_that_matter() -> None:
    parts = [part(f"part {n}", 0.1 + n / 100, 0.1) for n in range(8)]
    said = verdict(found(parts))
    assert said.count(";") == 4
    assert said.startswith("20.0% slower than predicted: +7.0% part 7: 170 ms where 100 ms were expected; +6.0% part 6")
    few = [part("a", 0.105, 0.1), part("b", 0.1, 0.101), part("c", 0.1, 0.1)]
    assert verdict(found(few)).endswith(
        "+0.5% a: 105 ms where 100 ms were expected; -0.1% b: 100 ms where 101 ms were expected"
    )
    assert verdict(found(few, measured_s=1.0)) == "as fast as predicted, within 0.1%"


def test_memory_bound_work_is_in_a_pair_with_what_runs_between_the_same_products() -> None:
    """A profile without modules: a norm before each half of a layer, one of them slow, and a kernel without a place."""
    qkv, up = ("", "product (1, 2, 2, 4)"), ("product (1, 2, 2, 4)", "product (1, 2, 2, 8)")
    measured = [
        line("memory", "n", 1.0, work="norm", module="", between=qkv),
        line("memory", "n", 5.0, work="norm", module="", between=up),
        line("memory", "e", 2.0, work="element-wise", module="", between=up, phase="backward"),
        *(line("memory", "x", 4.0, work="other", module="", between=(str(place),)) for place in range(2)),
    ]
    predicted = [
        line("memory", "attn.norm", 1.0, work="norm", module="layer.attn", between=qkv),
        line("memory", "ffn.norm", 2.0, work="norm", module="layer.ffn", between=up),
        line("memory", "ffn.add", 3.0, work="moving", module="layer.ffn", between=up, phase="backward"),
    ]
    found = {pair.name: (pair.measured_s, pair.predicted_s, pair.counts) for pair in pairs_of(measured, predicted)}
    assert found == {
        "attn.norm": (1.0, 1.0, (1, 1)),
        "ffn.norm": (5.0, 2.0, (1, 1)),
        "ffn.add": (2.0, 3.0, (1, 1)),
        "x": (8.0, 0.0, (2, 0)),
    }


def test_kernels_of_a_verdict_have_their_rate_and_the_worst_module() -> None:
    pairs = (
        Pair((line("product", "k1", 0.3, (1, 2, 2, 2), flops=6e13, count=5),),
             (line("product", "gemm", 0.2, (1, 2, 2, 2), flops=6e13, count=4, module="layers.*.mlp"),)),
        Pair((line("product", "k2", 0.1, (1, 3, 3, 3)),), (line("product", "other", 0.1, (1, 3, 3, 3)),)),
    )  # fmt: skip
    said = verdict(found([part("product", 0.4, 0.3)], pairs))
    assert said.endswith(
        "+10.0% product, which take 33.3% longer (200 TFLOP/s where 300 were expected), 6 kernels where 5 were"
        " expected, most in gemm of layers.*.mlp"
    )
    held = (line("product", "k1", 0.4, (1, 2, 2, 2), flops=6e13, held_s=0.1),)
    pairs_held = (Pair(held, (line("product", "gemm", 0.2, (1, 2, 2, 2), flops=6e13),)),)
    assert "(200 TFLOP/s where 300 were expected)" in verdict(found([part("product", 0.4, 0.2)], pairs_held))
    assert verdict(found([part("product", 0.4, 0.0)], pairs)).endswith("that the prediction lacks, most of them k1")
    assert verdict(found([part("product", 0.0, 0.4)], pairs)).endswith("product that the profile lacks")


def test_collectives_of_a_verdict_have_their_bandwidth_or_why_they_are_exposed() -> None:
    def said(measured: Line, predicted: Line, of: PartDifference) -> str:
        return verdict(found([of], (Pair((measured,), (predicted,)),)))

    slow, usual = (line("all-gather", "n", time_s, (1, 8, 9), moved_bytes=6e9) for time_s in (0.3, 0.2))
    assert said(slow, usual, part("all-gather", 0.3, 0.2)).endswith(
        "all-gather at 20.0 GB/s where 30.0 were expected on 4 nodes"
    )
    slow, usual = (line("all-gather", "n", time_s, (1, 8, 9)) for time_s in (0.3, 0.2))
    assert said(slow, usual, part("all-gather", 0.3, 0.2)).endswith("which take 50.0% longer on 4 nodes")
    late = line("all-gather", "n", 0.2, (1, 8, 9), late_s=0.05)
    exposed = part("all-gather", 0.15, 0.1, (0.2, 0.2))
    assert said(late, usual, exposed).endswith(
        "of which 150 ms are exposed where 100 ms were expected, because the host launches them late"
    )
    soon = line("all-gather", "n", 0.2, (1, 8, 9), late_s=0.01)
    assert said(soon, usual, exposed).endswith("of which 150 ms are exposed where 100 ms were expected")


def test_the_host_of_a_verdict_has_its_place_and_its_graph_breaks() -> None:
    breaks = (
        SimpleNamespace(idle_s=0.03, module="layers.0.Attention", function="forward", place="a.py:7"),
        SimpleNamespace(idle_s=0.01, module="", function="step", place="b.py:9"),
    )
    idle = SimpleNamespace(idle_before={"mlp": 0.02, "the end of the step": 0.01})
    said = verdict(found([part(HOST, 0.3, 0.1)], measured=idle, graph_breaks=breaks))
    assert said.endswith(
        "host: the GPU runs nothing for 300 ms where 100 ms were expected, most before kernels of mlp, 40 ms of it"
        " after graph breaks in forward (a.py:7) of Attention and 1 more places"
    )
    small = (SimpleNamespace(**{**vars(breaks[0]), "idle_s": 0.019}),)
    assert verdict(found([part(HOST, 0.3, 0.1)], graph_breaks=small)).endswith("100 ms were expected")
    last = SimpleNamespace(idle_before={"the end of the step": 0.01})
    assert verdict(found([part(HOST, 0.3, 0.1)], measured=last)).endswith("most before the end of the step")


@pytest.mark.parametrize("host", [0.25, 0.8, 1.5, 30.0])
def test_a_host_is_found_at_which_the_step_takes_the_measured_time(host: float) -> None:
    rates = KernelRates(gemm=0.9, network=0.7)

    def step_s(tried: KernelRates) -> float:
        assert (tried.gemm, tried.network) == (0.9, 0.7)
        return 1.0 + 0.5 / tried.host

    measured_s = 1.0 + 0.5 / host
    lost = part(HOST, 0.5 / host, 0.5)
    at: Any = SimpleNamespace(parts=(lost,), measured_s=measured_s)
    assert step_s(with_host(step_s, rates, at)) == pytest.approx(measured_s, rel=0.003)


def test_a_host_that_is_not_to_blame_keeps_its_speed() -> None:
    rates = KernelRates()

    def kept(lost_s: float, measured_s: float) -> bool:
        at: Any = SimpleNamespace(parts=(part(HOST, lost_s, 0.0),), measured_s=measured_s)
        return with_host(lambda tried: 1.0 + 0.5 / tried.host, rates, at) is rates

    assert kept(0.004, 1.509)  # the host differs by less than 0.3 % of the step
    assert kept(0.1, 1.491)  # a slower host would make the step longer yet
    assert kept(-0.1, 1.509)
    assert not kept(0.004, 2.0)  # too far off to be anything but the host's, whose time the other kernels hid
    assert not kept(0.1, 1.3)
    assert not kept(-0.1, 1.7)
    assert kept(0.1, 500.0)  # no host is that slow
    assert kept(0.1, 1.502)  # it is right already
    assert not kept(0.1, 1.7)


@pytest.fixture(autouse=True)
def _origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "Origin", SimpleNamespace(of=lambda program: program))


def noted(world: int = 4, gpus: int = 4, classes: int = 2, device: str = "H100", notes: tuple[str, ...] = ()) -> Any:
    program = SimpleNamespace(world_size=world, rank_classes=[0] * classes)
    imported: Any = SimpleNamespace(program=program, notes=notes, device=device)
    simulation: Any = SimpleNamespace(subject=SimpleNamespace(n_gpus=gpus))
    return compare._notes(imported, simulation, "H100")


def test_notes_say_what_a_reader_has_to_know() -> None:
    assert noted() == ()
    assert noted(notes=("a", "b", "a")) == ("a", "b")
    (ranks,) = noted(world=8)
    assert ranks.startswith("the profile has 8 ranks, but the prediction has 4; ")
    assert noted(device="A100") == ("the profile was recorded on A100, but the prediction is for H100",)
    assert noted(device="") == ()
    (alone,) = noted(classes=1)
    assert alone.startswith("the profile has one rank, so its collectives include the wait for other ranks")
    assert noted(world=1, gpus=1, classes=1) == ()


def test_moments_without_work_are_those_before_what_runs_next() -> None:
    # on the device: [2, 5] of module a, [4, 6] of b, a delay, [9, 10] and [11, 12] of a, one of no time; done at 15
    start, end = np.array([9, 2, 4, 7, 11, 13]), np.array([10, 5, 6, 8, 12, 13])
    ops = SimpleNamespace(is_delay=np.array([False, False, False, True, False, False]))
    view: Any = SimpleNamespace(
        program=SimpleNamespace(ops=ops), op=np.arange(6), start=start, end=end,
        module=np.array([0, 0, 1, 1, 0, 1]), paths=["a", "b"],
    )  # fmt: skip
    found = ran_step._idle_before(view, 15)
    assert {where: round(time_s * 1e12, 3) for where, time_s in found.items()} == {
        "a": 2.0 + 3.0 + 1.0,
        "the end of the step": 3.0,
    }
    nothing: Any = SimpleNamespace(
        program=SimpleNamespace(ops=ops), op=np.array([3]), start=np.array([1]), end=np.array([2])
    )
    assert ran_step._idle_before(nothing, 15) == {"": pytest.approx(15e-12)}


def test_parts_of_a_step_add_up_to_it() -> None:
    reduces = "all-reduces over 2 ranks"
    # (part, start, end, when it could have started, held)
    rows: list[tuple[str, int, int, int, float]] = [
        ("product", 0, 10, 0, 3.0), ("memory", 8, 14, 8, 1.0), (reduces, 12, 22, 12, 0.0),
        ("attention", 20, 25, 20, 0.0), (COPIES, 24, 30, 24, 0.0), (WAITING, 29, 33, 29, 0.0),
        ("optimizer", 36, 40, 34, 0.0), (HOST, 0, 48, 0, 0.0),
    ]  # fmt: skip
    names = [*PARTS, reduces, *LAST_PARTS]
    columns = zip(*((names.index(name), *more) for name, *more in rows), strict=True)
    part, start, end, ready, held = map(np.array, columns)
    ops = SimpleNamespace(is_delay=np.array([name == HOST for name, *_ in rows]))
    view: Any = SimpleNamespace(
        part_names=names, program=SimpleNamespace(ops=ops), op=np.arange(len(rows)), part=part, start=start, end=end,
        ready=ready, held=held,
    )  # fmt: skip
    assert ran_step._parts_ps(view, 40, 50) == {
        "product": 10 - 3, "attention": 5, "optimizer": 4, "memory": 4 - 1, reduces: 20 - 14, COPIES: 30 - 25,
        WAITING: (33 - 30) + (36 - 34) + (50 - 40), HOST: 34 - 33, HELD: 3 + 1,
    }  # fmt: skip
    view.held = 5 * held
    assert ran_step._parts_ps(view, 40, 50)["memory"] == 0
    assert ran_step._parts_ps(view, 40, 50)[HELD] == 10 + 4


@pytest.mark.parametrize(
    ("path", "starred"),
    [
        ("layers.3.mlp", "layers.*.mlp"),
        ("3.mlp.12", "*.mlp.*"),
        ("conv2.layer_4.norm", "conv2.layer_*.norm"),
        ("block_12", "block_*"),
        ("w2.w3a", "w2.w3a"),
        ("a_1b", "a_1b"),
    ],
)
def test_numbers_of_layers_are_stars(path: str, starred: str) -> None:
    assert ran_step._NUMBER.sub(ran_step._star, path) == starred


def test_shapes_by_which_work_is_joined() -> None:
    details = [
        Gemm(n=30, m=50, k=20, batch=2),
        Attention(batch=1, heads=2, kv_heads=2, seq_q=3, seq_kv=4, head_dim=5, causal=1, backward=0, v_head_dim=5),
        None,
        None,
    ]
    ops = SimpleNamespace(
        is_gemm=np.array([True, False, False, False]), is_attention=np.array([False, True, False, False]),
        is_communication=np.array([False, False, True, False]), details_of=lambda row: details[row],
        collective=np.array([0, 0, 3, 0]), group=np.array([-1, -1, 1, -1]), bytes_comm=np.array([0, 0, 99.6, 0]),
    )  # fmt: skip
    program: Any = SimpleNamespace(ops=ops, groups=[SimpleNamespace(size=2), SimpleNamespace(size=8)])
    assert [ran_step.shape_of(program, row) for row in range(4)] == [(2, 30, 50, 20), (1, 2, 3, 4, 5), (3, 8, 100), ()]


def test_how_much_two_steps_are_unlike() -> None:
    def step(*lines: Line) -> Any:
        return SimpleNamespace(lines=lines)

    product, other = line("product", "a", 1.0, (1, 2, 2, 2), count=6), line("product", "b", 1.0, (1, 3, 3, 3), count=2)
    gather, norm = line("all-gather", "n", 1.0, count=2), line("memory", "m", 1.0, count=50)
    assert ranks._unlike(step(product, norm), step(product)) == 0.0
    assert ranks._unlike(step(product), step(product, other)) == round(2 / 14, 2)
    assert ranks._unlike(step(product, other), step(product)) == round(2 / 14, 2)
    assert ranks._unlike(step(product, gather), step(other)) == 1.0
    unknown = line("product", "a", 1.0, count=7)
    assert ranks._unlike(step(unknown), step(product, other)) == round(1 / 15, 2)
    assert ranks._unlike(step(norm), step()) == 0.0


def test_modules_for_which_measured_work_counts() -> None:
    predicted = (line("product", "a", 3.0, module="x"), line("product", "b", 1.0, module="y"))
    pair = Pair((line("product", "k", 5.0, module="Linear"),), predicted)
    assert compare._shares(pair, "Linear", {"x", "y"}) == [("x", 0.75), ("y", 0.25)]
    assert compare._shares(pair, "x", {"x", "y"}) == [("x", 1.0)]
    assert compare._shares(pair, "Linear", set()) == [("Linear", 1.0)]
    nothing = Pair(pair.measured, (line("product", "a", 0.0, module="z"),))
    assert compare._shares(nothing, "Linear", {"z"}) == [("z", 1.0)]


def test_ratios_of_ops_are_weighted_by_the_time_that_nothing_holds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Pair((line("product", "k", 4.5, held_s=0.5),), (line("product", "a", 3.0, ops=(1,), held_s=1.0),))
    usual = Pair(
        (line("product", "l", 6.0),),
        (line("product", "a", 2.0, ops=(1,), held_s=1.0), line("product", "b", 5.0, ops=(2,))),
    )
    lacking = Pair((), (line("memory", "c", 1.0, ops=(3,)),))
    found: Any = SimpleNamespace(pairs_of_stages=(slow, usual, lacking))
    for busy, scale in ((10.0, 1.0), (20.0, 2.0)):
        monkeypatch.setattr(corrections, "_busy_s", lambda _, busy=busy: {"product": (0.0, busy)})
        # op 1: ratio 2 for 2 s and ratio 1 for 1 s; op 2: ratio 1 for 5 s; 10 s in all
        expected = {1: scale * 5 / 3, 2: scale, 3: 1.0}
        assert corrections._ratios(found) == {row: pytest.approx(ratio) for row, ratio in expected.items()}


def test_work_that_a_side_does_in_no_time_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = (
        Pair((line("memory", "k", 0.5),), (line("memory", "a", 0.0, ops=(1,)),)),
        Pair((line("memory", "l", 0.0),), (line("memory", "b", 0.25, ops=(2,)),)),
        Pair((line("copies", "m", 0.25),), (line("copies", "c", 0.5, ops=(3,)),)),
    )
    monkeypatch.setattr(corrections, "_busy_s", lambda _: {"memory": (0.25, 0.5), "copies": (0.0, 0.0)})
    found: Any = SimpleNamespace(pairs_of_stages=pairs)
    # the 0.25 s of op 2 are scaled to the 0.5 s of its part; of copies nothing was measured
    assert corrections._ratios(found) == {2: 2.0, 3: 0.5}
