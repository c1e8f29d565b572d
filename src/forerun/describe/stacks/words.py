"""The types of values that stacks and plans share."""

from __future__ import annotations

from typing import Literal

Style = Literal["composed", "fused", "compiled"]
"""composed: one kernel per tensor operation; fused: hand-written kernels; compiled: TorchInductor's"""
Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "ZB1P", "ZBV", "DualPipeV"]
CpMethod = Literal["ring", "allgather", "ulysses"]
SelectivePolicy = Literal["op", "attention", "attention-block", "mlp", "mlp-act-norm", "attention+mlp", "params"]
GradientDtype = Literal["fp32", "bf16", "fp16", "param", "fp32-unless-fp16"]
"""param: the dtype of the parameters; fp32-unless-fp16: fp16 where a model is trained in fp16, and fp32 elsewhere"""
OptimizerImpl = Literal["fused", "foreach", "loop"]
