"""Factors on the rates of kernels and links that a stack achieves on a cluster."""

from __future__ import annotations

from forerun.describe.cluster.types import Cluster, KernelRates
from forerun.describe.stacks.stack import Stack


def rates_of(cluster: Cluster, stack: Stack) -> KernelRates:
    """Returns multipliers on the rates of kernels and links: the stack's, times those fitted to measured steps."""
    return cluster.rates.times(
        KernelRates(
            gemm=stack.gemm_rate,
            attention=stack.attention_rate,
            attention_backward=stack.attention_backward_rate,
            memory=stack.memory_rate,
            network=stack.network_rate,
        )
    )
