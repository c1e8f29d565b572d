"""Builders of operations and blocks. They append to plain lists: `program.validate` checks the result.

A search builds thousands of Programs a minute, so nothing here looks at a value twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from forerun.core.program.types import Block, Category, Collective, OpKind, OpTable, Phase, Stream

_GEMM = int(OpKind.GEMM)
_ATTENTION = int(OpKind.ATTENTION)
_MEMORY = int(OpKind.MEMORY)
_COLLECTIVE = int(OpKind.COLLECTIVE)
_P2P = int(OpKind.P2P)
_HOST_COPY = int(OpKind.HOST_COPY)
_DELAY = int(OpKind.DELAY)
_SEND_RECV = int(Collective.SEND_RECV)
_N_DIMS = 9
_NO_DIMS = (0,) * _N_DIMS

_Row = tuple[str, int, str, tuple[int, ...], float, float, float, int, int, float, int]


class OpTableBuilder:
    """Collects distinct operations; adding an operation twice returns the same index."""

    def __init__(self) -> None:
        self._index: dict[_Row, int] = {}

    def __len__(self) -> int:
        return len(self._index)

    def add(
        self,
        name: str,
        kind: int,
        dtype: str = "",
        dims: tuple[int, ...] = _NO_DIMS,
        flops: float = 0.0,
        bytes_read: float = 0.0,
        bytes_written: float = 0.0,
        collective: int = 0,
        group: int = -1,
        bytes_comm: float = 0.0,
        launches: int = 1,
    ) -> int:
        """Index of the operation with exactly these columns; `dims` has 9 entries (see OpTable)."""
        row = (name, kind, dtype, dims, flops, bytes_read, bytes_written, collective, group, bytes_comm, launches)
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
        input_bytes: float = 2,
        output_bytes: float = 2,
        kernels: int = 1,
    ) -> int:
        """`batch` products of (m, k) by (k, n): 2 m n k FLOPs each; bytes are operands and result.

        They run as so many `kernels`: 1 for a batched product, `batch` for a grouped one.

        `input_bytes` and `output_bytes` are bytes per element. `accumulate_bytes` is the element size of a buffer
        that the result is added to (read and written instead of the output), 0 where the result is stored.
        """
        result = batch * m * n
        return self.add(
            name,
            _GEMM,
            dtype,
            (m, n, k, batch, role, accumulate_bytes, kernels, 0, 0),
            2.0 * result * k,
            float(batch * (m + n) * k * input_bytes + result * accumulate_bytes),
            float(result * (accumulate_bytes or output_bytes)),
            launches=kernels,
        )

    def attention(
        self,
        name: str,
        batch: int,
        heads: int,
        kv_heads: int,
        seq_q: int,
        seq_kv: int,
        head_dim: int,
        causal: bool = True,
        backward: bool = False,
        v_head_dim: int = 0,
        kernel: str = "flash2",
        element_bytes: float = 2,
        flops: float | None = None,
        launches: int = 1,
        share: float = 1.0,
    ) -> int:
        """Fused attention. `v_head_dim` 0 means `head_dim`; `kernel` goes to OpTable.dtype; `share` of the kernel's
        FLOPs is what ranks execute in the mean, where this is the rank that executes most.

        FLOPs that the kernel executes: 2 (head_dim + v_head_dim) for each (query, key) pair and head, a causal mask
        halves the square on the diagonal, backward is 2.5 times forward (FlashAttention-2, section 4.1).
        """
        v_dim = v_head_dim or head_dim
        if flops is None:
            square = min(seq_q, seq_kv)
            pairs = seq_q * seq_kv - (0.5 * square * square if causal else 0.0)
            flops = 2.0 * batch * heads * pairs * (head_dim + v_dim) * (2.5 if backward else 1.0) * share
        query = batch * seq_q * heads * head_dim * element_bytes
        output = batch * seq_q * heads * v_dim * element_bytes
        key_value = batch * seq_kv * kv_heads * (head_dim + v_dim) * element_bytes
        read = query + key_value + (2 * output if backward else 0)
        written = query + key_value if backward else output
        dims = (batch, heads, kv_heads, seq_q, seq_kv, head_dim, int(causal), int(backward), v_dim)
        return self.add(name, _ATTENTION, kernel, dims, flops, float(read), float(written), launches=launches)

    def memory(
        self,
        name: str,
        bytes_read: float,
        bytes_written: float,
        launches: int = 1,
        flops: float = 0.0,
        dtype: str = "bf16",
    ) -> int:
        """Memory-bound kernels that together move these bytes."""
        read, written = float(bytes_read), float(bytes_written)
        return self.add(name, _MEMORY, dtype, _NO_DIMS, flops, read, written, launches=launches)

    def collective(
        self, name: str, kind: int, group: int, bytes_comm: float, dtype: str = "bf16", launches: int = 1
    ) -> int:
        """Collective `kind` over Program.groups[group]; `bytes_comm` is the full buffer (nccl-tests' convention)."""
        return self.add(
            name,
            _COLLECTIVE,
            dtype,
            collective=int(kind),
            group=group,
            bytes_comm=float(bytes_comm),
            launches=launches,
        )

    def p2p(self, name: str, group: int, bytes_comm: float, dtype: str = "bf16", launches: int = 1) -> int:
        """A send or a receive of `bytes_comm` between neighbours of Program.groups[group]."""
        return self.add(
            name, _P2P, dtype, collective=_SEND_RECV, group=group, bytes_comm=float(bytes_comm), launches=launches
        )

    def host_copy(self, name: str, bytes_comm: float, dtype: str = "bf16") -> int:
        """A copy of `bytes_comm` between device and host memory."""
        return self.add(name, _HOST_COPY, dtype, bytes_comm=float(bytes_comm))

    def delay(self, name: str, duration_ps: int, launches: int = 0) -> int:
        """A fixed time on its stream."""
        return self.add(name, _DELAY, bytes_read=float(duration_ps), launches=launches)

    def build(self) -> OpTable:
        """The table, one row for each distinct operation, in order of first addition."""
        if not self._index:
            return _empty_op_table()
        name, kind, dtype, dims, flops, read, written, collective, group, comm, launches = zip(
            *self._index, strict=True
        )
        flat = array("q")
        for row in dims:
            flat.extend(row)
        return OpTable(
            name=name,
            kind=np.array(kind, np.int8),
            dtype=dtype,
            dims=np.frombuffer(flat, np.int64).reshape(-1, _N_DIMS),
            flops=np.array(flops, np.float64),
            bytes_read=np.array(read, np.float64),
            bytes_written=np.array(written, np.float64),
            collective=np.array(collective, np.int8),
            group=np.array(group, np.int16),
            bytes_comm=np.array(comm, np.float64),
            launches=np.array(launches, np.int16),
        )


def _empty_op_table() -> OpTable:
    none = np.zeros(0)
    return OpTable(
        name=(),
        kind=none.astype(np.int8),
        dtype=(),
        dims=np.zeros((0, _N_DIMS), np.int64),
        flops=none,
        bytes_read=none,
        bytes_written=none,
        collective=none.astype(np.int8),
        group=none.astype(np.int16),
        bytes_comm=none,
        launches=none.astype(np.int16),
    )


class BlockBuilder:
    """Collects the nodes and tensors of one block, in host issue order."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._pred: list[int] = []
        self._pred_ptr: list[int] = [0]
        self._tensors: list[list[int]] = []

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
        """Append a node and return its local index.

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
        """A tensor allocated before `at_node` (None: before the next node; -1: before the block). Its number."""
        self._tensors.append([int(size_bytes), category, len(self) if at_node is None else at_node, -1])
        return len(self._tensors) - 1

    def free(self, tensor: int, at_node: int | None = None) -> None:
        """Free `tensor` after `at_node` (None: after the last node so far). A tensor never freed outlives the block."""
        self._tensors[tensor][3] = len(self) - 1 if at_node is None else at_node

    def tensor(self, size_bytes: int, category: int, alloc: int, free: int) -> int:
        """A tensor allocated before node `alloc` and freed after node `free` (-1: outside the block). Its number."""
        self._tensors.append([int(size_bytes), category, alloc, free])
        return len(self._tensors) - 1

    def temporary(self, size_bytes: int, node: int, category: int = Category.TEMPORARY) -> int:
        """A tensor alive during `node` only. Its number."""
        self._tensors.append([int(size_bytes), category, node, node])
        return len(self._tensors) - 1

    def build(self, name: str) -> Block:
        """The block; the builder can go on and build a longer one."""
        rows = np.array(array("i", self._rows), np.int32).reshape(-1, 7)
        tensors = np.array(self._tensors, np.int64).reshape(-1, 4)
        return Block(
            name=name,
            op=rows[:, 0].copy(),
            stream=rows[:, 1].astype(np.int8),
            phase=rows[:, 2].astype(np.int8),
            module=rows[:, 3].copy(),
            pred_ptr=np.array(array("i", self._pred_ptr), np.int32),
            pred=np.array(array("i", self._pred), np.int32),
            record=rows[:, 4].astype(np.int16),
            channel=rows[:, 5].astype(np.int16),
            sync=rows[:, 6].astype(np.int8),
            tensor_bytes=tensors[:, 0].copy(),
            tensor_category=tensors[:, 1].astype(np.int8),
            tensor_alloc=tensors[:, 2].astype(np.int32),
            tensor_free=tensors[:, 3].astype(np.int32),
        )
