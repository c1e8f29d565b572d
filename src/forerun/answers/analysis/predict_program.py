"""predict_program: predicts a saved Program on a cluster, at its own number of ranks or another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from forerun.answers.analysis.around_step import around_program
from forerun.answers.analysis.reading import Simulation, Subject, simulate_program
from forerun.answers.analysis.uncertainty import TRACED
from forerun.common.errors import ForerunError
from forerun.core.cost.measured import Measured
from forerun.core.cost.step_costs import Launching
from forerun.core.memory.workspaces import blas_workspace_bytes, with_workspaces
from forerun.core.network.network_file import Network
from forerun.core.network.on_topology import check_size
from forerun.core.program.counts import EVERY_PHASE, counts_in
from forerun.core.program.model_flops import counted_flops
from forerun.core.program.origin import PROFILE, TRACE, Origin
from forerun.core.program.scale import scaled
from forerun.core.program.storage import load
from forerun.core.program.types import I64, OpTable, Phase, Program
from forerun.describe.cluster.storage import Storage
from forerun.describe.cluster.types import Cluster
from forerun.describe.plan.training_loop import TrainingLoop
from forerun.describe.stacks.catalog import load_stack

STACK = "pytorch"
_MANY_NODES = 50_000
"""nodes of a Program from which on folding it is faster than running it whole"""
_HOW = (
    "matrix products and attention of the program outside recomputation and optimizer, attention as if nothing were"
    " masked and its backward pass at twice the forward's (PaLM, app. B),"
)


def predict_program(
    program: Program,
    cluster: Cluster,
    *,
    n_gpus: int | None = None,
    network: Network | None = None,
    measured: Measured | None = None,
    tokens_per_step: int | None = None,
    stack: str | None = None,
    whole_timeline: bool = False,
    loop: TrainingLoop | None = None,
    storage: Storage | None = None,
) -> Simulation:
    """Predicts one step of a saved `program` on `cluster`.

    Args:
        n_gpus: ranks to run on; unless given, those of the program. Only data parallelism may change (`program.scale`).
        network: the network of the GPUs in place of the links of the cluster, rank r as its NPU r.
        measured: the user's own times of kernels and collectives, which replace the shipped ones.
        tokens_per_step: tokens of a step over all GPUs; unless given, those that the program states. If both are
            missing, tokens/s are unknown.
        stack: the stack whose host times, rates of kernels and collectives, and allocator settings apply; unless given,
            `stack_of` the program. The stack does not change which kernels run.
        whole_timeline: keep every node in the Timeline; else a run of closed blocks may be a single node.
        loop: the periodic work of the training loop; unless given, the one that the program states.
        storage: the storage that checkpoints go to.

    Raises ForerunError if `n_gpus` can't be reached without tracing again, the network or the cluster is too small, or
    the device lacks a dtype that the program uses.
    """
    placed = placed_program(program, cluster, n_gpus)
    origin = Origin.of(placed)
    if network is not None:
        check_size(network, origin.world_size)
    if tokens_per_step is not None and tokens_per_step < 1:
        raise ForerunError(f"tokens per step must be at least 1, got {tokens_per_step}")
    size = origin.blas_workspace_bytes
    if size is None:
        size = blas_workspace_bytes(cluster.device.architecture)
    placed = with_workspaces(placed, origin.blas_workspaces, size)
    # A profile tells the sizes of some products only, so their sum is not that of the model.
    counts, passes = counts_in(placed, EVERY_PHASE, (Phase.FORWARD, Phase.BACKWARD))
    flops = 0 if origin.source == PROFILE else counted_flops(placed, passes)
    tokens = tokens_per_step or origin.tokens_per_step
    subject = Subject(
        name=origin.name or "program",
        n_gpus=origin.world_size,
        stack=load_stack(stack or stack_of(placed)),
        launching=Launching(compiled_ops=origin.compiled_ops),
        precision=_precision(placed.ops, counts.max(axis=0, initial=0)),
        tokens_per_step=tokens,
        model_flops=flops or None,
        model_flops_how=_HOW,
        sample=None if tokens or not origin.samples_per_step else "sample",
        samples_per_step=None if tokens else origin.samples_per_step,
        warnings=(*map(_uncompiled, origin.fallbacks), *_unknown_gpu(origin), *origin.notes),
        notes=_notes(program, origin, stack),
        residuals=TRACED if origin.source == TRACE else None,
        fell_back=bool(origin.fallbacks),
    )
    nodes = sum(int(np.sum([len(placed.blocks[int(number)]) for number in cls.block])) for cls in placed.rank_classes)
    folded = not whole_timeline and nodes > _MANY_NODES
    found = simulate_program(placed, subject, cluster, folded=folded, network=network, measured=measured, replays=True)
    return around_program(found, placed, cluster, origin.loop if loop is None else loop, storage)


def read_program(path: str | Path) -> Program:
    """Reads the Program saved in a file. A Program without a name gets the name of the file.

    Raises ForerunError if the file can't be read or holds no complete Program; the message names the file.
    """
    try:
        program = load(path)
        origin = Origin.of(program)
    except ForerunError as error:
        told = str(error)
        raise error if told.startswith(str(path)) else ForerunError(f"{path}: {told}") from None
    return program if origin.name else replace(program, meta={**program.meta, "name": Path(path).stem})


def stack_of(program: Program) -> str:
    """Returns the name of the stack that a traced program's imports tell, else `pytorch`."""
    return Origin.of(program).stack or STACK


def placed_program(program: Program, cluster: Cluster, n_gpus: int | None = None) -> Program:
    """Returns `program` at `n_gpus` ranks on the nodes of `cluster`. Raises ForerunError like `predict_program`."""
    wanted = Origin.of(program).world_size if n_gpus is None else n_gpus
    if cluster.max_gpus is not None and wanted > cluster.max_gpus:
        raise ForerunError(f"cluster {cluster.name} joins at most {cluster.max_gpus} GPUs, not {wanted}")
    return scaled(program, wanted, cluster.node_size)


def _notes(program: Program, origin: Origin, stack: str | None) -> tuple[str, ...]:
    """Returns the lines of `explain` about the origin and the changes of the program."""
    ranks = Origin.of(program).world_size
    made = {TRACE: "traced", PROFILE: "profiled"}.get(origin.source, "built")
    by = f" with torch {origin.torch}" if origin.torch else ""
    lines = [f"program: {made}{by} at {ranks} ranks"]
    if origin.stack and stack is None:
        lines.append(f"stack: {origin.stack}, whose modules the program imports; --stack takes another one")
    if origin.recorded is not None:
        known = f"times what the models say of this system over {origin.recorded.device}"
        lines.append(
            f"kernels, collectives: times recorded on {origin.recorded.gpu or 'an unknown GPU'},"
            f" {known if origin.recorded.device else 'as they are, because Forerun does not know that GPU'}"
        )
    if origin.world_size != ranks:
        lines.append(
            f"gpus: data parallelism scaled from {ranks} to {origin.world_size} ranks, everything else as it was"
        )
    return (*lines, *(f"program, guessed: {note}" for note in origin.notes))


def _unknown_gpu(origin: Origin) -> tuple[str, ...]:
    """Returns the warning about a profile whose GPU Forerun does not know, so that no time of it scales."""
    if origin.recorded is None or origin.recorded.device:
        return ()
    return (
        f"kernels and collectives take their times on {origin.recorded.gpu or 'the GPU of the profile'}, which Forerun"
        " does not know; profile import --device names a known one in its place",
    )


def _uncompiled(fallback: str) -> str:
    """Returns the warning about code that should be compiled and is not."""
    return f"torch.compile failed: {fallback}; compiled code would be faster, so the predicted step time is too long"


def _precision(ops: OpTable, counts: I64) -> str:
    """Returns the dtype of most FLOPs of matrix products."""
    by_dtype: dict[str, float] = {}
    for row in np.flatnonzero(ops.is_gemm).tolist():
        by_dtype[ops.dtype[row]] = by_dtype.get(ops.dtype[row], 0.0) + float(ops.flops[row] * counts[row])
    return max(by_dtype, key=lambda name: by_dtype[name], default="bf16")
