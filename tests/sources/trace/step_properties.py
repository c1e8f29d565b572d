"""What must hold for the steps of one model that ran in several ways; reads the summaries of `random_steps.py`."""

from collections.abc import Iterator
from typing import Any

WAYS = ("eager", "aot", "inductor")
PASSES = ("FORWARD", "BACKWARD")


def violations(ways: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields what does not hold, in words."""
    for way, step in ways.items():
        yield from (f"{way}: {problem}" for problem in _of_step(step))
    eager = ways["eager"]
    for way, step in ways.items():
        for phase in PASSES:
            if step["flops"].get(phase, 0.0) != eager["flops"].get(phase, 0.0):
                yield f"{way}: {phase} has {step['flops'].get(phase)} FLOPs, eager {eager['flops'].get(phase)}"
        if step["messages"] != eager["messages"]:
            yield f"{way}: collectives {step['messages']}, eager {eager['messages']}"
        # A compiled checkpoint may save other tensors than the inputs of its region.
        most = eager["saved_bytes"] + (eager["beside_bytes"] if way == "inductor" else 0)
        if "RECOMPUTE" not in eager["flops"] and step["saved_bytes"] > most:
            yield f"{way}: saves {step['saved_bytes']} bytes, eager {eager['saved_bytes']} and {eager['beside_bytes']}"


def _of_step(step: dict[str, Any]) -> Iterator[str]:
    if step["least"] < 0:
        yield f"a size is {step['least']}"
    if not step["comes_back"]:
        yield "a recording read back is another one"
    if not step["in_order"]:
        yield "a tensor is freed before it is made, or a node waits for a later one"
    if step["counted"] is not None and step["counted"] != step["products"]:
        yield f"products have {step['products']} FLOPs, torch counts {step['counted']}"
    if step["program"] != step["recording"]:
        yield f"Program (FLOPs, bytes of collectives, peak): {step['program']}, recording: {step['recording']}"
