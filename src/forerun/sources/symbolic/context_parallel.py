"""Context parallelism: attention over a sequence whose parts lie on several ranks.

`symbolic.ring` has the work of the slowest rank.
"""

from __future__ import annotations

from forerun.core.program.types import Collective, Stream
from forerun.sources.symbolic.attention_kernel import kernel_op, kernel_tape_op
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.queries_keys_values import attention_bytes
from forerun.sources.symbolic.ring import Piece, far_piece, gathered_piece
from forerun.sources.symbolic.tape import Stage, on_compute


def context_parallel(section: Section, module: int) -> None:
    """Writes attention over a sequence cut in cp parts.

    ring: ranks pass keys and values round, each hop beside the attention over the part that has arrived;
    allgather: ranks gather keys and values first; ulysses: all-to-alls from sequence shards to head shards and back.
    """
    kernels, s, plan = section.kernels, section.kernels.shapes, section.kernels.plan
    q, keys, values, out = attention_bytes(section)
    both = keys + values
    if kernels.stack.repeat_kv and not kernels.model.mla:  # compiled too: collectives send the copies
        both = q + out
    forward: list[Stage]
    backward: list[Stage]
    if plan.cp_method == "ulysses":
        heads, kv_heads = max(1, s.heads // plan.cp), max(1, s.kv_heads // plan.cp)
        f, b = kernel_op(section, plan.seq_len, plan.seq_len, kernels.model.causal, heads, kv_heads)
        into = kernels.collective("cp.qkv", Collective.ALL_TO_ALL, "cp", q + both, Stream.CP)
        back = kernels.collective("cp.out", Collective.ALL_TO_ALL, "cp", out, Stream.CP)
        forward, backward = [*into, *on_compute(f), *back], [*back, *on_compute(b), *into]
    elif plan.cp_method == "allgather" and kernels.stack.cp_merge == "fused":
        gather = kernels.collective("cp.gather", Collective.ALL_GATHER, "cp", both * plan.cp, Stream.CP)
        scatter = kernels.collective("cp.scatter", Collective.REDUCE_SCATTER, "cp", both * plan.cp, Stream.CP)
        whole = Piece(s.seq, plan.seq_len, causal=False)
        f, b = _piece_op(
            section, gathered_piece(plan.cp_load_balance, plan.cp, s.seq) if kernels.model.causal else whole
        )
        forward, backward = [*gather, *on_compute(f)], [*gather, *on_compute(b), *scatter]
    else:
        forward, backward = _pieces(section, both)
    section.tape.add(kernel_tape_op(section, forward, backward, module))


def _piece_op(section: Section, piece: Piece) -> tuple[int, int]:
    """Returns the op numbers of the kernels of one piece of a context-parallel rank's attention."""
    s = section.kernels.shapes
    return kernel_op(section, piece.queries, piece.keys, piece.causal, s.heads, s.kv_heads, piece.share)


def _pieces(section: Section, kv_bytes: int) -> tuple[list[Stage], list[Stage]]:
    """Returns the forward and backward stages of attention piece by piece, with the transfers of keys and values.

    The transfer of the next keys and values runs beside the piece before it. A ring passes them on with their
    gradients. PyTorch can also gather all keys and values beside the first piece; it passes gradients on until each is
    back at its owner. Compiled code waits for each collective at once (`wait_tensor` follows it in a traced graph,
    torch/distributed/_functional_collectives.py).
    """
    kernels, s, plan = section.kernels, section.kernels.shapes, section.kernels.plan
    own_f, own_b = kernel_op(section, s.seq, s.seq, kernels.model.causal, s.heads, s.kv_heads)
    whole = Piece(s.seq, s.seq, causal=False)
    far_f, far_b = _piece_op(section, far_piece(plan.cp_load_balance, s.seq) if kernels.model.causal else whole)
    by_pytorch = kernels.stack.cp_merge != "fused"
    beside = kernels.stack.cp_overlap and not (by_pytorch and plan.compiles_layers)
    gradients = kv_bytes // s.act_bytes * 4 if by_pytorch else kv_bytes
    home = (kernels.p2p("cp.hop.gradients", "cp", gradients), Stream.CP)
    last = plan.cp - 1
    there: list[Stage]
    back: list[Stage]
    if plan.cp_method == "allgather":
        gather = kernels.collective("cp.gather", Collective.ALL_GATHER, "cp", kv_bytes * plan.cp, Stream.CP)
        there, back = [*gather, *[()] * last], [*gather, *[(home,)] * last]
    else:
        hop = (kernels.p2p("cp.hop", "cp", kv_bytes), Stream.CP)
        there, back = [*[(hop,)] * last, ()], [*[(hop, home)] * last, ()]
    merge_f, merge_b = kernels.pattern("cp_merge", s.tokens * s.heads * s.v_head_dim, kernels.stack.cp_merge)

    def stages(own: int, far: int, wires: list[Stage], merge: list[Stage]) -> list[Stage]:
        out: list[Stage] = []
        for i, wire in enumerate(wires):
            work = on_compute(own if i == 0 else far)
            if beside or not wire:
                out.append((*wire, *work[0]))
            else:
                out += [*work, wire]
            out += merge if i else []
        return out

    backward = stages(own_b, far_b, back, merge_b)
    if by_pytorch:  # one more hop brings the gradients back to their owner
        backward.append((home,))
    return stages(own_f, far_f, there, merge_f), backward
