"""Sound inputs of every format, small enough to answer in milliseconds, with the commands that read them.

FILE in a command is the place of the mutated file; other names in capitals are sound files of `FORMATS`.
"""

from __future__ import annotations

from pathlib import Path

from formats import Format
from measured_seeds import MEASURED

from forerun.core.program.storage import save
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
_TOWER = {
    "model_type": "llava",
    "text_config": _CONFIG,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "multimodal_projector_bias": True,
    "vision_feature_select_strategy": "default",
}
_MODEL = {
    "name": "small",
    "n_layers": 2,
    "hidden": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_hidden": 128,
    "vocab": 500,
    "moe": {"n_experts": 4, "top_k": 2, "expert_ffn": 64},
    "layers": [{"times": 1, "sliding_window": 32}, {"sliding_window": None}],
    "cross_attention": "behind",
    "encoder": {
        "stack": {"n_layers": 2, "hidden": 32, "n_heads": 2, "ffn_hidden": 64, "mlp": "gelu", "position": "none"},
        "reads": "sounds",
        "joins": "attention",
        "tokens": 16,
        "merge": 2,
        "stem": [[12, 32], [96, 32]],
        "stem_rows": 2,
        "projector": [[64, 64]],
    },
}
_PLAN = {
    "seq_len": 64,
    "micro_batch": 1,
    "n_microbatches": 2,
    "dp_shard": 2,
    "tp": 2,
    "prefetch": 1,
    "precision": "bf16",
}
_CLUSTER = {
    "name": "mine",
    "device": {"like": "h100-sxm", "name": "half", "power_w": 500, "sustained": 0.9},
    "gpus_per_node": 8,
    "intra_node": {"kind": "nvswitch", "gb_s": 450},
    "inter_node": {"kind": "roce", "gbit_s_per_gpu": 200, "latency_us": 3},
    "host_gb_s": 64,
    "price_per_gpu_hour": 2.5,
}
_LAYERS = {
    "name": "net",
    "sample": "image",
    "layers": [
        {
            "layer_id": "a",
            "layer_type": "conv2d",
            "input_shape": [3, 8, 8],
            "output_shape": [4, 4, 4],
            "kernel_size": 3,
        },
        {"layer_id": "b", "layer_type": "pool", "input_shape": [4, 4, 4], "output_shape": [4, 1, 1]},
        {"layer_id": "c", "layer_type": "linear", "input_shape": [4], "output_shape": [10]},
    ],
}
_NETWORK = {"topology": ["Ring"], "npus_count": [4], "bandwidth": [100.0], "latency": [50.0]}
_TRAFFIC = {
    "a": {
        "messages": [
            {"start_ns": 0, "src": 0, "dst": 1, "bytes": 1024},
            {"start_ns": 5, "src": 0, "dst": 3, "bytes": 9},
        ],
        "topology": ["Mesh2D", 2, 2],
        "bandwidth_GBps": 50,
        "latency_ns": 500,
    }
}
_EXPERIMENT = {
    "name": "tiny",
    "hardware": {"gpu_model": "A100", "num_gpus_per_node": 2, "network_bandwidth_gbps": 100},
    "model": {
        "model_type": "gpt2",
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "sequence_length": 32,
    },
    "training": {"batch_size_per_gpu": 2, "num_nodes": 2, "num_iterations": 3, "jitter": {"compute": 0.02}, "seed": 1},
    "network": {"topology_type": "fat_tree", "base_latency_us": 5},
    "prices": {"dollars_per_gpu_hour": 1.79},
}
_JOBS = [
    ["job_id", "submit_time", "num_gpus", "duration", "priority"],
    ["a", "0", "2", "100", "0"],
    ["b", "2024-01-01 00:00:10", "1", "50", "1"],
    ["c", "30", "4", "70.5", ""],
]
_KERNELS = [["collective", "ranks", "stride", "bytes", "time_us"], ["all_gather", "2", "1", "1048576", "35.5"]]
_TIMES = [["kind", "dtype", "m", "n", "k", "time_us"], ["gemm", "bf16", "64", "128", "64", "9.5"]]
_STACK = {
    "extends": "torchtitan",
    "description": "mine",
    "qkv_copies": 1,
    "memory_rate": 0.9,
    "fitted": {"memory_rate": "by hand"},
}
_SPACE = {
    "workloads": {
        "tiny": {"din": 64, "dout": 64, "dmodel": 64, "dff": 128, "head": 4, "seq": 32, "batch": 8, "num_stacks": 2}
    },
    "systems": {
        "s": {
            "system": {
                "scheduling-policy": "LIFO",
                "endpoint-delay": 10,
                "active-chunks-per-dimension": 4,
                "preferred-dataset-splits": 2,
                "collective-optimization": "localBWAware",
                **{
                    f"{name}-implementation": ["ring"]
                    for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
                },
                "roofline-enabled": 1,
                "local-mem-bw": 3000,
                "peak-perf": 450,
            },
            "network": _NETWORK,
        }
    },
    "plan": {"npus": 4, "activation_recompute": [False]},
    "memory_limit_gib": 64,
}
_SCHEDULE = {
    "nodes": 2,
    "gpus_per_node": 4,
    "policies": ["fifo", "las"],
    "placement": "packed",
    "resume_s": 60,
    "quotas": {"research": 4},
    "failures": {"per_1000_node_days": 6.5, "repair_hours": 24, "checkpoint_minutes": 60},
    "jobs": [
        {"name": "a", "gpus": 4, "submit_s": 0, "duration_s": 7200, "group": "research"},
        {"name": "b", "gpus": 2, "submit_s": 60, "step_s": 0.5, "network_share": 0.2, "duration_s": 100},
    ],
}
_CASE = {"case": "x", "topology": "Ring:4@50/500", "collective": "all_reduce", "bytes": 1024}
_PREDICT = "predict CONFIG --cluster h100-sxm --plan-file PLAN --json"

_CHAKRA = {
    "metadata": {"attr": [{"name": "schema", "string_val": "symbolic_tensor_network"}]},
    "nodes": [
        {
            "id": "1",
            "name": "product",
            "type": "COMP_NODE",
            "attr": [{"name": "num_ops", "int64_val": "131072"}, {"name": "tensor_size", "uint64_val": "8192"}],
        },
        {
            "id": "2",
            "name": "sum",
            "type": "COMM_COLL_NODE",
            "data_deps": ["1"],
            "attr": [{"name": "comm_type", "int64_val": "0"}, {"name": "comm_size", "uint64_val": "4096"}],
        },
    ],
}
_SYSTEM = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "active-chunks-per-dimension": 2,
    "preferred-dataset-splits": 2,
    "collective-optimization": "localBWAware",
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
    "roofline-enabled": 1,
    "local-mem-bw": 3000,
    "peak-perf": 450,
}
_REMOTE = {"memory-type": "PER_NPU_MEMORY_EXPANSION", "remote-mem-latency": 100, "remote-mem-bw": 50}
_ASTRA = (
    "astra --workload-configuration TRACES --system-configuration SYSTEM"
    " --network-configuration NETWORK --remote-memory-configuration REMOTE --json"
)
_RUN = {
    "name": "run",
    "gpus": 64,
    "days": 1,
    "step": {"seconds": 6.5, "tokens": "8M"},
    "failures": {"preset": "llama-3", "rate": 2},
    "checkpoint": {"every_minutes": 30, "blocking_s": 2, "persist_s": 20, "load_s": 60},
}
_MEGATRON = {
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 1,
    "--num-layers": 2,
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--seq-length": 64,
    "--max-position-embeddings": 64,
    "--vocab-size": 512,
    "--micro-batch-size": 1,
    "--global-batch-size": 4,
    "--use-distributed-optimizer": True,
    "--recompute-granularity": "selective",
    "--recompute-modules": ["core_attn", "layernorm"],
    "--bf16": True,
}
FORMATS = {
    "RECIPE": Format("megatron.yaml", _MEGATRON, ("predict --recipe FILE --cluster h100-sxm --gpus 4 --json",)),
    "CHAKRA": Format("trace.json", _CHAKRA, ("chakra convert FILE OUT", "chakra convert FILE -")),
    "SYSTEM": Format("system.json", _SYSTEM, (_ASTRA.replace("SYSTEM", "FILE"),)),
    "REMOTE": Format("remote.json", _REMOTE, (_ASTRA.replace("REMOTE", "FILE"),)),
    "RUN": Format("run.yaml", _RUN, ("run FILE --runs 2 --no-gains --jobs 1 --json",)),
    "CONFIG": Format("config.json", _CONFIG, (_PREDICT.replace("CONFIG", "FILE"), "models FILE")),
    "TOWER": Format("llava.json", _TOWER, (_PREDICT.replace("CONFIG", "FILE") + " --images 2", "models FILE")),
    "MODEL": Format("small.yaml", _MODEL, (_PREDICT.replace("CONFIG", "FILE"), "models FILE")),
    "PLAN": Format("plan.yaml", _PLAN, (_PREDICT.replace("PLAN", "FILE"),)),
    "ANCHOR": Format("anchor.yaml", _PLAN | {"step_time_s": 0.01}, (f"{_PREDICT} --anchor FILE",)),
    "CLUSTER": Format("cluster.yaml", _CLUSTER, (_PREDICT.replace("h100-sxm", "FILE"),)),
    "LAYERS": Format("net.yaml", _LAYERS, ("predict FILE --cluster h100-sxm --dp-replicate 2 --json",)),
    "NETWORK": Format(
        "network.yml",
        _NETWORK,
        (
            f"{_PREDICT} --network FILE",
            "traffic TRAFFIC --network FILE",
            "collective all_reduce --network FILE --bytes 4096 --json",
        ),
    ),
    "TRAFFIC": Format("traffic.json", _TRAFFIC, ("traffic FILE", "traffic FILE --model flows")),
    "CASES": Format("cases.json", _CASE, ("collective --cases FILE",)),
    "EXPERIMENT": Format("experiment.yaml", _EXPERIMENT, ("experiment run FILE --json",)),
    "JOBS": Format("jobs.csv", _JOBS, ("cluster FILE --nodes 2 --gpus-per-node 4 --json",)),
    "KERNELS": Format("network.csv", _KERNELS, (f"{_PREDICT} --network-profile FILE",)),
    "TIMES": Format("kernels.csv", _TIMES, (f"{_PREDICT} --kernel-profile FILE",)),
    "STACK": Format("stack.yaml", _STACK, (f"{_PREDICT} --stack FILE",)),
    "SPACE": Format("space.yaml", _SPACE, ("dse FILE --out FOLDER --jobs 1 --json",)),
    "SCHEDULE": Format("schedule.yaml", _SCHEDULE, ("cluster FILE --json",)),
    **MEASURED,
}


def program(folder: Path) -> Path:
    """A small saved program in `folder`."""
    (folder / "seed.program").unlink(missing_ok=True)
    plan = Plan(seq_len=64, dp_shard=2, pp=2, n_microbatches=2)
    save(build(load_model("gpt2-small"), plan, load_cluster("h100-sxm")), folder / "seed.program")
    return folder / "seed.program"


_PLAN_TWO = (
    "plan CONFIG --cluster h100-sxm --gpus 2 --seq-len 64 --global-batch 4"
    " --tp 1 --pp 1 --cp 1 --stack torchtitan --json"
)
COMMANDS = {
    "PROGRAM": (
        "predict --program FILE --cluster h100-sxm --json",
        "simulate --program FILE --cluster h100-sxm --json",
    ),
    "TRACE": ("chakra info FILE",),
    "STORE": (f"{_PLAN_TWO} --store FILE",),
}
"""the commands that read files which Forerun itself writes"""
