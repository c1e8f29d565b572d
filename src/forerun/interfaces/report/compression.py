"""Shows the effect of gradient compression on a step, in words and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.common.units import GIGA
from forerun.interfaces.report.console import print_title
from forerun.interfaces.report.figures import seconds

if TYPE_CHECKING:
    from forerun.answers.analysis.compression import CompressionEffect


def print_compression(out: Console, effect: CompressionEffect) -> None:
    """Prints the effect of compression on the step, its cost, and the effects that no simulation shows."""
    out.print()
    print_title(out, f"Gradients: {effect.method}")
    step, plain = seconds(effect.step_s), seconds(effect.plain_step_s)
    out.print(
        f"The step takes {step} with compression and {plain} without"
        f" ({effect.plain_step_s / effect.step_s - 1.0:+.1%} of throughput).",
        soft_wrap=True,
    )
    out.print(
        f"A rank sends {effect.wire_share:.3g} times the bytes. It keeps {effect.residual_gib:.2f} GiB"
        " from step to step, which the memory above does not include.",
        soft_wrap=True,
    )
    if effect.break_even_bytes_per_s is not None:
        bandwidth = effect.break_even_bytes_per_s / GIGA
        out.print(
            f"Compression makes the step faster if the outermost link has less than {bandwidth:.3g} GB/s per GPU.",
            soft_wrap=True,
        )
    out.print(f"Convergence is not simulated: {effect.caveat} ({effect.source}).", soft_wrap=True)


def compression_record(effect: CompressionEffect) -> dict[str, Any]:
    """Returns the effect as plain data; units are in the keys."""
    return asdict(effect)
