"""DeepSeek-V3 as DeepSeek trained it.

The plan: arXiv 2412.19437, section 3, with the batch and the GPUs of arXiv 2505.09343, table 4. The multi-token
prediction module counts as a 62nd layer.
"""

from dataclasses import replace

from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

MODEL = replace(load_model("deepseek-v3"), n_layers=62)
CLUSTER = load_cluster("h800-sxm")
PLAN = Plan(
    seq_len=4096,
    n_microbatches=120,
    dp_shard=128,
    pp=16,
    ep=64,
    zero_stage=1,
    pp_schedule="DualPipe",
    virtual_stages=2,
    expert_overlap=True,
    precision="fp8",
    fp8_recipe="block",
    activation_checkpointing="selective",
    recompute_modules=("layernorm", "mla_up_proj", "moe_act"),
    moment_dtype="bf16",
    stack="hai-llm",
)
