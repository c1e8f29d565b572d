"""How long gathered parameters are there in parametrisation-based FSDP, where each use of a parameter gathers it.

Autograd decides: a product saves the gathered weight for its backward pass, unless a checkpoint around it runs the
gather again. A policy that recomputes gathers alone changes nothing in eager code, as the product that saves their
result stands outside of it; in a compiled graph it does (simple_fsdp.py, ReplicateComputation). A table of embeddings
is not needed for its gradient.
"""

from __future__ import annotations

from collections import Counter

from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.weights import Gathering, Weights


def parametrized(section: Section, eager: bool) -> Gathering:
    """What of a section's weights stays gathered for its backward pass, and what is gathered again.

    In eager code weights of products outside of checkpoints stay; in one compiled graph all are gathered again.
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
