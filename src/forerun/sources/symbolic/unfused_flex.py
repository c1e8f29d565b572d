"""FlexAttention outside of compiled code: all scores in fp32, operation by operation.

`flex_attention` outside of torch.compile, or inside a checkpoint that Dynamo does not capture, runs `sdpa_dense` and
`sdpa_dense_backward` of torch/_higher_order_ops/flex_attention.py (torch 2.13). Both hold most intermediate results
until the function returns, so that memory peaks at 4.25 fp32 copies of the scores forward and 6.5 backward (7 for an
fp32 model). Autograd keeps queries, keys, values, the output, and two fp32 values for each query.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.sources.symbolic.kernels import TransformerKernels
from forerun.sources.symbolic.tape import Held, Stage, TapeOp, on_compute

_WIDE = 4
"""bytes of an element of the scores"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one rank's attention in one micro batch; properties count elements."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    keys: int
    head_dim: int
    v_head_dim: int

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.seq * self.keys

    @property
    def queries(self) -> int:
        return self.batch * self.heads * self.seq * self.head_dim

    @property
    def repeated_keys(self) -> int:
        return self.batch * self.heads * self.keys * self.head_dim

    @property
    def repeated_values(self) -> int:
        return self.batch * self.heads * self.keys * self.v_head_dim

    @property
    def output(self) -> int:
        return self.batch * self.heads * self.seq * self.v_head_dim

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.seq


def unfused_flex(
    kernels: TransformerKernels, sizes: Sizes, reads: tuple[str, ...], made: tuple[tuple[str, int], ...], module: int
) -> TapeOp:
    """Returns the operation from `reads` (queries, keys, values) to the tensors `made`. The backward pass needs all of
    them.
    """
    there, back = _forward(kernels, sizes), _backward(kernels, sizes)
    return TapeOp(
        "attention.kernel",
        "attention",
        module,
        there.stages,
        back.stages,
        reads=reads,
        saves=(*reads, *(name for name, _ in made)),
        makes=made,
        forward_held=tuple(there.held),
        backward_held=tuple(back.held),
    )


@dataclass
class _Run:
    """Operations one after the other, with the memory that each of them needs."""

    kernels: TransformerKernels
    sizes: Sizes
    stages: list[Stage] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    _since: dict[str, tuple[int, int]] = field(default_factory=dict)

    def traffic(self, name: str, read: float, written: float, makes: tuple[tuple[str, int], ...] = ()) -> None:
        """Adds an element-wise kernel or a reduction; `makes` is the memory (name, bytes) that it allocates."""
        self._allocate(makes)
        self.stages += self.kernels.traffic("attention.flex." + name, read, written)

    def product(self, name: str, m: int, n: int, k: int, wide: bool, makes: tuple[tuple[str, int], ...] = ()) -> None:
        """Adds a batched product of all heads, in fp32 where `wide`."""
        self._allocate(makes)
        kernels, size = self.kernels, self.sizes
        narrow = kernels.wide_dtype
        dtype = "fp32" if wide and narrow != "tf32" else narrow
        self.stages += on_compute(
            kernels.ops.gemm("attention.flex." + name, m, n, k, size.batch * size.heads, 0, dtype)
        )

    def free(self, *names: str) -> None:
        """Frees memory that no later kernel reads."""
        for name in names:
            size, since = self._since.pop(name)
            self.held.append((size, since, len(self.stages) - 1))

    def end(self) -> _Run:
        """Frees the remaining memory, as the function does when it returns."""
        self.free(*self._since)
        return self

    def _allocate(self, makes: tuple[tuple[str, int], ...]) -> None:
        for name, size in makes:
            self._since[name] = (size, len(self.stages))

    def wide_copy(self, name: str, elements: int, again: bool = False) -> None:
        """Adds a copy of `elements` to fp32; with `again` also a contiguous copy, as heads of several samples need."""
        narrow, copies = self.kernels.act_bytes, again and self.sizes.batch > 1
        if narrow < _WIDE:
            self.traffic(name, elements * narrow, elements * _WIDE, ((name, elements * _WIDE),))
        if copies:
            size = elements * _WIDE
            self.traffic(name + ".contiguous", size, size, ((name + ".contiguous", size),))

    def drop_copies(self, *names: str) -> None:
        """Frees the copies that `wide_copy` made, if any."""
        self.free(*(found for name in names for found in (name, name + ".contiguous") if found in self._since))

    def repeated(self) -> None:
        """Adds the copies of keys and values for each query head; torch makes them even without grouped heads."""
        size, narrow = self.sizes, self.kernels.act_bytes
        for name, elements in (("values", size.repeated_values), ("keys", size.repeated_keys)):
            read = elements // size.heads * size.kv_heads * narrow
            self.traffic(name, read, elements * narrow, ((name, elements * narrow),))

    def scores(self) -> None:
        """Adds `_math_attention_inner`: scores in fp32, scaled, and masked into a copy."""
        size, full, flags = self.sizes, self.sizes.scores * _WIDE, self.sizes.seq * self.sizes.keys
        self.wide_copy("queries", size.queries, again=True)
        self.wide_copy("wide_keys", size.repeated_keys)
        self.product("scores", size.seq, size.keys, size.head_dim, True, (("products", full),))
        self.drop_copies("queries", "wide_keys")
        self.traffic("scale", full, full, (("scores", full),))
        self.free("products")
        self.traffic("mask", _WIDE * (size.seq + size.keys), flags, (("flags", flags),))
        self.traffic("masked", full + flags, full, (("masked", full),))
        self.free("flags")


def _forward(kernels: TransformerKernels, size: Sizes) -> _Run:
    """Returns the operations of `sdpa_dense`."""
    run, full, narrow = _Run(kernels, size), size.scores * _WIDE, kernels.act_bytes
    run.repeated()
    run.scores()
    run.traffic("amax", full, size.rows * _WIDE)
    run.traffic("exponentials", full, full, (("exponentials", full),))
    run.traffic("exp", full, full)
    run.traffic("logsumexp", full, size.rows * _WIDE)
    run.free("exponentials")
    run.traffic("is_masked", full, size.scores, (("no_scores", size.scores),))
    run.traffic("masked_rows", size.scores, size.rows)
    run.free("no_scores")
    run.traffic("max", full, size.rows * (_WIDE + 8))
    run.traffic("softmax", full, full, (("exact", full),))
    run.traffic("no_finite_score", full, size.scores, (("unsafe", size.scores),))
    run.traffic("unsafe_rows", size.scores, size.rows)
    run.traffic("safe_softmax", full, full, (("softmax", full),))
    run.free("exact", "unsafe", "masked")
    if narrow < _WIDE:
        run.traffic("narrow", full, size.scores * narrow, (("narrow", size.scores * narrow),))
    run.product("values_of", size.seq, size.v_head_dim, size.keys, False, (("by_heads", size.output * narrow),))
    run.traffic("layout", size.output * narrow, size.output * narrow)
    return run.end()


def _backward(kernels: TransformerKernels, size: Sizes) -> _Run:
    """Returns the operations of `sdpa_dense_backward`, which allocates its gradients first."""
    run, full, narrow = _Run(kernels, size), size.scores * _WIDE, kernels.act_bytes
    half, copies = size.scores * narrow, size.batch > 1
    inputs = [size.queries, *(e // size.heads * size.kv_heads for e in (size.repeated_keys, size.repeated_values))]
    for elements in inputs:
        run.traffic("layout.grad", elements * narrow, elements * narrow)
    run.repeated()
    run.scores()
    run.traffic("difference", full, full, (("difference", full),))
    run.traffic("exp", full, full, (("exponentials", full),))
    run.free("difference")
    run.traffic("softmax", full, full, (("softmax", full),))
    run.free("exponentials")
    if narrow < _WIDE:
        run.traffic("narrow", full, half, (("narrow", half),))
    if copies:
        run.traffic("grad", size.output * narrow, size.output * narrow, (("grad", size.output * narrow),))
    made = (("grad_values", size.repeated_values * narrow),)
    run.product("grad_values", size.keys, size.v_head_dim, size.seq, False, made)
    run.drop_copies("narrow", "grad")
    run.wide_copy("wide_grad", size.output, again=True)
    run.wide_copy("wide_values", size.repeated_values)
    run.product("grad_softmax", size.seq, size.keys, size.v_head_dim, True, (("grad_softmax", full),))
    run.drop_copies("wide_grad", "wide_values")
    _row_sums(run)
    run.traffic("centred", full, full, (("centred", full),))
    run.traffic("centred_again", full, full, (("centred_again", full),))
    run.free("centred")
    run.traffic("grad_masked", 2 * full, full, (("grad_masked", full),))
    run.free("centred_again")
    run.traffic("grad_scaled", full, full, (("grad_scaled", full),))
    if narrow < _WIDE:
        run.traffic("grad_narrow", full, half, (("grad_narrow", half),))
        run.free("grad_scaled")
    flags = size.seq * size.keys
    run.traffic("mask", _WIDE * (size.seq + size.keys), flags, (("flags", flags),))
    run.traffic("grad_scores", half + flags, half, (("grad_scores", half),))
    run.drop_copies("grad_narrow", "grad_scaled", "flags")
    _grad_products(run)
    for elements in inputs:
        run.traffic("grad_out", elements * narrow, elements * narrow)
    return run.end()


def _row_sums(run: _Run) -> None:
    """Adds the products of output and gradient, summed over each row."""
    size, wide = run.sizes, run.sizes.output * _WIDE
    run.wide_copy("wide_out", size.output)
    run.wide_copy("wide_grad", size.output)
    run.traffic("out_grad", 2 * wide, wide, (("out_grad", wide),))
    run.drop_copies("wide_out", "wide_grad")
    run.traffic("row_sums", wide, size.rows * _WIDE)
    run.free("out_grad")


def _grad_products(run: _Run) -> None:
    """Adds the gradients of queries and repeated keys, and the sums over the heads that share keys and values."""
    size, narrow = run.sizes, run.kernels.act_bytes
    queries = size.queries * narrow
    run.product("grad_queries", size.seq, size.head_dim, size.keys, False, (("grad_queries", queries),))
    if size.batch > 1:
        run.traffic("queries.contiguous", queries, queries, (("queries.contiguous", queries),))
    made = (("grad_keys", size.repeated_keys * narrow),)
    run.product("grad_keys", size.keys, size.head_dim, size.seq, False, made)
    run.drop_copies("queries")
    for name, elements in (("keys", size.repeated_keys), ("values", size.repeated_values)):
        summed = elements // size.heads * size.kv_heads * narrow
        run.traffic("sum_" + name, elements * narrow, summed, (("sum_" + name, summed),))
        run.free("grad_" + name)
