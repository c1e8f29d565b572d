"""Modules of a profile, which have names of classes, are found among the predicted ones by work of known sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from forerun.answers.comparison.compare import Comparison
from forerun.answers.comparison.matching import Pair, pairs_of
from forerun.answers.comparison.module_names import module_of, modules_of
from forerun.answers.comparison.ran_step import Line


def line(part: str, name: str, time_s: float, shape: tuple[int, ...] = (), **more: Any) -> Line:
    usual: dict[str, Any] = {"work": "w", "module": "m", "phase": "forward", "ops": (0,), "count": 1}
    usual |= {"waiting_s": 0.0, "late_s": 0.0, "held_s": 0.0, "flops": 0.0, "moved_bytes": 0.0}
    return Line(part=part, name=name, time_s=time_s, shape=shape, **{**usual, **more})


def _net(scale: float = 1.0) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """A block whose modules are named by classes when measured, with a pointwise kernel in each half."""
    up, out = (1, 64, 256, 512), (1, 64, 64, 512)
    measured = (
        line("product", "gemm", 1.0, up, module="Net.Block.FeedForward.Linear"),
        line("product", "gemm", 1.0, out, module="Net.Block.Attention.Linear"),
        line("memory", "mul", 3.0 * scale, work="moving", module="Net.Block.FeedForward"),
        line("memory", "rope", 1.0, work="moving", module="Net.Block.Attention.Rope"),
    )
    predicted = (
        line("product", "ffn.up", 1.0, up, module="layer.ffn"),
        line("product", "attn.out", 1.0, out, module="layer.attn"),
        line("memory", "ffn.mul", 1.0, work="moving", module="layer.ffn"),
        line("memory", "attn.rope", 1.0, work="moving", module="layer.attn"),
    )
    return measured, predicted


def test_shapes_tell_which_module_a_class_is_and_pair_other_work_in_it() -> None:
    found = {pair.modules: (pair.measured_s, pair.predicted_s) for pair in pairs_of(*_net()) if pair.part == "memory"}
    assert found == {("layer.ffn",): (3.0, 1.0), ("layer.attn",): (1.0, 1.0)}


def test_a_module_in_which_unlike_work_runs_has_no_pair_of_its_own() -> None:
    """Norms stand in the block itself, which holds both halves, so their work stays in one pair."""
    measured, predicted = _net()
    norms = tuple(line("memory", "norm", time, work="norm", module="Net.Block.RMSNorm") for time in (1.0, 2.0))
    names = ("layer.ffn", "layer.attn")
    expected = tuple(line("memory", f"{name}.norm", 1.0, work="norm", module=name) for name in names)
    pairs = pairs_of((*measured, *norms), (*predicted, *expected))
    (norm,) = [pair for pair in pairs if pair.lines[0].work == "norm"]
    assert (norm.measured_s, norm.predicted_s) == (3.0, 2.0)


def test_names_of_modules_follow_nearly_all_votes() -> None:
    pairs = pairs_of(*_net())
    names = modules_of(pairs)
    assert module_of(names, "Net.Block.FeedForward") == "layer.ffn"
    assert module_of(names, "Net.Block.Attention.Linear.Bias") == "layer.attn"
    assert "Net.Block" not in names
    assert module_of(names, "Net.Block.RMSNorm") == module_of(names, "") == ""
    few, many = (
        Pair((line("product", "gemm", 1.0, (1, 2, 2, size), module="A", count=count),),
             (line("product", "p", 1.0, (1, 2, 2, size), module=module, count=count),))
        for size, count, module in ((4, 1, "x"), (8, 9, "y"))
    )  # fmt: skip
    assert modules_of([few, many]) == {"A": "y"}
    assert modules_of([few, many, few]) == {}


def test_work_without_a_pair_counts_for_the_module_that_its_class_is() -> None:
    measured, predicted = _net()
    alone = line("recurrence", "scan", 5.0, module="Net.Block.FeedForward.Scan")
    found = SimpleNamespace(pairs=pairs_of((*measured, alone), predicted))
    times = {row.module: row.measured_s for row in vars(Comparison)["modules"].func(found)}
    assert times == {"layer.ffn": 9.0, "layer.attn": 2.0}
