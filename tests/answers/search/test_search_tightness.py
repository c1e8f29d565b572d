"""How close the bounds of one plan are: what they leave out is known, so a bound that says less has lost something.

A share is that of the simulated step time, or of the allocated memory. Bounds leave out the host, the slowing of
kernels beside collectives, and what is exposed of collectives other than the first gathers and the last reduction.
"""

from dataclasses import replace
from functools import cache

import pytest

from forerun.answers.analysis.predict import predict
from forerun.answers.search.screening import Screening
from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.time_bound import TimeBound
from forerun.answers.search.unit_runs import UnitRuns
from forerun.common.units import GIB
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.parameters import parameter_count
from forerun.describe.plan.plan import Plan

CLUSTER = load_cluster("h100-sxm")
MODEL = replace(load_model("llama-3.1-8b"), n_layers=8)
PARAMETERS = parameter_count(MODEL)


@cache
def screening(stack: str, n_gpus: int) -> Screening:
    return Screening(UnitRuns(MODEL, CLUSTER, n_gpus=n_gpus), stack)


def bounds(plan: Plan) -> tuple[float, float, float, float]:
    """Seconds of a step by the bound of all plans and by that of one, and bytes held and needed."""
    table = SpaceTable.of_plans([plan], CLUSTER.node_size)
    out = screening(plan.stack, plan.world_size).run(table)
    close = TimeBound(screening(plan.stack, plan.world_size)).least_step_s(plan, table.groups[0])
    return out.time_s[0], close, out.held_bytes[0], out.need_bytes[0]


FAR = {"dp_shard": 64, "seq_len": 512}
"""so little work that gathers and reductions are what takes time"""
CASES = [
    ("torchtitan", {}, 0.912, 1.000, 1.000),
    ("torchtitan", {"n_microbatches": 3}, 0.964, 1.000, 1.000),
    ("torchtitan", {"dp_shard": 8}, 0.777, 0.887, 1.000),
    ("torchtitan", {"dp_shard": 8, "n_microbatches": 3}, 0.777, 0.856, 0.926),
    ("torchtitan", FAR, 0.212, 0.907, 0.718),
    ("torchtitan", {**FAR, "reshard_after_forward": "never"}, 0.258, 0.867, 0.896),
    ("torchtitan", {**FAR, "prefetch": 0}, 0.168, 0.720, 0.789),
    ("torchtitan", {**FAR, "n_microbatches": 3}, 0.193, 0.905, 0.698),
    ("torchtitan", {"dp_replicate": 64, "zero_stage": 0, "seq_len": 512}, 0.372, 0.821, 0.977),
    ("torchtitan", {"dp_replicate": 64, "zero_stage": 0, "seq_len": 512, "n_microbatches": 3}, 0.545, 0.658, 1.000),
    ("megatron-core", {**FAR, "zero_stage": 1}, 0.215, 0.594, 0.977),
    ("megatron-core", {"dp_shard": 8, "zero_stage": 1, "tp": 8, "seq_len": 512, "pp": 4, "n_microbatches": 8}, 0.173,
     0.259, 0.953),
    ("megatron-core", {"pp": 4, "n_microbatches": 8, "zero_stage": 0}, 0.966, 0.981, 0.981),
    ("torchtitan", {"pp": 4, "n_microbatches": 8, "zero_stage": 0}, 0.981, 1.000, 0.933),
    ("torchtitan", {"pp": 4, "n_microbatches": 8, "dp_shard": 2}, 0.930, 0.973, 0.920),
    ("torchtitan", {"pp": 4, "n_microbatches": 8, "virtual_stages": 2, "pp_schedule": "Interleaved1F1B"}, 0.963, 1.000,
     0.934),
    ("torchtitan", {"pp": 4, "n_microbatches": 8, "virtual_stages": 2, "pp_schedule": "ZBV"}, 0.946, 1.000, 1.000),
    ("torchtitan", {"pp": 4, "n_microbatches": 8, "pp_schedule": "ZB1P"}, 0.971, 0.980, 0.877),
    ("torchtitan", {"pp": 4, "n_microbatches": 8, "zero_stage": 0, "layers_per_stage": (1, 5, 1, 1)}, 0.959, 1.000,
     1.000),
    ("nemo", {"pp": 4, "n_microbatches": 8, "zero_stage": 0}, 0.977, 0.984, 0.979),
    ("torchtitan", {"offload": "optimizer"}, 0.989, 1.000, 1.000),
    ("torchtitan", {"offload": "params", "dp_shard": 8}, 0.835, 0.904, 1.000),
    ("torchtitan", {"optimizer": "sgd"}, 0.906, 1.000, 1.000),
    ("torchtitan", {"optimizer_impl": "foreach"}, 0.937, 1.000, 1.000),
    ("torchtitan", {"master_dtype": "bf16"}, 0.953, 1.000, 1.000),
    ("torchtitan", {"activation_checkpointing": "full"}, 0.923, 1.000, 1.000),
    ("torchtitan", {"tp": 8, "dp_shard": 4}, 0.551, 0.899, 1.000),
    ("composer", {"dp_shard": 8, "n_microbatches": 3}, 0.817, 0.842, 0.882),
    ("simple-fsdp", {"dp_shard": 8}, 0.709, 0.737, 0.823),
    ("deepspeed", FAR, 0.116, 0.405, 1.000),
    ("pytorch", {"dp_replicate": 8, "zero_stage": 0}, 0.847, 0.935, 0.804),
]  # fmt: skip


@pytest.mark.parametrize(("stack", "fields", "of_all", "of_one", "memory"), CASES, ids=str)
def test_how_close_bounds_are(stack: str, fields: dict, of_all: float, of_one: float, memory: float) -> None:
    plan = Plan(**{"seq_len": 4096, "stack": stack, **fields})
    prediction = predict(MODEL, plan, CLUSTER)
    time_s, close_s, held, _ = bounds(plan)
    shares = [
        time_s / prediction.step_time_s,
        close_s / prediction.step_time_s,
        held / GIB / prediction.peak_allocated_gib,
    ]
    assert shares == pytest.approx([of_all, of_one, memory], abs=0.01)
    assert max(shares) <= 1 + 1e-9
