"""Models optimizers of whole matrices (Muon, SOAP): who works on which, exchanges, products and states.

The entry of the optimizer (describe/kernels/optimizers.yaml) says how ranks share the work. Without sharding every rank
works on all of its matrices. Under ZeRO-1 and ZeRO-2 each rank owns some of them, the largest given first to the rank
that has the least so far. Under FSDP the ranks of a group each get one matrix of a shape from the others' shards, work
on it, and give the shards of the result back. A tensor-parallel rank works on its part of a matrix alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heapreplace
from itertools import repeat
from typing import NamedTuple

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Category, Collective, Phase, Stream
from forerun.describe.kernels.optimizers import OfMatrices, Work, optimizer
from forerun.describe.plan import rules
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.sources.symbolic.exchanges import shard_axis
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.weights import Matrix, Weights


class Share(NamedTuple):
    """The matrices of one shape that a rank works on."""

    matrix: Matrix
    """the shape, with a batch of 1 if the batch is shared out"""
    number: int
    exchanged: int
    """elements that the rank sends to others before the products, and gets back after them"""


def matrices_of(plan: Plan) -> OfMatrices | None:
    """Returns the work of the plan's optimizer on whole matrices. Returns None if it updates them element by
    element.
    """
    own = optimizer(plan.optimizer).matrices
    flat = own is not None and own.at_zero == "flat" and plan.gathers_updates
    return None if flat else own


def ranks_of(plan: Plan, matrix: Matrix) -> int:
    """Returns the number of ranks that share the state of a matrix; 1 if nothing is sharded."""
    if not plan.shards_optimizer:
        return 1
    return max(1, plan.expert_ranks if matrix.expert else plan.state_ranks)


def local_matrix_elements(plan: Plan, weights: Weights) -> int:
    """Returns the elements of matrices whose states a rank keeps."""
    return sum(shape.elements * n for shape, n in _held(plan, weights).items())


def matrix_state_bytes(plan: Plan, weights: Weights, whole: bool = False) -> float:
    """Returns the bytes of the states of matrices on a rank, or with `whole` of all matrices of `weights`."""
    own = matrices_of(plan)
    if own is None:
        return 0.0
    held, moments = Counter(weights.shapes) if whole else _held(plan, weights), DTYPE_BYTES[plan.moment_dtype]
    return sum(n * matrix.batch * own.state_bytes(matrix.rows, matrix.columns, moments) for matrix, n in held.items())


def _held(plan: Plan, weights: Weights) -> Counter[Matrix]:
    """Returns the matrices, or their shards of rows, whose states a rank keeps."""
    if plan.shards_parameters:
        return Counter(_shard(matrix, ranks_of(plan, matrix)) for matrix in weights.shapes)
    return Counter({share.matrix: share.number for share in shares(plan, weights)})


def _shard(matrix: Matrix, ranks: int) -> Matrix:
    """Returns one of `ranks` equal parts: of the batch where it has enough matrices, else of the rows."""
    if matrix.batch % ranks == 0:
        return matrix._replace(batch=matrix.batch // ranks)
    return matrix._replace(rows=ceil_div(matrix.rows, ranks))


def shares(plan: Plan, weights: Weights) -> list[Share]:
    """Returns the matrices that a rank works on; under ZeRO-1 and ZeRO-2 those of the rank with the most work."""
    counts = Counter(weights.shapes)
    if plan.shards_parameters:
        return [_exchanged(matrix, n, ranks_of(plan, matrix)) for matrix, n in counts.items()]
    found = []
    for expert in (False, True):
        some = Counter({matrix: n for matrix, n in counts.items() if matrix.expert == expert})
        if some:
            ranks = ranks_of(plan, next(iter(some)))
            found += [Share(matrix, n, 0) for matrix, n in (some if ranks == 1 else _busiest(some, ranks)).items()]
    return found


def _exchanged(matrix: Matrix, count: int, ranks: int) -> Share:
    """Returns a rank's share of `count` matrices whose shards lie on `ranks` ranks."""
    if matrix.batch % ranks == 0:  # each rank has whole matrices already
        return Share(matrix._replace(batch=1), count * matrix.batch // ranks, 0)
    own = ceil_div(count * matrix.batch, ranks)
    return Share(matrix._replace(batch=1), own, own * matrix.rows * matrix.columns)


def _busiest(counts: Counter[Matrix], ranks: int) -> Counter[Matrix]:
    """Returns the matrices of the rank with the most elements, where the largest go first to the rank with the least.

    Megatron-Core gives whole matrices to ranks in this order (layer_wise_optimizer.py).
    """
    alone = sorted(
        ((matrix.rows * matrix.columns, matrix._replace(batch=1), n * matrix.batch) for matrix, n in counts.items()),
        reverse=True,
    )
    loads: list[tuple[int, int]] = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    owned: dict[int, Counter[Matrix]] = {}
    for size, matrix, n in alone:
        for _ in range(n):
            load, rank = loads[0]
            heapreplace(loads, (load + size, rank))
            owned.setdefault(rank, Counter())[matrix] += 1
    return owned[max(loads)[1]]


def product_flops(plan: Plan, weights: Weights) -> float:
    """Returns the FLOPs of the products of a step on the rank with the most work."""
    own = matrices_of(plan)
    if own is None:
        return 0.0
    return sum(
        count * sum(work.flops for work in own.work(matrix.rows, matrix.columns))
        for matrix, count, _ in shares(plan, weights)
    )


# -- writing blocks ----------------------------------------------------------------------------------------------------


def update_matrices(kernels: PlanKernels, block: BlockBuilder, weights: Weights, own: OfMatrices) -> None:
    """Appends the update of matrices: kernels over their elements, exchanges, and products."""
    plan, ops = kernels.plan, kernels.ops
    local, lists = local_matrix_elements(plan, weights), len(weights.shapes)
    launches = own.kernels * (lists if not own.products else len(set(weights.shapes)))
    copied = rules.has_working_copy(plan, kernels.stack) * kernels.weight_bytes
    moved = ops.memory("optimizer.matrices", local * own.read, local * (own.written + copied), launches)
    block.node(moved, phase=Phase.OPTIMIZER, module=kernels.optimizer_module)
    if own.at_fsdp == "shards" and plan.shards_parameters:
        _sum_sides(kernels, block, weights)
        return
    arrived = _brought(kernels, block, shares(plan, weights), own)
    ends = []
    for share, node in arrived:
        after: tuple[int, ...] = (node,) if node >= 0 else ()
        last = _products(kernels, block, share, own, after)
        ends.append(_exchange(kernels, block, share, own, "optimizer.scatter", Stream.REDUCE, last))
    sent = tuple(node for node in ends if node >= 0)
    if sent:
        block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=sent)


def _brought(kernels: PlanKernels, block: BlockBuilder, some: list[Share], own: OfMatrices) -> list[tuple[Share, int]]:
    """Appends the exchanges that bring whole matrices to a rank; returns each share with the node that ends its own."""
    start = len(block) - 1
    return [(share, _exchange(kernels, block, share, own, "optimizer.gather", Stream.GATHER, start)) for share in some]


def _exchange(
    kernels: PlanKernels, block: BlockBuilder, share: Share, own: OfMatrices, name: str, stream: Stream, after: int
) -> int:
    """Appends an exchange of shards for whole matrices, or back; returns its node, -1 if there is none."""
    axis = shard_axis(kernels.plan, share.matrix.expert)
    if not share.exchanged or kernels.group_size.get(axis, 1) == 1:
        return -1
    size = share.exchanged * DTYPE_BYTES[own.dtype]
    op = kernels.collective_op(name, Collective.ALL_TO_ALL, axis, size, own.dtype)
    node = block.node(op, stream, Phase.OPTIMIZER, kernels.optimizer_module, after=(after,))
    block.tensor(size, Category.COMMUNICATION, node, node)
    return node


def _products(kernels: PlanKernels, block: BlockBuilder, share: Share, own: OfMatrices, after: tuple[int, ...]) -> int:
    """Appends the products on the matrices of one shape; returns the last node."""
    first = len(block)
    for work in own.work(share.matrix.rows, share.matrix.columns):
        for op in _gemms(kernels, work, share.number, own.dtype):
            block.node(op, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=after)
            after = ()
    last = max(0, len(block) - 1)
    short, long = sorted((share.matrix.rows, share.matrix.columns))
    if len(block) > first:  # the update before and after, and two squares of the short side
        block.tensor(2 * (short * long + short * short) * DTYPE_BYTES[own.dtype], Category.TEMPORARY, first, last)
    return last


def _gemms(kernels: PlanKernels, work: Work, count: int, dtype: str) -> Iterator[int]:
    """Yields the ops of a product on each of `count` matrices; a part of a product has a part of its depth."""

    def product(n: int, depth: int) -> int:
        return kernels.ops.gemm("optimizer.product", work.m, work.n, depth, n, 0, dtype, kernels=n)

    if work.times == int(work.times):
        yield from repeat(product(count, work.k), int(work.times))
        return
    whole = int(work.times * count)
    if whole:
        yield product(whole, work.k)
    depth = round((work.times * count - whole) * work.k)
    if depth:
        yield product(1, depth)


def _sum_sides(kernels: PlanKernels, block: BlockBuilder, weights: Weights) -> None:
    """Appends the sums over ranks that a matrix in shards of rows takes: means of columns, and three numbers."""
    for matrix in weights.shapes:
        axis = shard_axis(kernels.plan, matrix.expert)
        if kernels.group_size.get(axis, 1) == 1:
            continue
        for values in (matrix.columns * matrix.batch, 3):
            op = kernels.collective_op("optimizer.sum", Collective.ALL_REDUCE, axis, 4 * values, "fp32")
            block.node(op, Stream.REDUCE, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        end = (len(block) - 1,)
        block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=end)
