"""Kernels and tensors of a block as plain rows, for tests that write the same rows by hand."""

from __future__ import annotations

from typing import NamedTuple

from forerun.core.program.types import Block, Category, Phase, Program, Stream


class Kernel(NamedTuple):
    """What one node of a block does."""

    name: str
    flops: float
    moved: float
    """bytes that it reads and writes, or that a collective moves"""
    launches: int
    module: int


class Held(NamedTuple):
    """Memory from the node that allocates it to the node that frees it; "" is before or after the block."""

    size_bytes: int
    category: str
    since: str
    until: str


def product(name: str, m: int, n: int, k: int, module: int, batch: int = 1) -> Kernel:
    """A product of two-byte matrices (m, k) and (k, n)."""
    return Kernel(name, 2 * batch * m * n * k, 2 * batch * (m * k + k * n + m * n), 1, module)


def products(
    name: str, m: int, n: int, k: int, module: int, batch: int = 1, accumulates: bool = False
) -> tuple[Kernel, Kernel]:
    """The two products of the backward pass of y (m, n) = x (m, k) w.

    Where the second one accumulates, it reads and writes four bytes for each weight, else it writes two.
    """
    weights = product(name + ".wgrad", n, k, m, module, batch)
    more = (2 * 4 - 2) * batch * n * k if accumulates else 0
    return product(name + ".dgrad", m, k, n, module, batch), weights._replace(moved=weights.moved + more)


def grouped(kernel: Kernel, groups: int) -> Kernel:
    """The same work as one kernel for each of `groups` groups."""
    return kernel._replace(launches=groups)


def moves(name: str, size_bytes: float, launches: int, module: int) -> Kernel:
    """A kernel that takes as long as its bytes take."""
    return Kernel(name, 0, size_bytes, launches, module)


def block_of(program: Program, name: str) -> Block:
    return next(block for block in program.blocks if block.name == name)


def labels(program: Program, block: Block) -> list[str]:
    """The names of the nodes, the second of a name with two strokes less than the third: x, x', x''."""
    seen: dict[str, int] = {}
    out = []
    for op in block.op:
        name = program.ops.name[op]
        out.append(name + "'" * seen.get(name, 0))
        seen[name] = seen.get(name, 0) + 1
    return out


def kernels_of(program: Program, name: str) -> list[Kernel]:
    """The nodes of a block in order, without those that take no time."""
    ops, block = program.ops, block_of(program, name)
    return [
        Kernel(
            ops.name[op],
            float(ops.flops[op]),
            float(ops.bytes_read[op] + ops.bytes_written[op] + ops.bytes_comm[op]),
            int(ops.launches[op]),
            int(module),
        )
        for op, module in zip(block.op, block.module, strict=True)
        if ops.name[op] != "join"
    ]


def held_by(program: Program, name: str) -> list[Held]:
    """The tensors of a block, sorted; empty ones are left out."""
    block = block_of(program, name)
    nodes = [*labels(program, block), ""]
    rows = zip(block.tensor_bytes, block.tensor_category, block.tensor_alloc, block.tensor_free, strict=True)
    return sorted(
        Held(int(size), Category(int(category)).name.lower(), nodes[since], nodes[until])
        for size, category, since, until in rows
        if size
    )


class Node(NamedTuple):
    """A node of a block: its stream, the nodes that it waits for, and the event slots that it waits for and records."""

    name: str
    stream: str
    after: tuple[str, ...] = ()
    waits: tuple[int, ...] = ()
    records: int = -1


def nodes_of(program: Program, name: str) -> list[Node]:
    """All nodes of a block in order."""
    block = block_of(program, name)
    names, out = labels(program, block), []
    for i, label in enumerate(names):
        before = [int(n) for n in block.pred[block.pred_ptr[i] : block.pred_ptr[i + 1]]]
        after, waits = tuple(names[n] for n in before if n >= 0), tuple(-1 - n for n in before if n < 0)
        out.append(Node(label, Stream(int(block.stream[i])).name.lower(), after, waits, int(block.record[i])))
    return out


def steps_of(program: Program, rank_class: int = 0) -> list[str]:
    """The blocks of a step in order: name, layer and micro batch; the micro batch is left out where it is the first."""
    ranks = program.rank_classes[rank_class]
    return [
        program.blocks[block].name + (f" {layer}" if layer >= 0 else "") + (f" of {micro}" if micro else "")
        for block, layer, micro in zip(ranks.block, ranks.layer, ranks.microbatch, strict=True)
    ]


def run_again(program: Program, name: str) -> list[tuple[str, str]]:
    """The kernels of a backward block that run a second time, each run of them with the node before it."""
    block = block_of(program, name)
    names, out = labels(program, block), []
    again = [phase == Phase.RECOMPUTE for phase in block.phase] + [False]
    for i in range(len(names)):
        if again[i] and (i == 0 or not again[i - 1]):
            end = again.index(False, i)
            out.append((names[i - 1] if i else "", " ".join(names[i:end])))
    return out


def kept_by(program: Program, name: str) -> list[tuple[str, int]]:
    """The maker and the bytes of each tensor that a forward block leaves to its backward block."""
    return sorted((held.since, held.size_bytes) for held in held_by(program, name) if not held.until)
