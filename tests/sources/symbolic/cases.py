"""Plans and clusters that the tests of the symbolic path share."""

from __future__ import annotations

from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.spec import MLASpec, ModelSpec, MoESpec
from forerun.describe.plan.plan import Plan

CLUSTER = load_cluster("h100-sxm")

DENSE = ModelSpec("dense", 8, 1024, 16, 8, 64, 2816, 32000)
GPT = ModelSpec(
    "gpt", 4, 768, 12, 12, 64, 3072, 50304, mlp="gelu", norm="layernorm", position="learned", max_positions=2048,
    tied_embeddings=True, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True,
)  # fmt: skip
MOE = ModelSpec(
    "moe", 4, 1024, 16, 16, 64, 2816, 32000, moe=MoESpec(8, 2, 704, shared_ffn=1408, n_dense_layers=1),
    mla=MLASpec(256, 64, 32, 64, 384),
)  # fmt: skip
BERT = load_model("bert-base")


def plan(**fields: object) -> Plan:
    """A plan of 2,048-token sequences."""
    return Plan(**{"seq_len": 2048, **fields})  # type: ignore[arg-type]


SCHEDULES = [
    ("1F1B", 1, 8),
    ("GPipe", 1, 8),
    ("Interleaved1F1B", 2, 8),
    ("ZB1P", 1, 8),
    ("ZBV", 2, 8),
    ("DualPipeV", 2, 8),
]
