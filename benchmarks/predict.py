"""Predictions per second of CPU, and the time of Llama-3.1-405B on 16,384 GPUs.

Run: python benchmarks/predict.py. Every plan is distinct and every prediction runs the full event simulation, once with
reserved memory as an estimate, once with a replay of the allocator, as `predict` does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any

from forerun.answers.analysis.predict import predict, predict_setup, simulate
from forerun.answers.analysis.setup import Setup
from forerun.common.errors import ImpossiblePlan
from forerun.core.network.on_topology import load_network
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan


def distinct_plans() -> list[Plan]:
    """Plans of a 32-layer model on 64 GPUs: data, sharded, tensor and pipeline parallel, three checkpointing modes."""
    plans = []
    axes: Iterable[Any] = itertools.product(
        (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), ("none", "selective", "full"), (1, 3), (False, True)
    )
    for tp, pp, micro_batch, checkpointing, zero_stage, compiled in axes:
        dp = 64 // (tp * pp)
        plans.append(
            Plan(
                seq_len=4096,
                tp=tp,
                pp=pp,
                dp_shard=dp,
                micro_batch=micro_batch,
                n_microbatches=max(1, 256 // (dp * micro_batch)) if pp > 1 else 1,
                zero_stage=zero_stage,
                activation_checkpointing=checkpointing,
                compile=compiled,
            )
        )
    return plans


def main() -> None:
    model, cluster = load_model("llama-3.1-8b"), load_cluster("h100-sxm")
    plans = distinct_plans()
    fabric = load_network("switch:8@450/300,fat-tree:8@50/700")
    for network in (None, fabric):
        predict(model, plans[0], cluster, network)
    single, pipelines = [p for p in plans if p.pp == 1], [p for p in plans if p.pp > 1]
    for label, chosen, network in (
        ("one micro batch (pp 1)", single, None),
        ("one micro batch on a fat tree, its routes not known yet", single, fabric),
        ("one micro batch on a fat tree, its routes known", single, fabric),
        ("pipelines of 8 to 256 micro batches", pipelines, None),
        ("pipelines on a fat tree", pipelines, fabric),
    ):
        rates = []
        for replays in (False, True):
            done = 0
            start = time.process_time()
            for plan in chosen:
                try:
                    predict_setup(Setup(model, plan, cluster, network, replays=replays))
                    done += 1
                except ImpossiblePlan:
                    continue
            rates.append(done / (time.process_time() - start))
        nodes = len(simulate(model, chosen[-1], cluster).flat)
        print(
            f"32 layers, {label}: {rates[0]:.0f} predictions/s, {rates[1]:.0f} with a replay of the allocator"
            f" ({done} plans, the last of {nodes:,} nodes)"
        )
    big = load_model("llama-3.1-405b")
    first = None
    for replicas in (1, 4, 16, 64):
        plan = Plan(
            seq_len=8192, tp=8, pp=16, dp_shard=2, dp_replicate=replicas, n_microbatches=32, zero_stage=1,
            activation_checkpointing="selective",
        )  # fmt: skip
        predict(big, plan, cluster)
        start = time.process_time()
        result = predict(big, plan, cluster)
        seconds = time.process_time() - start
        first = first or seconds
        print(
            f"405B on {plan.world_size:>6} GPUs: {seconds * 1e3:.0f} ms ({seconds / first:.2f} of the smallest), "
            f"step {result.step_time_s:.1f} s, MFU {result.mfu:.1%}"
        )


if __name__ == "__main__":
    main()
