"""How long gathered parameters are kept in parametrisation-based FSDP, where each use of a parameter gathers it.

Autograd decides: a matrix product saves the gathered weight for its backward pass, unless a checkpoint around it runs
the gather again. A policy that recomputes only gathers frees memory in a compiled graph, but not in eager code, where
the product that saves the gathered weight is outside of the policy (simple_fsdp.py, ReplicateComputation). The gradient
of an embedding does not read its table, so nothing keeps the table.
"""

from __future__ import annotations

from collections import Counter

from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.weights import Gathering, Weights


def parametrized(section: Section, eager: bool) -> Gathering:
    """Returns which of a section's weights stay gathered for its backward pass, and which are gathered again.

    In eager code weights of products outside of checkpoints stay; one compiled graph gathers all of them again.
    """
    weights, ops = section.weights, section.tape.ops
    if any(op.kind == "embedding" for op in ops):
        return Gathering(held=Weights(), again=Weights(), once=weights)
    inside = {i for region in section.tape.regions for i in range(region.first, region.last + 1)}
    stay = Counter(size for i, op in enumerate(ops) if eager and i not in inside for size in op.parameters)
    held, again = Weights(), Weights(experts=weights.experts)
    for kind in ("matrices", "vectors"):
        for size in getattr(weights, kind):
            stays = stay[size] > 0 or (eager and not inside)
            stay[size] -= 1
            getattr(held if stays else again, kind).append(size)
    return Gathering(held, again, once=Weights())
