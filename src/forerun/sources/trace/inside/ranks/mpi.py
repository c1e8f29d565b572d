"""Replaces `mpi4py.MPI` where mpi4py is installed: the communicators of one rank that mpiexec would start.

The traced process is a single one, which MPI takes for a world of one rank. A program that finds its rank and its
number of ranks through MPI would then run on one GPU, whatever `--world-size` says. As in torch's own collectives
(`objects.py`), every peer holds what this rank holds. MPI's work is on the host and is not recorded.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import operator
import pickle
import platform
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from forerun.sources.trace.inside.ranks.transport import no_peer
from forerun.sources.trace.inside.refusal import Refusal

_MODULE = "mpi4py.MPI"
_SHARED, _MULTIPLE = 1, 3
"""How MPI numbers the ranks of one node as a kind of split, and threads that all may call it."""

Operation = Callable[[Any, Any], Any]

OPERATIONS: dict[str, Operation] = {
    "SUM": operator.add,
    "PROD": operator.mul,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": lambda one, other: bool(one) and bool(other),
    "LOR": lambda one, other: bool(one) or bool(other),
    "BAND": operator.and_,
    "BOR": operator.or_,
}
"""How a reduction combines two ranks' values."""
_IN_PLACE = object()
"""The buffer that stands for the other one of a call."""


def install(rank: int, world_size: int, gpus_per_node: int) -> None:
    """Makes `from mpi4py import MPI` give the communicators of `rank`. Python imports the package first, so nothing
    changes where there is none."""
    sys.meta_path.insert(0, _Finder(_content(rank, world_size, gpus_per_node)))


class Communicator:
    """Ranks that exchange objects and buffers. `ranks` are their numbers in the world."""

    def __init__(self, rank: int, ranks: Sequence[int], gpus_per_node: int) -> None:
        self._world_rank, self._ranks, self._per_node = rank, tuple(ranks), gpus_per_node
        self.rank, self.size = self._ranks.index(rank), len(self._ranks)
        self.name = "MPI_COMM_WORLD" if self.size > 1 else "MPI_COMM_SELF"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise Refusal(f"the program uses {name} of a communicator of mpi4py, which is not traced")

    def Get_rank(self) -> int:
        """Returns the place of this rank in the communicator."""
        return self.rank

    def Get_size(self) -> int:
        """Returns the number of ranks."""
        return self.size

    def Get_name(self) -> str:
        """Returns the name that MPI gives the communicator."""
        return self.name

    def Dup(self, info: Any = None) -> Communicator:
        """Returns a communicator of the same ranks."""
        return Communicator(self._world_rank, self._ranks, self._per_node)

    dup = Clone = Dup

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Communicator:
        """Returns the communicator of the ranks on this node, the only kind of split that MPI's standard names."""
        node = self._world_rank // self._per_node
        mates = [rank for rank in self._ranks if rank // self._per_node == node]
        return Communicator(self._world_rank, mates, self._per_node)

    def Free(self) -> None:
        """Does nothing: there is nothing to free."""

    def Abort(self, errorcode: int = 0) -> None:
        """Ends the program."""
        raise SystemExit(errorcode)

    # -- objects ------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Does nothing: the peers are where this rank is."""

    Barrier = barrier

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Returns the root's object: this rank's own, where it has one."""
        if obj is None and root != self.rank:
            raise Refusal(no_peer("bcast of mpi4py", self._ranks[root]))
        return obj

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Returns this rank's part of the root's sequence."""
        if sendobj is None:
            raise Refusal(no_peer("scatter of mpi4py", self._ranks[root]))
        return sendobj[self.rank]

    def allgather(self, sendobj: Any) -> list[Any]:
        """Returns a copy of the object for each rank."""
        data = pickle.dumps(sendobj)
        return [pickle.loads(data) for _ in self._ranks]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Returns what `allgather` returns, for the root."""
        return self.allgather(sendobj) if self.rank == root else None

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Returns what each rank has for this one: what this one has for itself."""
        return self.allgather(sendobj[self.rank])

    def allreduce(self, sendobj: Any, op: Operation = operator.add) -> Any:
        """Returns the combination of as many equal objects as there are ranks."""
        return functools.reduce(op, self.allgather(sendobj))

    def reduce(self, sendobj: Any, op: Operation = operator.add, root: int = 0) -> Any:
        """Returns what `allreduce` returns, for the root."""
        return self.allreduce(sendobj, op) if self.rank == root else None

    # -- buffers ------------------------------------------------------------------------------------------------

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Leaves the buffer as it is, if the root is this rank."""
        if root != self.rank:
            raise Refusal(no_peer("Bcast of mpi4py", self._ranks[root]))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Operation = operator.add) -> None:
        """Fills the buffer with the combination of as many equal ones as there are ranks."""
        target = _array(recvbuf)
        source = target.copy() if sendbuf is _IN_PLACE else _array(sendbuf)
        target[...] = np.reshape(functools.reduce(op, [source] * self.size), target.shape)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Operation = operator.add, root: int = 0) -> None:
        """Does what `Allreduce` does, at the root."""
        if self.rank == root:
            self.Allreduce(sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Fills the buffer with a copy of this rank's for each rank."""
        target = _array(recvbuf)
        own = target.reshape(self.size, -1)[self.rank] if sendbuf is _IN_PLACE else _array(sendbuf)
        target.reshape(self.size, -1)[...] = own.reshape(1, -1).copy()

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Does what `Allgather` does, at the root."""
        if self.rank == root:
            self.Allgather(sendbuf, recvbuf)


def _array(buffer: Any) -> Any:
    """Returns the array of a buffer, which mpi4py lets stand in a list with its count and type."""
    array = buffer[0] if isinstance(buffer, (list, tuple)) else buffer
    if not isinstance(array, np.ndarray):
        raise Refusal(f"the program gives mpi4py a buffer of type {type(array).__name__}; only numpy arrays are traced")
    return array


def _content(rank: int, world_size: int, gpus_per_node: int) -> dict[str, Any]:
    """Returns the names of the module."""
    types = ("BYTE", "CHAR", "BOOL", "INT", "LONG", "INT32_T", "INT64_T", "FLOAT", "DOUBLE")
    return {
        "Comm": Communicator,
        "Intracomm": Communicator,
        "COMM_WORLD": Communicator(rank, range(world_size), gpus_per_node),
        "COMM_SELF": Communicator(rank, [rank], gpus_per_node),
        "COMM_TYPE_SHARED": _SHARED,
        "THREAD_MULTIPLE": _MULTIPLE,
        "IN_PLACE": _IN_PLACE,
        "Wtime": time.perf_counter,
        "Is_initialized": lambda: True,
        "Is_finalized": lambda: False,
        "Init": lambda: None,
        "Finalize": lambda: None,
        "Query_thread": lambda: _MULTIPLE,
        "Get_processor_name": platform.node,
        **OPERATIONS,
        **{name: name for name in types},
    }


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module in place of mpi4py's own, which needs the library of an MPI."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == _MODULE else None

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise Refusal(f"the program uses MPI.{name} of mpi4py, which is not traced")

        vars(module).update(self._content, __getattr__=missing)
