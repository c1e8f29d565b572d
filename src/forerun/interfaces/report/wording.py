"""Plans and figures in words, for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from forerun.answers.analysis.reading import TIGHT
from forerun.describe.kernels.dispatchers import AUTO
from forerun.describe.plan.plan import DEFAULT_ORDER, FROM_STACK, Plan
from forerun.interfaces.report.figures import percent, seconds

if TYPE_CHECKING:
    from forerun.answers.analysis.prediction import Prediction
    from forerun.answers.search.choices import Choice

SAME = "placed on the nodes as another order of the mesh axes"
"""plans that another one stands for"""
RENAMED = "named otherwise by another plan, which executes the same step"
"""other plans that another one stands for"""
_ALWAYS_SHOWN = ("seq_len", "micro_batch", "n_microbatches")


def mark(prediction: Prediction) -> str:
    """Returns the mark of a plan in a ranking that fits only under the condition of TIGHT."""
    return "!" if TIGHT in prediction.warnings else ""


def notes_on(places: Iterable[Prediction]) -> list[str]:
    """Returns the warnings of the plans of a ranking, each once; the one that `mark` stands for starts with it."""
    found = dict.fromkeys(line for place in places for line in place.warnings)
    return [f"! {line}" if line == TIGHT else line for line in found]


def plan_words(plan: Plan, *, with_stack: bool = False) -> str:
    """Returns the main choices of a plan in one short line: data parallelism, mesh, schedule, checkpointing.

    mb=2x8 is 8 micro batches of 2 sequences, Interleaved1F1Bx4 has 4 stages a rank.
    """
    words = [plan.describe()]
    if plan.mesh_order != DEFAULT_ORDER:
        degrees = [axis for axis in plan.mesh_axes if getattr(plan, axis) > 1]
        words.append(f"order {'-'.join(degrees)}")
    if plan.shards_parameters and plan.reshard_after_forward != "default":
        words.append({"always": "reshard", "never": "no reshard"}[plan.reshard_after_forward])
    if plan.pp > 1:
        words.append(plan.pp_schedule + (f"x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    if plan.expert_overlap:
        words.append("experts overlapped")
    if plan.dispatcher != AUTO:
        words.append(plan.dispatcher)
    words.append(f"mb={plan.micro_batch}x{plan.n_microbatches}")
    if plan.activation_checkpointing != "none":
        parts = f"({'+'.join(plan.recompute_modules)})" if plan.recompute_modules else ""
        words.append(f"AC={plan.activation_checkpointing}{parts}")
    if plan.compile:
        words.append("compiled" if plan.compile_model else "compiled loss")
    if plan.tp > 1 and not plan.sequence_parallel:
        words.append("no SP")
    if plan.offload != "none":
        words.append(f"{plan.offload} offloaded")
    if with_stack:
        words.append(plan.stack)
    return ", ".join(words)


def choice_words(choice: Choice) -> str:
    """Returns a line on the gain of a choice: `compile on instead of off: 4.74 s -> 3.75 s, MFU 40.4% -> 51.1%
    (torchtitan)`.

    The better side comes last. If a search makes a choice only on request, the line says why, and how to request it.
    """
    best = choice.instead
    own, other = best.own_plan(), choice.best.own_plan()
    now = {"compile": "on" if own.compile else "off", "stack": own.stack, "precision": own.precision}[choice.field]
    sides = [(now, best), (choice.value, choice.best)]
    if choice.best.step_time_s > best.step_time_s:
        sides.reverse()
    (old, slow), (new, fast) = sides
    words = f"{choice.field} {new} instead of {old}: {seconds(slow.step_time_s)} -> {seconds(fast.step_time_s)}"
    if slow.mfu is not None and fast.mfu is not None:
        words += f", MFU {percent(slow.mfu)} -> {percent(fast.mfu)}"
    if not choice.caution:
        return words + (f" ({own.stack})" if choice.field == "compile" else "")
    asked = ("stack",) if choice.field == "stack" else ("precision", "fp8_recipe")
    options = " ".join(f"--{name.replace('_', '-')} {getattr(other, name)}" for name in asked)
    return f"{words} ({choice.caution}: {options} searches it)"


def log_line(prediction: Prediction, model_flops_per_token: float | None) -> str:
    """Returns the figures in the form of torchtitan's training log, without unknown ones, for comparison with a real
    run.

    memory is reserved memory and its share of the GPU, tps is tokens/s of one GPU, tflops are model TFLOP/s of one GPU.
    """
    share, tps = prediction.peak_reserved_gib / prediction.memory_limit_gib, prediction.tokens_per_s_per_gpu
    parts = [f"memory: {prediction.peak_reserved_gib:5.2f}GiB({share:.2%})"] * prediction.memory_recorded
    if tps is not None:
        parts.append(f"tps: {round(tps):,}")
    if prediction.samples_per_s_per_gpu is not None:
        parts.append(f"{prediction.sample}s/s: {round(prediction.samples_per_s_per_gpu):,}")
    if tps is not None and model_flops_per_token is not None:
        parts.append(f"tflops: {model_flops_per_token * tps / 1e12:,.2f}")
    if prediction.mfu is not None:
        parts.append(f"mfu: {prediction.mfu:.2%}")
    return "  ".join(parts)


def command_line(plan: Plan, model: str, cluster: str) -> str:
    """Returns the `forerun predict` command of a plan: every field that is not the default, or not its stack's."""
    default = Plan(seq_len=plan.seq_len)
    left_open = replace(plan, **{each.name: each.default for each in fields(Plan) if each.name in FROM_STACK})  # type: ignore[arg-type]
    parts = [f"forerun predict {model} --cluster {cluster} --seq-len {plan.seq_len}"]
    for name in Plan.__dataclass_fields__:
        value = getattr(plan, name)
        is_default = value == getattr(default, name) == getattr(left_open, name)
        if name == "seq_len" or (is_default and name not in _ALWAYS_SHOWN):
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            parts.append(f"--{option} {','.join(map(str, value))}")
        else:
            parts.append(f"--{option} {value}")
    return " ".join(parts)
