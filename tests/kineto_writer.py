"""Writes a simulated step as the file that PyTorch's profiler would write of it, with perturbations of its kernels."""

import json
from pathlib import Path

import numpy as np

from forerun.answers.analysis.breakdown import ready_ps
from forerun.core.engine.simulate import simulate
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Collective, Phase

_LAUNCH_US = 0.5
_RECORDS, _WAITS = 1_000_000, 10_000_000
"""first correlations of calls that record an event, and that wait for one"""
_NAMES = {
    OpKind.GEMM: "nvjet_hsh_128x256_64x4_2x1_v_bz_TNT",
    OpKind.SCAN: "void selective_scan_fwd_kernel<128>",
}
_COLLECTIVES = {
    Collective.ALL_REDUCE: ("allreduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
    Collective.ALL_GATHER: ("_allgather_base", "ncclDevKernel_AllGather_RING_LL"),
    Collective.REDUCE_SCATTER: ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
    Collective.ALL_TO_ALL: ("all_to_all", "ncclDevKernel_SendRecv"),
    Collective.BROADCAST: ("broadcast", "ncclDevKernel_Broadcast_RING_LL"),
}
_DTYPES = {"bf16": ("BFloat16", 2, "c10::BFloat16"), "fp32": ("Float", 4, "float"), "fp16": ("Half", 2, "c10::Half")}


def perturbed(simulation, kernels=lambda row: 1.0, host=1.0):
    """The timeline of a simulated step where op `row` takes `kernels(row)` times as long, and the host `host` times."""
    costs, ops = simulation.costs, simulation.program.ops
    factor = np.array([kernels(row) for row in range(len(ops))])
    duration = np.rint(costs.duration_ps * factor).astype(np.int64)
    issue = np.rint(costs.issue_ps * host).astype(np.int64)
    columns = (costs.slow_compute, costs.slow_network, costs.network_op)
    return simulate(simulation.flat, duration, issue, *columns, demand=costs.demand), issue


def write_kineto(
    path: Path,
    simulation,
    timeline,
    issue_ps,
    *,
    shapes=True,
    rank_class=0,
    rank=0,
    gpu="NVIDIA H100 80GB HBM3",
    module_name=str,
):
    """Writes the step of one rank class as that of a global rank; `module_name` tells the name of a predicted module.

    Launches stand at the end of the host's time for each op. What stages do together begins when the rank itself is
    ready, as NCCL's kernels do.
    """
    program, flat = simulation.program, simulation.flat
    n_gpus = simulation.subject.n_gpus
    events = [_event("user_annotation", "ProfilerStep#1", 0, int(timeline.class_end_ps[rank_class]) / 1e6)]
    fixed = program.ops.is_delay
    nodes = range(int(flat.class_ptr[rank_class]), int(flat.class_ptr[rank_class + 1]))
    first, every = nodes.start, np.arange(nodes.start, nodes.stop)
    alone = ready_ps(flat, timeline, every)
    begins = np.where(flat.meeting[every] >= 0, alone, timeline.start_ps[every])
    runs = {node for node in nodes if not fixed[flat.op[node]] and timeline.end_ps[node] > timeline.start_ps[node]}
    waits = _waits(flat, nodes, runs)
    records = {}
    for number, node in enumerate(nodes, 1):
        row = int(flat.op[node])
        begin, end = (int(column[node - first]) / 1e6 for column in (begins, timeline.end_ps[first:]))
        if fixed[row] and end > begin:  # the host's own work after the device is done
            issued = int(timeline.issue_end_ps[node]) / 1e6
            events.append(_event("cuda_runtime", "cudaDeviceSynchronize", issued, begin - issued))
        if node not in runs:
            continue
        issued = int(timeline.issue_end_ps[node]) / 1e6
        called = max(0.0, issued - min(_LAUNCH_US, int(issue_ps[row]) / 1e6))
        around = _around(program, row, int(flat.phase[node]), number, shapes)
        module = program.modules[flat.module[node]] if 0 <= flat.module[node] < len(program.modules) else ""
        if module:
            events.append(_event("python_function", f"nn.Module: {module_name(module)}", called, issued - called))
        events += [_event(cat, name, called, issued - called, **args) for cat, name, args in around]
        events.append(_event("cuda_runtime", "cudaLaunchKernel", called, issued - called, correlation=number))
        records[node] = _RECORDS + number
        events.append(_event("cuda_runtime", "cudaEventRecord", called, 0, correlation=records[node]))
        for place, other in enumerate(sorted(waits[node])):
            correlation = _WAITS + 100 * number + place
            events.append(_event("cuda_runtime", "cudaStreamWaitEvent", called, 0, correlation=correlation))
            about = {"stream": 7 + int(flat.stream[node]), "wait_on_stream": 7 + int(flat.stream[other])}
            about["wait_on_cuda_event_record_corr_id"] = records[other]
            events.append(_event("cuda_sync", "Stream Wait Event", called, 0, correlation=correlation, **about))
        name, more = _kernel(program, row, rank)
        args = {"stream": 7 + int(flat.stream[node]), "device": 0, "correlation": number, "External id": number} | more
        work = _event("gpu_memcpy" if name.startswith("Memcpy") else "kernel", name, begin, end - begin, **args)
        events.append(work | {"pid": 0, "tid": args["stream"]})
    head = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": n_gpus}}
    head["deviceProperties"] = [{"id": 0, "name": gpu, "totalGlobalMem": 85_000_000_000}]
    path.write_text(json.dumps(head | {"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _waits(flat, nodes, runs):
    """What each node waits for on other streams, through nodes that do not run."""
    found, before = {}, {}
    for node in nodes:
        stream = int(flat.stream[node])
        direct = flat.pred[flat.pred_ptr[node] : flat.pred_ptr[node + 1]].tolist()
        if stream in before and before[stream] not in runs:
            direct.append(before[stream])
        if node not in runs and stream in before:
            direct.append(before[stream])
        every = {real for one in direct for real in ({one} if one in runs else found[one])}
        last = {int(flat.stream[one]): one for one in sorted(every)}
        found[node] = set(last.values())
        before[stream] = node
    return {node: {one for one in found[node] if flat.stream[one] != flat.stream[node]} for node in runs}


def _event(cat, name, ts, dur, **args):
    times = {"ts": round(ts, 3), "dur": round(ts + dur, 3) - round(ts, 3)}
    times["dur"] = round(times["dur"], 3)
    return {"ph": "X", "cat": cat, "name": name, "pid": 10, "tid": 1, **times, "args": args}


def _around(program, row, phase, number, shapes):
    """The operator of an op, and what stands around it."""
    ops = program.ops
    out = []
    if phase == Phase.OPTIMIZER:
        out.append(("user_annotation", "Optimizer.step#AdamW.step", {}))
    if phase in (Phase.BACKWARD, Phase.RECOMPUTE):
        out.append(("cpu_op", "autograd::engine::evaluate_function: MmBackward0", {}))
    if ops.is_gemm[row]:
        details, dtype = ops.details_of(row), _DTYPES[ops.dtype[row]][2]
        sizes = [[details.m, details.k], [details.k, details.n]]
        name = "aten::mm"
        if details.batch > 1:
            name, sizes = "aten::bmm", [[details.batch, *one] for one in sizes]
        args = {"Input Dims": sizes, "Input type": [dtype, dtype]} if shapes else {}
        out.append(("cpu_op", name, {"External id": number} | args))
    elif ops.is_attention[row] and shapes:
        one, dtype = ops.details_of(row), _DTYPES[ops.dtype[row]][2]
        query = [one.batch, one.seq_q, one.heads, one.head_dim]
        sizes = [[one.batch, one.seq_kv, one.kv_heads, size] for size in (one.head_dim, one.v_head_dim)]
        sizes = [*([query] if one.backward else []), query, *sizes]
        name = f"aten::_flash_attention_{'backward' if one.backward else 'forward'}"
        out.append(("cpu_op", name, {"External id": number, "Input Dims": sizes, "Input type": [dtype] * len(sizes)}))
    else:
        out.append(("cpu_op", "aten::op", {"External id": number}))
    return out


def _kernel(program, row, rank):
    """The name of an op's kernel, and what a collective says of itself."""
    ops = program.ops
    kind = int(ops.kind[row])
    if kind == OpKind.ATTENTION:
        return ("void flash_bwd_dq_dk_dv_loop" if ops.details_of(row).backward else "void flash_fwd_kernel"), {}
    if kind == OpKind.HOST_COPY:
        return "Memcpy HtoD (Pinned -> Device)", {"bytes": int(ops.bytes_comm[row])}
    if kind == OpKind.MEMORY:
        return f"void {ops.name[row].replace('attention', 'block')}_kernel<float>", {}
    if kind in (OpKind.COLLECTIVE, OpKind.P2P):
        group = program.groups[ops.group[row]]
        dtype, size, _ = _DTYPES.get(ops.dtype[row], ("Byte", 1, ""))
        called, name = _COLLECTIVES.get(Collective(int(ops.collective[row])), ("send", "ncclDevKernel_SendRecv"))
        elements = round(float(ops.bytes_comm[row]) / size)
        size = group.borders + 1 if group.borders else group.size
        first = rank - group.inner * (rank // group.inner % size)
        ranks = [first + group.inner * place for place in range(size)]
        args = {"Collective name": called, "In msg nelems": elements, "Out msg nelems": elements, "dtype": dtype}
        args |= {"Group size": size, "Process Group Name": group.axis, "Process Group Ranks": str(ranks)}
        return name, args
    return _NAMES[OpKind(kind)], {}
