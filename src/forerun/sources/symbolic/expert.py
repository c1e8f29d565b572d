"""Mixture of experts: router, dispatch over the expert-parallel group, grouped matrix products, and combination."""

from __future__ import annotations

from forerun.core.program.types import Collective, Stream
from forerun.describe.kernels.dispatchers import Dispatcher, dispatcher
from forerun.sources.symbolic.feed_forward import feed_forward
from forerun.sources.symbolic.linear import Casts, Product, Section
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.tape import TapeOp, on_compute

_BOTH_WAYS = (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL)
_GATHER = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
"""kinds of collective (forward, backward) of a dispatch by all-gather"""


def experts(section: Section, x: str, y: str, module: int) -> None:
    """Writes the routed (and shared) experts from the normed `x` to the branch output `y`."""
    kernels, s, moe = section.kernels, section.kernels.shapes, section.kernels.model.moe
    assert moe is not None
    plan = kernels.plan
    tokens = s.tokens_sp  # a rank routes its own tokens
    copies = tokens * moe.top_k
    busiest = max(plan.expert_imbalance, moe.capacity_factor or 1.0)
    local = max(1, moe.n_experts // plan.ep)
    way = dispatcher(kernels.stack.dispatcher)
    arrived = round(copies * busiest)
    if way.rounds_to > 1:
        arrived = ceil_div(ceil_div(arrived, local), way.rounds_to) * way.rounds_to * local
    width = moe.expert_ffn
    row = s.hidden * s.act_bytes

    section.weights.matrices.append(s.hidden * moe.n_experts)
    if moe.router_bias:
        section.weights.vectors.append(moe.n_experts)
    section.fan_out("ffn", x, tokens * s.hidden, 3 if moe.shared_ffn else 2, module)
    section.linear(Product("ffn.router", x, "scores", s.hidden, moe.n_experts, False, module), tokens, keeps_input=True)
    style = kernels.stack.moe
    section.pointwise(
        "ffn.route",
        "router",
        tokens * moe.n_experts,
        style,
        ("scores",),
        (("weights", tokens * moe.top_k * 8),),
        ("scores",),
        module,
    )
    routed = "routed" if moe.shared_ffn else y
    if way.exchange == "gather":
        inside = _copied_from_all(section, x, arrived, module)
        _grouped(section, inside, arrived, local, width, module)
        _summed_for_all(section, routed, arrived, module)
    else:
        inside = _sent(section, way, x, copies, arrived, local, module)
        _grouped(section, inside, arrived, local, width, module)
        _returned(section, way, routed, copies, arrived, local, module)
    size = tokens * row
    if moe.shared_ffn:
        from_shared = "shared.y"
        _shared(section, x, from_shared, module)
        forward, backward = kernels.pattern("residual", tokens * s.hidden, kernels.stack.residual)
        section.tape.add(
            TapeOp("ffn.sum", "pointwise", module, forward, backward, reads=(routed, from_shared), makes=((y, size),))
        )


def _sent(section: Section, way: Dispatcher, x: str, copies: int, arrived: int, local: int, module: int) -> str:
    """Sends copies of tokens to the ranks of their experts; returns the name of the tensor that the experts read."""
    kernels, s, moe = section.kernels, section.kernels.shapes, section.kernels.model.moe
    assert moe is not None
    row = s.hidden * s.act_bytes
    makes = (("sent", copies * row),)
    section.pointwise("ffn.permute", "permute", copies * s.hidden, kernels.stack.moe, (x,), makes, module=module)
    if way.counts:
        counts = kernels.collective("ffn.counts", Collective.ALL_TO_ALL, "ep", moe.n_experts * 8, Stream.EP)
        section.tape.add(TapeOp("ffn.counts", "view", module, counts, []))
    inside = _exchange(section, "ffn.dispatch", "sent", ("arrived", arrived * row), _BOTH_WAYS, copies * row, module)
    return _sorted(section, "ffn.sort", inside, "sorted", arrived, local, module) if way.sorts else inside


def _returned(section: Section, way: Dispatcher, y: str, copies: int, arrived: int, local: int, module: int) -> None:
    """Sends the experts' outputs back to the tokens' ranks, which sum them with the router's weights."""
    kernels, s = section.kernels, section.kernels.shapes
    row = s.hidden * s.act_bytes
    leaving = (
        _sorted(section, "ffn.unsort", "expert.y", "unsorted", arrived, local, module) if way.sorts else "expert.y"
    )
    name = "ffn.combine_exchange"
    back = _exchange(section, name, leaving, ("returned", copies * row), _BOTH_WAYS, copies * row, module)
    makes, saves = [(y, s.tokens_sp * row)], (back, "weights")
    if kernels.stack.dtensor and kernels.style(kernels.stack.moe) == "composed":  # weighted in fp32
        makes.append((back + ".float", copies * s.hidden * 4))
        saves = (back + ".float", "weights")
    reads = (back, "weights")
    section.pointwise(
        "ffn.combine", "combine", copies * s.hidden, kernels.stack.moe, reads, tuple(makes), saves, module
    )


def _copied_from_all(section: Section, x: str, arrived: int, module: int) -> str:
    """Gathers all tokens of the expert-parallel group and copies out those of the rank's experts."""
    kernels, s = section.kernels, section.kernels.shapes
    row = s.hidden * s.act_bytes
    every = s.tokens_sp * kernels.plan.ep * row
    found = _exchange(section, "ffn.dispatch", x, ("gathered", every), _GATHER, every, module)
    makes = (("arrived", arrived * row),)
    section.pointwise("ffn.permute", "permute", arrived * s.hidden, kernels.stack.moe, (found,), makes, module=module)
    return "arrived"


def _summed_for_all(section: Section, y: str, arrived: int, module: int) -> None:
    """Weights the outputs of a rank's experts and reduce-scatters them to the ranks that the tokens came from."""
    kernels, s = section.kernels, section.kernels.shapes
    own = s.tokens_sp * s.hidden * s.act_bytes
    alone = kernels.plan.ep == 1
    made, reads = y if alone else "partial", ("expert.y", "weights")
    makes = ((made, own * kernels.plan.ep),)
    section.pointwise("ffn.combine", "combine", arrived * s.hidden, kernels.stack.moe, reads, makes, reads, module)
    _exchange(section, "ffn.combine_exchange", made, (y, own), _GATHER[::-1], own * kernels.plan.ep, module)


def _exchange(
    section: Section,
    name: str,
    x: str,
    made: tuple[str, int],
    kinds: tuple[Collective, Collective],
    sent: int,
    module: int,
) -> str:
    """Writes a forward and a backward collective over the expert-parallel group, from `x` to the tensor `made`.

    They move the bytes of the larger side at the busiest rank. Returns the name of `made`; of `x` without expert
    parallelism.
    """
    kernels = section.kernels
    if kernels.plan.ep == 1:
        return x
    size = max(sent, made[1])
    forward = kernels.collective(name, kinds[0], "ep", size, Stream.EP)
    backward = kernels.collective(name + ".backward", kinds[1], "ep", size, Stream.EP)
    section.tape.add(TapeOp(name, "exchange", module, forward, backward, reads=(x,), makes=(made,)))
    return made[0]


def _sorted(section: Section, name: str, x: str, y: str, tokens: int, local: int, module: int) -> str:
    """Copies tokens from the order of sending ranks into the order of the local experts, or back."""
    kernels, s = section.kernels, section.kernels.shapes
    if kernels.plan.ep == 1 or local == 1:
        return x
    size = tokens * s.hidden * s.act_bytes
    section.pointwise(name, "copy", tokens * s.hidden, "fused", (x,), ((y, size),), module=module)
    return y


def _grouped(section: Section, x: str, tokens: int, local: int, width: int, module: int) -> None:
    """Writes the grouped products of the local experts over `tokens` routed tokens."""
    kernels, s = section.kernels, section.kernels.shapes
    each = max(1, ceil_div(tokens, local))
    gated = kernels.model.gated_mlp
    up = (2 if gated else 1) * width
    kit_fwd = kernels.gemms("ffn.expert_up", each, s.hidden, up, local)
    act_size = tokens * width * s.act_bytes
    one = local * s.hidden * width
    section.weights.experts += [one] * (3 if gated else 2)
    if kernels.model.mlp_bias:
        section.weights.experts.append(local * (up + s.hidden))

    def add(
        name: str, ops: tuple[int, int, int], reads: str, makes: tuple[str, int], elements: int, weights: int
    ) -> None:
        cast_in, cast_out = section.fp8_casts(name, Casts(elements, elements, makes[1] / s.act_bytes), weights)
        kept, made = section.kept_input(reads, elements)
        section.tape.add(
            TapeOp(
                name,
                "matmul",
                module,
                cast_in + on_compute(ops[0]),
                cast_out + on_compute(ops[1]),
                on_compute(ops[2]),
                reads=(reads,),
                saves=(kept,),
                makes=(makes, *made),
                weight_grad_bytes=section.weight_grad_bytes(weights),
            )
        )

    add("ffn.expert_up", kit_fwd, x, ("expert.u", tokens * up * s.act_bytes), tokens * s.hidden, local * s.hidden * up)
    pattern = "swiglu" if gated else "gelu"
    saves: tuple[str, ...] = ("expert.u",)
    makes = [("expert.act", act_size)]
    if gated and kernels.style(kernels.stack.activation) == "composed":  # backward reads silu(gate)
        makes.append(("expert.silu", act_size))
        saves = ("expert.u", "expert.silu")
    section.pointwise(
        "ffn.expert.act", pattern, tokens * width, kernels.stack.activation, ("expert.u",), tuple(makes), saves, module
    )
    down = kernels.gemms("ffn.expert_down", each, width, s.hidden, local)
    add("ffn.expert_down", down, "expert.act", ("expert.y", tokens * s.hidden * s.act_bytes), tokens * width, one)


def _shared(section: Section, x: str, y: str, module: int) -> None:
    moe = section.kernels.model.moe
    assert moe is not None
    feed_forward(section, x, y, module, ceil_div(moe.shared_ffn, section.tp), "shared")
    if moe.shared_gate:
        section.weights.matrices.append(section.kernels.shapes.hidden)
