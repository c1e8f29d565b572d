"""The fused attention kernel: its shapes, the tensors that it reads, keeps and makes, and its operation on a tape."""

from __future__ import annotations

from forerun.core.program.kinds import Attention
from forerun.describe.kernels.attention import attention_kernel
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.sources.symbolic.compressed import keys_read
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.queries_keys_values import attention_bytes, query_names
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.tape import Stage, TapeOp


def kernel_name(section: Section) -> str:
    """Returns the name of the plan's attention kernel, or of the stack's."""
    kernels = section.kernels
    return kernels.stack.attention_kernel(kernels.plan.attention, kernels.architecture)


def kernel_kind(section: Section) -> str:
    """Returns the kind of the fused kernel: `attention`, or `core` where checkpointing by operation drops it."""
    unknown = kernel_name(section) in section.kernels.stack.op_policy_misses
    return "core" if unknown else "attention"


def kernel_op(
    section: Section, seq_q: int, seq_kv: int, causal: bool, heads: int, kv_heads: int, share: float = 1.0
) -> tuple[int, int]:
    """Returns the op numbers of the forward and backward kernel; the average rank executes `share` of the FLOPs."""
    kernels, s = section.kernels, section.kernels.shapes
    kernel = kernel_name(section)
    add = kernels.ops.attention
    batch, documents = kernels.plan.micro_batch, kernels.plan.documents
    if len(set(documents)) == 1 and len(documents) > 1:
        batch, seq_q, seq_kv = batch * len(documents), documents[0], documents[0]
    window, compressed = kernels.model.sliding_window, kernels.model.compressed
    if compressed:
        seq_kv, causal = keys_read(section, compressed, seq_q), False
    elif window and window < seq_kv and causal:
        seq_kv, causal = window, False
    elif window and not kernels.model.causal:
        seq_kv = min(seq_kv, 2 * window + 1)
    chunk, indexer = kernels.model.attention_chunk, kernels.model.indexer
    if chunk and chunk < min(seq_q, seq_kv):
        batch, seq_q, seq_kv = batch * ceil_div(seq_q, chunk), chunk, chunk
    if len(set(documents)) > 1:
        batch, seq_q, seq_kv, causal = kernels.plan.micro_batch, kernels.plan.seq_len, _keys(section), False
    if indexer and not compressed and indexer.top_k < seq_kv:
        seq_kv, causal = indexer.top_k, False
    sizes = (batch, heads, kv_heads, seq_q, seq_kv, s.head_dim, int(causal))
    forward, backward = (Attention(*sizes, backward=turn, v_head_dim=s.v_head_dim) for turn in (0, 1))
    size = DTYPE_BYTES[kernels.wide_dtype]
    return (
        add("attention.kernel", forward, kernel, kernels.wide_dtype, size, share=share),
        add("attention.kernel.backward", backward, kernel, kernels.wide_dtype, size, share=share),
    )


def _keys(section: Section) -> int:
    """Returns the keys that a query of documents of several lengths reads, on average over all queries."""
    model, pairs = section.kernels.model, 0.0
    for document in section.kernels.plan.documents:
        chunk = model.attention_chunk or document
        for length in (*[chunk] * (document // chunk), document % chunk):
            window = min(model.sliding_window or length, length)
            beside = min(2 * window + 1, length)
            pairs += length * window - window * window / 2 if model.causal else length * beside
    return max(1, round(pairs / section.kernels.plan.seq_len))


def kernel_tensors(section: Section) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """Returns the tensors that the kernel reads and keeps, and those it makes as (name, bytes).

    It makes the output, and fp32 statistics of each query and head.
    """
    s = section.kernels.shapes
    *_, out = attention_bytes(section)
    calls = 1 + section.kernels.model.differential
    biases = ("relative.bias",) * (section.kernels.model.relative_rank > 0)
    reads = (*dict.fromkeys(query_names(section)), *biases)
    statistics = attention_kernel(kernel_name(section)).keeps
    return reads, (("o", calls * out), *((name, calls * s.tokens * s.heads * 4) for name in statistics))


def kernel_tape_op(section: Section, forward: list[Stage], backward: list[Stage], module: int) -> TapeOp:
    """Returns the operation of fused attention that runs these kernels (and transfers) in either direction."""
    reads, makes = kernel_tensors(section)
    saves = (*reads, *(name for name, _ in makes))
    kind = kernel_kind(section)
    return TapeOp("attention.kernel", kind, module, forward, backward, reads=reads, saves=saves, makes=makes)
