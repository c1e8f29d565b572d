"""Experiments of a small model, quick to simulate."""

from __future__ import annotations

import dataclasses
from typing import Any

from forerun.answers.analysis.setup import Setup
from forerun.answers.experiment.request import Disturbance, Request
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster, Link
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan

MODEL = ModelSpec("small", 2, 512, 8, 8, 64, 2048, 1024, mlp="gelu", norm="layernorm", position="none")
CLUSTER = load_cluster("a100-80gb-sxm")


def setup(**plan: Any) -> Setup:
    """8 GPUs of one node, DDP, unless `plan` says otherwise."""
    keys = {"seq_len": 512, "micro_batch": 8, "dp_replicate": 8, "zero_stage": 0, "stack": "pytorch"}
    return Setup(MODEL, Plan(**(keys | plan)), CLUSTER)


def request(base: Setup | None = None, n: int = 20, disturbance: dict[str, Any] | None = None, **more: Any) -> Request:
    """`n` iterations of `base`."""
    return Request("small", base or setup(), n, disturbance=Disturbance(**(disturbance or {})), **more)


def instant(cluster: Cluster = CLUSTER) -> Cluster:
    """The cluster with links that take next to no time."""
    links = tuple(Link(link.name, "nvswitch", link.size, 1e18, 0.0) for link in cluster.links)
    return dataclasses.replace(cluster, links=links)
