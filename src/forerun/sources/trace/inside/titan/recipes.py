"""What torchtitan's own configuration files of version 0.2 set beyond its defaults, as far as it shapes a step.

Wheels of torchtitan come without these files. Source: torchtitan 0.2.2, torchtitan/models/llama3/train_configs.
"""

from __future__ import annotations

RECIPES: dict[str, tuple[str, ...]] = {
    "llama3_8b": (
        "optimizer.lr=3e-4",
        "training.local_batch_size=1",
        "training.seq_len=8192",
        "training.steps=1000",
        "activation_checkpoint.mode=selective",
        "activation_checkpoint.selective_ac_option=op",
    ),
    "llama3_70b": (
        "optimizer.lr=1.5e-4",
        "training.local_batch_size=8",
        "training.seq_len=8192",
        "training.steps=1000",
        "parallelism.tensor_parallel_degree=8",
        "activation_checkpoint.mode=full",
    ),
    "llama3_405b": (
        "model.converters=quantize.linear.float8",
        "optimizer.lr=8e-5",
        "lr_scheduler.warmup_steps=600",
        "training.local_batch_size=2",
        "training.seq_len=8192",
        "training.steps=3000",
        "parallelism.tensor_parallel_degree=8",
        "parallelism.enable_async_tensor_parallel=True",
        "activation_checkpoint.mode=full",
        "compile.enable=True",
        "quantize.linear.float8.enable_fsdp_float8_all_gather=True",
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp=True",
        "quantize.linear.float8.filter_fqns=output",
    ),
}
"""settings by the configuration's name"""
