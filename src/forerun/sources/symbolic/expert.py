"""Mixture of experts: router, the way of tokens to their experts, grouped matrix products, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from forerun.core.network.token_exchange import parts_reached
from forerun.core.program.kinds import TokenExchange
from forerun.core.program.types import Collective, Stream
from forerun.describe.kernels.dispatchers import Dispatcher
from forerun.describe.model.layer_parameters import router_products
from forerun.describe.plan.routing import BALANCED, spread
from forerun.describe.stacks.stack import Style
from forerun.sources.symbolic.feed_forward import feed_forward
from forerun.sources.symbolic.linear import Casts, Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.tape import EXCHANGE, Stage, TapeOp, on_compute

_GATHER = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
"""kinds of collective (forward, backward) of a dispatch by all-gather"""
_COMBINE = "ffn.combine_exchange"
_SCALED_TILE = 128
"""elements of a token that share an fp32 scale where it travels in 8 bits"""


Beside = Callable[[], None]
"""writes operations that run beside an exchange of tokens"""


def experts(section: Section, x: str, y: str, module: int) -> None:
    """Writes the routed (and shared) experts from the normed `x` to the branch output `y`."""
    kernels, s, moe = section.kernels, section.kernels.shapes, section.kernels.model.moe
    assert moe is not None
    tokens, row = s.tokens_sp, s.hidden * s.act_bytes
    routed = "routed" if moe.shared_ffn else y
    beside = kernels.plan.shared_expert_overlap and moe.shared_ffn > 0
    routed_experts(section, x, routed, module, partial(_shared, section, x, "shared.y", module) if beside else None)
    size = tokens * row
    if moe.shared_ffn:
        from_shared = "shared.y"
        if not beside:
            _shared(section, x, from_shared, module)
        forward, backward = kernels.pattern("residual", tokens * s.hidden, kernels.stack.residual)
        section.tape.add(
            TapeOp("ffn.sum", "pointwise", module, forward, backward, reads=(routed, from_shared), makes=((y, size),))
        )


def routed_experts(
    section: Section, x: str, y: str, module: int, dispatch: Beside | None = None, combine: Beside | None = None
) -> None:
    """Writes the router and the routed experts from the normed `x` to `y`. `dispatch` and `combine` write the work
    beside the exchanges that bring tokens to their experts and back.
    """
    kernels, s, moe = section.kernels, section.kernels.shapes, section.kernels.model.moe
    assert moe is not None
    tokens = s.tokens_sp  # a rank routes its own tokens
    if moe.router_bias:
        section.weights.vectors.append(moe.choices)
    section.fan_out("ffn", x, tokens * s.hidden, 3 if moe.shared_ffn or dispatch else 2, module)
    _scores(section, x, module)
    section.pointwise(
        "ffn.route",
        "router",
        tokens * moe.scores,
        kernels.stack.moe,
        ("scores",),
        (("weights", tokens * moe.top_k * 8),),
        ("scores",),
        module,
    )
    _Routed(section, kernels.dispatcher, module, {"ffn.dispatch": dispatch, _COMBINE: combine}).write(x, y)


def _scores(section: Section, x: str, module: int) -> None:
    """Writes the products of the router, with a norm and activations between those of a deep one; every
    tensor-parallel rank has its weights whole."""
    kernels, moe, tokens = section.kernels, section.kernels.model.moe, section.kernels.shapes.tokens_sp
    assert moe is not None
    *hidden, last = router_products(kernels.model, moe)
    for number, (n_in, n_out) in enumerate(hidden):
        name, y = f"ffn.router{number}", f"router{number}"
        section.weights.add_matrix(n_in, n_out)
        section.weights.vectors.append(n_out)
        section.linear(Product(name, x, y, n_in, n_out, True, module), tokens, keeps_input=True)
        x = f"{y}.act"
        if number == 0:
            section.norm(f"{name}.norm", y, x, tokens, module, n_out)
        else:
            made = ((x, tokens * n_out * kernels.shapes.act_bytes),)
            section.pointwise(f"{name}.act", "gelu", tokens * n_out, kernels.stack.moe, (y,), made, (y,), module)
    section.weights.add_matrix(*last)
    section.linear(Product("ffn.router", x, "scores", *last, False, module), tokens, keeps_input=True)


class _Routed:
    """The routed experts of a layer under one dispatcher."""

    def __init__(self, section: Section, way: Dispatcher, module: int, beside: Mapping[str, Beside | None]) -> None:
        """`beside` writes the work beside the exchanges, by their names."""
        self.section, self.way, self.module, self.beside = section, way, module, beside
        kernels, plan, moe = section.kernels, section.kernels.plan, section.kernels.model.moe
        assert moe is not None
        self.kernels, self.shapes, self.moe = kernels, kernels.shapes, moe
        self.tokens = self.shapes.tokens_sp
        self.reached = max(1, round(moe.mean_reached))
        """experts with weights that a token chooses"""
        self.copies = round(self.tokens * moe.mean_reached)
        """rows that leave for all experts of the rank's tokens; those without weights stay where they are"""
        self.local = max(1, moe.n_experts // plan.ep)
        """experts of the rank"""
        self.busiest, self.fullest = self._loads()
        """rows of the rank that the others wait for, and of the one that keeps most, over the mean of all ranks"""
        arrived = round(self.copies * self.busiest) * plan.etp
        if way.rounds_to > 1:
            arrived = ceil_div(ceil_div(arrived, self.local), way.rounds_to) * way.rounds_to * self.local
        self.arrived = arrived
        """rows that the rank's experts compute: those of all ranks that split these experts"""
        self.landed = arrived // plan.etp
        """rows that the exchange brings to the rank itself"""
        self.row = self.shapes.hidden * self.shapes.act_bytes
        """bytes of a token"""

    def _loads(self) -> tuple[float, float]:
        plan, moe = self.kernels.plan, self.moe
        if moe.capacity_factor:  # experts are padded to their capacity, and drop what is beyond it
            return moe.capacity_factor, moe.capacity_factor
        if plan.expert_routing == BALANCED:
            return plan.expert_imbalance, plan.expert_imbalance
        tokens, layers = self.tokens * plan.ep * plan.etp, self.kernels.depth // plan.pp
        found = spread(plan.expert_routing, moe.n_experts, self.reached, plan.ep, tokens, layers)
        return max(found.busiest, plan.expert_imbalance), max(found.fullest, plan.expert_imbalance)

    def _kept(self, rows: int) -> int:
        """Returns the rows of the fullest rank where the busiest one has `rows`."""
        return rows if self.fullest == self.busiest else round(rows * self.fullest / self.busiest)

    def write(self, x: str, y: str) -> None:
        if self.way.exchange == "gather":
            self._grouped(self._copied_from_all(x))
            self._summed_for_all(y)
        elif self.way.copies == "node" and self.kernels.plan.ep > 1:
            self._grouped(self._sent_once(x))
            self._returned_once(y)
        else:
            self._grouped(self._sent(x))
            self._returned(y)

    # -- a copy for each expert ----------------------------------------------------------------------------

    def _sent(self, x: str) -> str:
        """Sends copies of tokens to the ranks of their experts; returns the tensor that the experts read."""
        section, kernels, module = self.section, self.kernels, self.module
        style, elements = kernels.stack.moe, self.copies * self.shapes.hidden
        makes = (("sent", self.copies * self.row),)
        section.pointwise("ffn.permute", "permute", elements, style, (x,), makes, module=module)
        if self.way.counts:
            size = self.moe.n_experts * 8
            counts = kernels.collective("ffn.counts", Collective.ALL_TO_ALL, "ep", size, Stream.EP)
            waits = self.way.reads_counts and not kernels.plan.cuda_graphs
            section.tape.add(TapeOp("ffn.counts", "view", module, counts, [], awaited=waits))
        size = max(self.copies, self.landed) * self.row
        moves = self._by_nccl("ffn.dispatch", (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL), size)
        inside = self._exchange("ffn.dispatch", "sent", ("arrived", self._kept(self.landed) * self.row), moves)
        inside = self._from_peers(inside, self.landed, self.row)
        return self._sorted("ffn.sort", inside, "sorted") if self.way.sorts else inside

    def _returned(self, y: str) -> None:
        """Sends the experts' outputs back to the tokens' ranks, which sum them with the router's weights."""
        kernels, section = self.kernels, self.section
        leaving = self._sorted("ffn.unsort", "expert.y", "unsorted") if self.way.sorts else "expert.y"
        leaving = self._to_peers(leaving, self.landed)
        name, size = _COMBINE, max(self.copies, self.landed) * self.row
        moves = self._by_nccl(name, (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL), size)
        back = self._exchange(name, leaving, ("returned", self.copies * self.row), moves)
        makes = [(y, self.tokens * self.row)]
        saves: tuple[str, ...] = (back, "weights")
        if kernels.stack.dtensor and kernels.style(kernels.stack.moe) == "composed":  # weighted in fp32
            makes.append((back + ".float", self.copies * self.shapes.hidden * 4))
            saves = (back + ".float", "weights")
        if kernels.stack.weights_in_activation:
            saves = ()
        elements, reads = self.copies * self.shapes.hidden, (back, "weights")
        section.pointwise(
            "ffn.combine", "combine", elements, kernels.stack.moe, reads, tuple(makes), saves, self.module
        )

    def _sorted(self, name: str, x: str, y: str) -> str:
        """Copies tokens from the order of sending ranks into the order of the local experts, or back."""
        if self.kernels.plan.ep == 1 or self.local == 1:
            return x
        elements, makes = self.arrived * self.shapes.hidden, ((y, self._kept(self.arrived) * self.row),)
        self.section.pointwise(name, "copy", elements, "fused", (x,), makes, module=self.module)
        return y

    # -- a copy for each GPU -------------------------------------------------------------------------------

    @property
    def _narrow(self) -> bool:
        """Returns whether tokens travel in 8 bits."""
        return self.way.fp8_dispatch and self.kernels.fp8

    @property
    def _sent_row(self) -> int:
        """Returns the bytes of a token on its way to the experts."""
        hidden = self.shapes.hidden
        return hidden + 4 * ceil_div(hidden, _SCALED_TILE) if self._narrow else self.row

    @property
    def _unique(self) -> int:
        """Returns the tokens that arrive at the rank: one may have several of its experts."""
        share = parts_reached(self.kernels.plan.ep, self._routing(0)) / self.reached
        return round(self.copies * self.busiest * share)

    def _routing(self, combine: int) -> TokenExchange[int]:
        moe = self.moe
        return TokenExchange(moe.n_experts, self.reached, moe.n_groups, moe.top_groups, combine)

    def _by_kernel(self, name: str, combine: int) -> list[Stage]:
        """Returns the dispatcher's kernel that brings tokens to experts, or back."""
        row = self.row if combine else self._sent_row
        size = round(self.copies * self.busiest) * row
        return self.kernels.token_exchange(name, self.way.name, self._routing(combine), size)

    @property
    def _order_style(self) -> Style:
        """Returns the style of the kernels that bring tokens into the order of the experts, and back."""
        return "fused" if self.way.orders_tokens else self.kernels.stack.moe

    def _sent_once(self, x: str) -> str:
        """Sends each token once to each GPU, which copies it for those of its experts that the token chose."""
        section, kernels, module, hidden = self.section, self.kernels, self.module, self.shapes.hidden
        if self._narrow:
            cast = kernels.casts("ffn.dispatch", self.tokens * hidden)
            makes = (("sent", self.tokens * self._sent_row),)
            section.tape.add(TapeOp("ffn.dispatch.cast", "pointwise", module, cast, [], reads=(x,), makes=makes))
            x = "sent"
        moves = self._by_kernel("ffn.dispatch", 0), self._by_kernel("ffn.dispatch.backward", 1)
        inside = self._exchange("ffn.dispatch", x, ("arrived", self._kept(self._unique) * self._sent_row), moves)
        inside = self._from_peers(inside, self._unique, self._sent_row)
        elements = self.arrived * hidden * self._sent_row / self.row
        forward, _ = kernels.pattern("permute", elements, self._order_style)
        _, backward = kernels.pattern("permute", self.arrived * hidden, self._order_style)
        makes = (("permuted", self._kept(self.arrived) * self._sent_row),)
        section.tape.add(TapeOp("ffn.permute", "pointwise", module, forward, backward, reads=(inside,), makes=makes))
        return "permuted"

    def _returned_once(self, y: str) -> None:
        """Sums the outputs of a GPU's experts for each token, and sends the sums back."""
        kernels, section, module = self.kernels, self.section, self.module
        etp = self.kernels.plan.etp
        elements, makes = self.arrived * self.shapes.hidden, (("leaving", self._kept(self._unique) * self.row * etp),)
        saves: tuple[str, ...] = () if kernels.stack.weights_in_activation else ("expert.y", "weights")
        reads = ("expert.y", "weights")
        section.pointwise("ffn.unpermute", "combine", elements, self._order_style, reads, makes, saves, module)
        name = _COMBINE
        moves = self._by_kernel(name, 1), self._by_kernel(name + ".backward", 0)
        self._exchange(name, self._to_peers("leaving", self._unique), (y, self.tokens * self.row), moves)

    # -- all tokens to all ---------------------------------------------------------------------------------

    def _copied_from_all(self, x: str) -> str:
        """Gathers all tokens of the expert-parallel group and copies out those of the rank's experts."""
        section, elements = self.section, self.landed * self.shapes.hidden
        every = self.tokens * self.kernels.plan.ep * self.row
        found = self._exchange("ffn.dispatch", x, ("gathered", every), self._by_nccl("ffn.dispatch", _GATHER, every))
        makes = (("arrived", self._kept(self.landed) * self.row),)
        section.pointwise(
            "ffn.permute", "permute", elements, self.kernels.stack.moe, (found,), makes, module=self.module
        )
        return self._from_peers("arrived", self.landed, self.row)

    def _summed_for_all(self, y: str) -> None:
        """Weights the outputs of a rank's experts and reduce-scatters them to the ranks that the tokens came from."""
        ep, section, style = self.kernels.plan.ep, self.section, self.kernels.stack.moe
        own, elements = self.tokens * self.row, self.landed * self.shapes.hidden
        made, reads = y if ep == 1 else "partial", (self._to_peers("expert.y", self.landed), "weights")
        section.pointwise("ffn.combine", "combine", elements, style, reads, ((made, own * ep),), reads, self.module)
        name = _COMBINE
        self._exchange(name, made, (y, own), self._by_nccl(name, _GATHER[::-1], own * ep))

    # -- ranks that split an expert ------------------------------------------------------------------------

    def _from_peers(self, x: str, rows: int, row: int) -> str:
        """Gathers the tokens that arrived at the ranks that split the same experts, as Megatron-Core's dispatchers do
        after their exchange: `rows` of `row` bytes of each. Returns the tensor of all of them."""
        if self.kernels.plan.etp == 1:
            return x
        every = rows * row * self.kernels.plan.etp
        wide = every * self.row // row  # gradients come back in 16 bits
        made = self._kept(rows) * row * self.kernels.plan.etp
        self._between_peers("ffn.expert_gather", x, ("of_peers", made), (every, wide), _GATHER)
        return "of_peers"

    def _to_peers(self, x: str, rows: int) -> str:
        """Sums the outputs of these ranks for each token. Each rank keeps its own `rows`."""
        etp = self.kernels.plan.etp
        if etp == 1:
            return x
        size = rows * self.row * etp
        self._between_peers(
            "ffn.expert_scatter", x, ("of_own", self._kept(rows) * self.row), (size, size), _GATHER[::-1]
        )
        return "of_own"

    def _between_peers(
        self,
        name: str,
        x: str,
        made: tuple[str, int],
        sizes: tuple[int, int],
        kinds: tuple[Collective, Collective],
    ) -> None:
        """Writes a collective over the ranks that split an expert; `sizes` and `kinds` are of forward and backward."""
        forward, backward = (
            self.kernels.collective(one, kind, "etp", size, Stream.TP)
            for one, kind, size in zip((name, name + ".backward"), kinds, sizes, strict=True)
        )
        self.section.tape.add(TapeOp(name, "gather", self.module, forward, backward, reads=(x,), makes=(made,)))

    # -- exchanges and products ----------------------------------------------------------------------------

    def _by_nccl(self, name: str, kinds: tuple[Collective, Collective], size: int) -> tuple[list[Stage], list[Stage]]:
        """Returns a forward and a backward collective of `size` bytes."""
        forward, backward = (
            self.kernels.collective(one, kind, "ep", size, Stream.EP)
            for one, kind in zip((name, name + ".backward"), kinds, strict=True)
        )
        return forward, backward

    def _exchange(self, name: str, x: str, made: tuple[str, int], moves: tuple[list[Stage], list[Stage]]) -> str:
        """Writes an exchange over the expert-parallel group, from `x` to the tensor `made`; `moves` are its kernels in
        either direction. Returns the name of `made`; of `x` without expert parallelism."""
        exchanged = self.kernels.plan.ep > 1
        if exchanged:
            self.section.tape.add(TapeOp(name, EXCHANGE, self.module, *moves, reads=(x,), makes=(made,)))
        beside, first = self.beside[name], len(self.section.tape.ops)
        if beside is not None:
            beside()
        for op in self.section.tape.ops[first:]:
            op.beside = exchanged
        if not exchanged:
            return x
        return made[0]

    def _grouped(self, x: str) -> None:
        """Writes the grouped products of the local experts over the tokens in `x`."""
        section, kernels, s, tokens, local = self.section, self.kernels, self.shapes, self.arrived, self.local
        width = self.moe.expert_ffn // kernels.plan.etp
        each = max(1, ceil_div(tokens, local))
        gated = kernels.model.gated_mlp
        up = (2 if gated else 1) * width
        kept = self._kept(tokens)
        act_size = kept * width * s.act_bytes
        one = local * s.hidden * width
        for _ in range(up // width):
            section.weights.add_experts(s.hidden, width, local)
        section.weights.add_experts(width, s.hidden, local)
        if kernels.model.mlp_bias:
            section.weights.experts.append(local * (up + s.hidden))
        kit = kernels.gemms("ffn.expert_up", each, s.hidden, up, local)
        self._product("ffn.expert_up", kit, x, ("expert.u", kept * up * s.act_bytes), s.hidden, local * s.hidden * up)
        saves: tuple[str, ...] = ("expert.u",)
        makes = [("expert.act", act_size)]
        if gated and kernels.keeps_steps(kernels.stack.activation):  # backward reads silu(gate)
            makes.append(("expert.silu", act_size))
            saves = ("expert.u", "expert.silu")
        pattern, reads = "swiglu" if gated else "gelu", ("expert.u",)
        section.pointwise(
            *("ffn.expert.act", pattern, tokens * width, kernels.stack.activation),
            *(reads, tuple(makes), saves, self.module),
        )
        kit = kernels.gemms("ffn.expert_down", each, width, s.hidden, local)
        self._product("ffn.expert_down", kit, "expert.act", ("expert.y", kept * self.row), width, one)

    def _product(
        self, name: str, ops: tuple[int, int, int], x: str, made: tuple[str, int], width: int, weights: int
    ) -> None:
        """Writes a grouped product of the rows of `x`, each of `width` elements."""
        section, elements = self.section, self.arrived * width
        made_elements = made[1] / self.shapes.act_bytes * (self.busiest / self.fullest)
        cast = self._narrow and x == "permuted"
        """whether `x` came in 8 bits, so that only the weight's gradient needs another cast of it"""
        casts = Casts(0 if cast else elements, elements, made_elements)
        cast_in, cast_out = section.fp8_casts(name, casts, weights)
        kept, extra = ((x,), ()) if cast else section.kept_input(x, self._kept(self.arrived) * width)
        section.tape.add(
            TapeOp(
                name,
                "matmul",
                self.module,
                cast_in + on_compute(ops[0]),
                cast_out + on_compute(ops[1]),
                on_compute(ops[2]),
                reads=(x,),
                saves=kept,
                makes=(made, *extra),
                weight_grad_bytes=section.weight_grad_bytes(weights),
            )
        )


def _shared(section: Section, x: str, y: str, module: int) -> None:
    moe = section.kernels.model.moe
    assert moe is not None
    feed_forward(section, x, y, module, ceil_div(moe.shared_ffn, section.tp), "shared")
    if moe.shared_gate:
        section.weights.add_matrix(section.kernels.shapes.hidden, 1)
