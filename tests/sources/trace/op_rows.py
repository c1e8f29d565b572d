"""The kernels of dispatched operators, as rows that tests compare."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import OpKind
from forerun.sources.trace.inside.kernels.rules import describe


class Rows(TorchDispatchMode):
    """Records the kernels of all operators beneath it."""

    def __init__(self):
        super().__init__()
        self.table, self.kernels, self.ops = OpTableBuilder(), [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        kernels = describe(self.table, func, args, kwargs or {}, out)
        self.kernels += kernels
        self.ops += [func] * len(kernels)
        return out

    def rows(self):
        """(name, kind, kernel or dtype, details, flops, read, written, launches) of every kernel, in order."""
        table = self.table.build()
        return [
            (
                table.name[k.op],
                OpKind(int(table.kind[k.op])),
                table.kernel[k.op] or table.dtype[k.op],
                table.details_of(k.op),
                table.flops[k.op],
                table.bytes_read[k.op],
                table.bytes_written[k.op],
                int(table.launches[k.op]),
            )
            for k in self.kernels
        ]


def record(function, *args, **kwargs):
    with Rows() as mode:
        function(*args, **kwargs)
    return mode


def empty(*sizes, dtype=torch.bfloat16, device="meta", grad=False):
    return torch.empty(sizes, dtype=dtype, device=device, requires_grad=grad)


def called(op, *args, out=None, **kwargs):
    """The kernels of a call of `op` that returned `out`.

    Each is its name, then the dims, batch and role of a product, or the bytes read and written and the launches; then
    the bytes that it allocates and frees itself, where there are any.
    """
    mode = Rows()
    mode.kernels = describe(mode.table, op, args, kwargs, out)
    found = []
    for kernel, (name, kind, _, shape, _, read, written, launches) in zip(mode.kernels, mode.rows(), strict=True):
        product = kind == OpKind.GEMM
        figures = (shape.m, shape.n, shape.k, shape.batch, shape.role) if product else (read, written, launches)
        workspace = (kernel.workspace_bytes,) if kernel.workspace_bytes else ()
        found.append((name, *map(int, figures), *workspace))
    return found
