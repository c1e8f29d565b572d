"""Builders of operations and blocks. They append to plain lists: `program.validate` checks the result.

A search builds thousands of Programs a minute, so builders do not check values.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from forerun.core.program.kinds import (
    ATTENTION_BACKWARD_FLOPS,
    N_DETAILS,
    Attention,
    Direction,
    Gemm,
    OpKind,
    Scan,
    TokenExchange,
)
from forerun.core.program.types import Block, Category, Collective, OpRow, OpTable, Phase, Stream

_GEMM = int(OpKind.GEMM)
_ATTENTION = int(OpKind.ATTENTION)
_MEMORY = int(OpKind.MEMORY)
_COLLECTIVE = int(OpKind.COLLECTIVE)
_SEND_RECV = int(Collective.SEND_RECV)
_ALL_DETAILS = (0,) * N_DETAILS
_BY_NCCL = TokenExchange(0, 0, 0, 0, 0).values()


class OpTableBuilder:
    """Collects distinct operations; adding an operation twice returns the same index."""

    def __init__(self) -> None:
        self._index: dict[OpRow | tuple[object, ...], int] = {}

    def __len__(self) -> int:
        return len(self._index)

    def add(self, row: OpRow | tuple[object, ...]) -> int:
        """Returns the index of the operation `row`, an OpRow or a plain tuple of its fields in order."""
        index = self._index
        found = index.get(row)
        if found is None:
            found = index[row] = len(index)
        return found

    def gemm(
        self,
        name: str,
        m: int,
        n: int,
        k: int,
        batch: int = 1,
        role: int = 0,
        dtype: str = "bf16",
        accumulate_bytes: int = 0,
        element_bytes: tuple[float, float] = (2, 2),
        kernels: int = 1,
    ) -> int:
        """Adds `batch` products of (m, k) by (k, n), 2 m n k FLOPs each, that move the bytes of operands and result.

        `kernels` is 1 for a batched product, `batch` for a grouped one. `element_bytes` are those of the operands and
        of the result. `accumulate_bytes` is the element size of a buffer that the result is added to (read and written
        instead of the result), 0 if the result is stored.
        """
        result = batch * m * n
        operand_bytes, result_bytes = element_bytes
        return self.add(
            (
                *(name, _GEMM, dtype, "", (m, n, k, batch, role, accumulate_bytes, kernels, 0, 0)),
                2.0 * result * k,
                float(batch * (m + n) * k * operand_bytes + result * accumulate_bytes),
                float(result * (accumulate_bytes or result_bytes)),
                *(0, -1, 0.0, kernels),
            )
        )

    def counted_gemm(
        self, name: str, shape: Gemm[int], dtype: str, flops: float, bytes_read: float, bytes_written: float
    ) -> int:
        """Adds a product whose FLOPs and bytes do not follow from its shape: implicit, or with uneven groups."""
        amounts = float(flops), float(bytes_read), float(bytes_written)
        return self.add((name, _GEMM, dtype, "", shape.values(), *amounts, 0, -1, 0.0, 1))

    def attention(
        self,
        name: str,
        shape: Attention[int],
        kernel: str = "flash2",
        dtype: str = "bf16",
        element_bytes: float = 2,
        flops: float | None = None,
        launches: int = 1,
        share: float = 1.0,
    ) -> int:
        """Adds fused attention by `kernel`. The shape is that of the rank with the most work; the mean rank executes
        `share` of its FLOPs.

        Unless given, `flops` is 2 (head_dim + v_head_dim) for each (query, key) pair and head; a causal mask halves the
        square on the diagonal, and backward is 2.5 times forward (FlashAttention-2, section 4.1).
        """
        batch, heads, seq_q, seq_kv = shape.batch, shape.heads, shape.seq_q, shape.seq_kv
        width = shape.head_dim + shape.v_head_dim
        if flops is None:
            square = min(seq_q, seq_kv)
            pairs = seq_q * seq_kv - (0.5 * square * square if shape.causal else 0.0)
            flops = 2.0 * batch * heads * pairs * width * (ATTENTION_BACKWARD_FLOPS if shape.backward else 1.0) * share
        query = batch * seq_q * heads * shape.head_dim * element_bytes
        output = batch * seq_q * heads * shape.v_head_dim * element_bytes
        key_value = batch * seq_kv * shape.kv_heads * width * element_bytes
        read = query + key_value + (2 * output if shape.backward else 0)
        written = query + key_value if shape.backward else output
        return self.add(
            (
                *(name, _ATTENTION, dtype, kernel, shape.values()),
                *(flops, float(read), float(written), 0, -1, 0.0, launches),
            )
        )

    def scan(
        self,
        name: str,
        shape: Scan[int],
        rule: str,
        dtype: str,
        flops: float,
        moved: tuple[float, float],
        launches: int,
    ) -> int:
        """Adds a recurrence by the `launches` kernels of `rule`.

        They execute `flops` and move the bytes `moved` (read, written).
        """
        row = OpRow(name, OpKind.SCAN, dtype, rule, shape.values(), flops, *moved, launches=launches)
        return self.add(row)

    def memory(
        self,
        name: str,
        bytes_read: float,
        bytes_written: float,
        launches: int = 1,
        flops: float = 0.0,
        dtype: str = "bf16",
        kernel: str = "",
    ) -> int:
        """Adds memory-bound kernels of the kind `kernel` (core/cost/kernels.yaml) that together move these bytes."""
        read, written = float(bytes_read), float(bytes_written)
        return self.add((name, _MEMORY, dtype, kernel, (), flops, read, written, 0, -1, 0.0, launches))

    def collective(
        self,
        name: str,
        kind: int,
        group: int,
        bytes_comm: float,
        dtype: str = "bf16",
        launches: int = 1,
        dispatcher: str = "",
        routing: TokenExchange[int] | None = None,
    ) -> int:
        """Adds collective `kind` over Program.groups[group]; `bytes_comm` is the full buffer, as in nccl-tests.

        A `dispatcher` with kernels of its own sends tokens by `routing`; the full buffer then has a copy of each token
        for each of its experts.
        """
        details = _BY_NCCL if routing is None else routing.values()
        amounts = 0.0, 0.0, 0.0, int(kind), group, float(bytes_comm), launches
        return self.add((name, _COLLECTIVE, dtype, dispatcher, details, *amounts))

    def p2p(
        self,
        name: str,
        group: int,
        bytes_comm: float,
        dtype: str = "bf16",
        launches: int = 1,
        direction: int = Direction.EITHER,
    ) -> int:
        """Adds a send or a receive of `bytes_comm` between neighbours of Program.groups[group]."""
        return self.add(
            OpRow(
                name,
                OpKind.P2P,
                dtype,
                details=(int(direction),),
                collective=_SEND_RECV,
                group=group,
                bytes_comm=float(bytes_comm),
                launches=launches,
            )
        )

    def host_copy(self, name: str, bytes_comm: float, dtype: str = "bf16", direction: int = Direction.EITHER) -> int:
        """Adds a copy of `bytes_comm` between device and host memory."""
        return self.add(OpRow(name, OpKind.HOST_COPY, dtype, details=(int(direction),), bytes_comm=float(bytes_comm)))

    def delay(
        self, name: str, duration_ps: int, launches: int = 0, flops: float = 0.0, bytes_written: float = 0.0
    ) -> int:
        """Adds a fixed time on its stream; `flops` and `bytes_written` count the known work in that time."""
        return self.add(
            OpRow(
                name,
                OpKind.DELAY,
                details=(int(duration_ps),),
                flops=flops,
                bytes_written=bytes_written,
                launches=launches,
            )
        )

    def build(self) -> OpTable:
        """Returns the table of all operations, in the order in which they were first added."""
        by_field = zip(*self._index, strict=True) if self._index else [()] * len(OpRow._fields)
        name, kind, dtype, kernel, details, flops, read, written, collective, group, comm, launches = by_field
        # The first column only sets the width, and is dropped.
        wide = array("q", chain.from_iterable(zip_longest(_ALL_DETAILS, *details, fillvalue=0)))
        return OpTable(
            name=name,
            kind=np.array(kind, np.int8),
            dtype=dtype,
            kernel=kernel,
            details=np.frombuffer(wide, np.int64).reshape(N_DETAILS, -1)[:, 1:].T,
            flops=np.array(flops, np.float64),
            bytes_read=np.array(read, np.float64),
            bytes_written=np.array(written, np.float64),
            collective=np.array(collective, np.int8),
            group=np.array(group, np.int16),
            bytes_comm=np.array(comm, np.float64),
            launches=np.array(launches, np.int16),
        )


_Integer = TypeVar("_Integer", bound=np.signedinteger)
_INT64, _INT32, _INT16, _INT8 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.int16), np.dtype(np.int8)


def _joined(code: str, dtype: np.dtype[_Integer], values: list[int]) -> npt.NDArray[_Integer]:
    """Returns `values` as an array of `dtype`. Arrays of Python, which name it `code`, convert short lists faster."""
    return np.frombuffer(array(code, values), dtype) if values else np.zeros(0, dtype)


class BlockBuilder:
    """Collects the nodes and tensors of one block, in host issue order."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._pred: list[int] = []
        self._pred_ptr: list[int] = [0]
        self._tensors: list[int] = []

    def __len__(self) -> int:
        return len(self._pred_ptr) - 1

    def node(
        self,
        op: int,
        stream: int = Stream.COMPUTE,
        phase: int = Phase.FORWARD,
        module: int = 0,
        after: Sequence[int] = (),
        wait: Sequence[int] = (),
        record: int = -1,
        channel: int = -1,
        sync: bool = False,
    ) -> int:
        """Appends a node and returns its local index.

        `after` are nodes of this block, `wait` event slots, `record` the slot that the node's end records, `channel`
        the rendezvous channel; with `sync` the host waits for the node's end.
        """
        pred_ptr = self._pred_ptr
        index = len(pred_ptr) - 1
        self._rows += (op, stream, phase, module, record, channel, sync)
        if after:
            self._pred += after
        if wait:
            self._pred += [-1 - slot for slot in wait]
        pred_ptr.append(len(self._pred))
        return index

    def alloc(self, size_bytes: int, category: int, at_node: int | None = None) -> int:
        """Adds a tensor that is allocated before `at_node` (None: the next node; -1: the block). Returns its number."""
        return self.tensor(size_bytes, category, len(self) if at_node is None else at_node, -1)

    def free(self, tensor: int, at_node: int | None = None) -> None:
        """Frees `tensor` after `at_node` (None: the last node so far). A tensor never freed outlives the block."""
        self._tensors[4 * tensor + 3] = len(self) - 1 if at_node is None else at_node

    def tensor(self, size_bytes: int, category: int, alloc: int, free: int) -> int:
        """Adds a tensor allocated from node `alloc` to node `free` (-1: outside the block). Returns its number."""
        self._tensors += (int(size_bytes), category, alloc, free)
        return len(self._tensors) // 4 - 1

    def temporary(self, size_bytes: int, node: int, category: int = Category.TEMPORARY) -> int:
        """Adds a tensor that is allocated during `node` only. Returns its number."""
        return self.tensor(size_bytes, category, node, node)

    def build(self, name: str) -> Block:
        """Returns the block of the nodes so far; more nodes can be added for a longer block.

        Columns of one dtype are converted together and then cut, which takes two thirds of the time of one by one.
        """
        nodes, tensors, pred_ptr, pred = self._rows, self._tensors, self._pred_ptr, self._pred
        n, edges = len(self), len(pred)
        wide = _joined("i", _INT32, nodes[0::7] + nodes[3::7] + pred_ptr + pred + tensors[2::4] + tensors[3::4])
        narrow = _joined("b", _INT8, nodes[1::7] + nodes[2::7] + nodes[6::7] + tensors[1::4])
        slots = _joined("h", _INT16, nodes[4::7] + nodes[5::7])
        pointers, after = 2 * n, 3 * n + 1
        allocs = after + edges
        frees = allocs + len(tensors) // 4
        return Block(
            name,
            op=wide[:n],
            stream=narrow[:n],
            phase=narrow[n : 2 * n],
            module=wide[n:pointers],
            pred_ptr=wide[pointers:after],
            pred=wide[after:allocs],
            record=slots[:n],
            channel=slots[n:],
            sync=narrow[2 * n : 3 * n],
            tensor_bytes=_joined("q", _INT64, tensors[0::4]),
            tensor_category=narrow[3 * n :],
            tensor_alloc=wide[allocs:frees],
            tensor_free=wide[frees:],
        )
