"""Sound files that other tools write: recipes, profiles, memory snapshots, traces of jobs, logs, measured tables."""

from __future__ import annotations

from formats import Format

_TITAN = """[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 2
seq_len = 64
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[compile]
enable = true
"""
_SCRIPT = """#!/bin/bash
MODEL_ARGS="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
torchrun --nproc-per-node 4 pretrain_gpt.py $MODEL_ARGS \\
    --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 --vocab-size 512 --bf16
"""
_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
_ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_version": 2, "fsdp_reshard_after_forward": True},
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 4,
}


def _event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, object]:
    on_device = cat == "kernel"
    place = {"pid": 0, "tid": 7} if on_device else {"pid": 10, "tid": 1}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args} | place


_KINETO = {
    "schemaVersion": 1,
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}],
    "traceEvents": [
        _event("user_annotation", "ProfilerStep#1", 0, 120),
        _event(
            "cpu_op",
            "aten::mm",
            1,
            5,
            **{"External id": 1, "Record function id": 2, "Input Dims": [[64, 64], [64, 64]]},
        ),
        _event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=1),
        _event("kernel", "sm90_xmma_gemm_bf16bf16", 10, 40, stream=7, device=0, correlation=1, **{"External id": 1}),
        _event("cpu_op", "record_param_comms", 12, 3, **{"External id": 2, "Collective name": "allreduce"}),
        _event("cuda_runtime", "cudaLaunchKernel", 13, 1, correlation=2),
        _event(
            "kernel",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            55,
            30,
            stream=20,
            device=0,
            correlation=2,
            **{"Collective name": "allreduce", "In msg nelems": 4096, "Group size": 2, "dtype": "BFloat16"},
        ),
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 20, "pid": 10, "tid": 1}
        | {"args": {"Device Type": 1, "Device Id": 0, "Bytes": 4096, "Addr": 1, "Total Allocated": 4096}},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ],
    "displayTimeUnit": "ms",
}
_FRAMES = [{"filename": "/site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"}]
_SNAPSHOT = {
    "segments": [
        {
            "device": 0,
            "address": 0,
            "total_size": 4096,
            "allocated_size": 1024,
            "blocks": [
                {"address": 0, "size": 1024, "state": "active_allocated", "frames": _FRAMES},
                {"address": 1024, "size": 3072, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": action, "addr": 1024, "size": 2048, "stream": 0, "time_us": time_us, "frames": _FRAMES}
            for time_us, action in enumerate(("alloc", "free_requested", "free_completed"))
        ]
    ],
    "allocator_settings": {},
}
_OPERATIONS = [
    {"dp_rank": rank, "stage": 0, "rank": rank, "step": step, "optype": kind, "seq_id": 0, "mc": chunk, "gmc": chunk}
    | {"start_ts": 10.0 * step + start, "duration": 1.0 + rank}
    for step in range(2)
    for rank in range(2)
    for start, kind, chunk in (
        (0, "forward-compute", 0),
        (3, "backward-compute", 0),
        (6, "optimizer-clip-main-grad", -1),
        (9, "optimizer", -1),
    )
]
_LOG = "\n".join(
    [
        "# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       ",
        *(
            f"{size} {size // 4} float sum -1 {time_us:.2f} {size / time_us / 1e3:.2f} {size / time_us / 571.43:.2f} 0"
            for size, time_us in ((8 << i, 20 + (8 << i) / 240e3) for i in range(10, 25))
        ),
    ]
)
_ROW = {
    "id": "a",
    "split": "open",
    "tier": "A",
    "source_id": "mine",
    "framework": "torchtitan",
    "model": "tiny",
    "n_layers": 2,
    "hidden": 64,
    "n_heads": 4,
    "n_kv_heads": 4,
    "head_dim": 16,
    "ffn_hidden": 128,
    "mlp": "swiglu",
    "vocab": 512,
    "seq_len": 64,
    "is_moe": "no",
    "gpu": "H100-SXM",
    "gpu_mem_gb": 80,
    "n_gpus": 8,
    "hw_key": "here",
    "gpus_per_node": 8,
    "inter_node_gbit_s_per_gpu": 400,
    "dp_replicate": 1,
    "dp_shard": 8,
    "zero_stage": 3,
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "micro_batch": 2,
    "n_microbatches": 1,
    "grad_accum": 1,
    "global_batch_seqs": 16,
    "precision": "bf16",
    "activation_checkpointing": "none",
    "step_time_s": 0.05,
    "outcome": "ok",
    "peak_mem_gib": 3.5,
    "peak_mem_kind": "reserved",
}
_ROWS = [list(_ROW), [str(cell) for cell in _ROW.values()]]
_MODELS = {
    "tiny": {
        "n_layers": 2,
        "hidden": 64,
        "n_heads": 4,
        "n_kv_heads": 4,
        "ffn_hidden": 128,
        "vocab": 512,
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "bias": False,
        "tied_embeddings": False,
        "pos_emb": "rope",
    }
}
_HARDWARE = {
    "gpus": {"H100-SXM": {"tflops": {"bf16": 989.4}, "hbm_gb": 80, "hbm_gb_s": 3350, "nvlink_gb_s": 900, "sms": 132}},
    "clusters": {
        "here": {
            "gpu": "H100-SXM",
            "hbm_gb": 80,
            "gpus_per_node": 8,
            "intra": "NVSwitch",
            "inter_node_gbit_s_per_gpu": 400,
        }
    },
}
_WORKLOAD = {
    "workload_graph": [
        {"Id": 1, "Name": "product", "NodeType": 4, "runtime": 3, "data_deps": [], "is_cpu_op": False},
        {"Id": 2, "Name": "sum", "NodeType": 7, "runtime": 4, "data_deps": [1], "comm_type": 0, "comm_size": 4096},
    ]
}
_OPERATORS = {
    "schema": "1.0.2-chakra.0.0.4",
    "pid": 1,
    "time": "2024-01-01 00:00:00",
    "start_ts": 1,
    "nodes": [
        {
            "id": number,
            "name": name,
            "ctrl_deps": 1,
            "inputs": {"values": [[1, 2, 0, 4096, 2, "cuda:0"]], "shapes": [[64, 64]], "types": ["Tensor(float)"]},
            "outputs": {"values": [], "shapes": [], "types": []},
            "attrs": [
                {"name": "rf_id", "type": "uint64", "value": number},
                {"name": "tid", "type": "uint64", "value": 1},
            ],
        }
        for number, name in ((1, "[pytorch|profiler|execution_trace|process]"), (2, "aten::mm"), (3, "nccl:all_reduce"))
    ],
}
_LINKS = "6 1 5\n5\n" + "".join(f"{npu} 5 400Gbps 0.0005ms 0\n" for npu in range(5))
_LOGICAL = {"logical-dims": ["2", "2"]}
_TREE = """Nodes 4
Tiers 2
Podsize 4
Tier 0
Downlink_speed_Gbps 200
Radix_Down 2
Radix_Up 2
Downlink_Latency_ns 1000
Tier 1
Downlink_speed_Gbps 100
Radix_Down 2
Downlink_Latency_ns 1000
Bundle 1
"""
_REPLAY = (
    "astra --workload-configuration TRACES --system-configuration SYSTEM --remote-memory-configuration REMOTE --json"
)
_NS3 = f"{_REPLAY} --network-configuration LINKS --logical-topology-configuration LOGICAL"
_VALIDATE = "validate ROWS --models MODELS --hardware HARDWARE --json"
_RECIPE = "predict CONFIG --recipe FILE --cluster h100-sxm --gpus 4 --seq-len 64 --json"
MEASURED = {
    "TITAN": Format("titan.toml", _TITAN, ("predict --recipe FILE --cluster h100-sxm --gpus 4 --json",)),
    "SCRIPT": Format("train.sh", _SCRIPT, ("predict --recipe FILE --cluster h100-sxm --gpus 4 --json",)),
    "DEEPSPEED": Format("deepspeed.json", _DEEPSPEED, (_RECIPE,)),
    "ACCELERATE": Format("accelerate.yaml", _ACCELERATE, (_RECIPE,)),
    "KINETO": Format(
        "profile.json",
        _KINETO,
        (
            "profile info FILE --json",
            "profile analyze FILE --json",
            "profile import FILE -o PROFILED",
            "profile compare FILE --model CONFIG --cluster h100-sxm --plan-file PLAN --gpus 4 --json",
        ),
    ),
    "WORKLOAD": Format("graph.json", _WORKLOAD, ("chakra info FILE",)),
    "OPERATORS": Format("et.json", _OPERATORS, ("chakra info FILE", "profile link KINETO FILE -o LINKED")),
    "LINKS": Format("links.txt", _LINKS, (_NS3.replace("LINKS", "FILE"),)),
    "LOGICAL": Format("dims.json", _LOGICAL, (_NS3.replace("LOGICAL", "FILE"),)),
    "TREE": Format("tree.topo", _TREE, (f"{_REPLAY} --network-configuration NETWORK --htsim_opts -topo FILE",)),
    "SNAPSHOT": Format("snapshot.pickle", _SNAPSHOT, ("profile memory FILE --json",)),
    "OPERATIONS": Format("operations.parquet", _OPERATIONS, ("stragglers FILE --json",)),
    "LOG": Format("all_reduce_perf.log", _LOG, ("calibrate h100-sxm --network FILE --json",)),
    "ROWS": Format("rows.csv", _ROWS, (_VALIDATE.replace("ROWS", "FILE"),)),
    "MODELS": Format("models.yaml", _MODELS, (_VALIDATE.replace("MODELS", "FILE"),)),
    "HARDWARE": Format("hardware.yaml", _HARDWARE, (_VALIDATE.replace("HARDWARE", "FILE"),)),
}
