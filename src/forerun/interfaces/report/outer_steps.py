"""Shows the mean step of replicas that synchronise in outer steps, in words and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.interfaces.report.console import print_title
from forerun.interfaces.report.figures import seconds

if TYPE_CHECKING:
    from forerun.answers.analysis.outer_steps import OuterEffect

_NAMES = {"local_sgd": "local SGD", "diloco": "DiLoCo"}


def print_outer_steps(out: Console, effect: OuterEffect) -> None:
    """Prints the mean step of all replicas, the cost of an outer step, and the effects that no simulation shows."""
    steps = effect.steps
    out.print()
    print_title(
        out, f"Outer steps: {_NAMES[steps.method]}, {effect.replicas} replicas of {effect.gpus_of_replica} GPUs"
    )
    rate = "" if effect.tokens_per_s is None else f", {effect.tokens_per_s:,.0f} tokens/s in all"
    plain, times = seconds(effect.plain_step_s), effect.plain_step_s / effect.mean_step_s
    beside = f", of which {seconds(effect.exposed_s)} delay the step" if steps.delay else ""
    fragment = "a fragment" if steps.fragments > 1 else "all parameters"
    lines = [
        "The figures above describe one replica that trains alone.",
        f"A step takes {seconds(effect.mean_step_s)} on average{rate}. Where all replicas sum their gradients in every"
        f" step, it takes {plain} ({times:.3g} times as long).",
        f"Every {steps.every // steps.fragments} steps a rank exchanges {fragment}, up to {effect.sent_gib:.2f} GiB, in"
        f" {seconds(effect.exchange_s)}{beside}. Kernels and host copies take {seconds(effect.kernels_s)}.",
        f"A rank needs {effect.gpu_gib:.2f} GiB more on its GPU and {effect.host_gib:.2f} GiB in host"
        f" memory{'' if effect.fits else ', which does not fit'}.",
    ]
    if effect.needed_gb_s is None:
        lines.append("Outer steps take more than 5 % of the time at any bandwidth.")
    else:
        whose = "GPU" if steps.link_gb_s is None else "replica"
        lines.append(f"Outer steps take at most 5 % of the time from {effect.needed_gb_s:.3g} GB/s a {whose}.")
    lines.append(f"Convergence is not simulated: {effect.caveat} ({effect.source}).")
    for line in lines:
        out.print(line, soft_wrap=True)


def outer_steps_record(effect: OuterEffect) -> dict[str, Any]:
    """Returns the effect as plain data; units are in the keys."""
    return asdict(effect)
