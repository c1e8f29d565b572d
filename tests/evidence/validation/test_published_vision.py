"""ResNet-50 and BERT-large against throughput that NVIDIA and MLPerf published, each within 15 %.

Nothing in Forerun was fitted to these rows: kernels cost what the devices' cost profiles say, and a row's stack is
that of its software. Inputs come from DALI or are ready in memory; the input pipeline is not modelled. (Left out for
that: eight GPUs in mixed precision with PyTorch's own loaders, which scale 6.7 and 6.9 times, where DALI feeds 7.8.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.describe.cluster.catalog import load_cluster, load_device
from forerun.describe.model.catalog import load_any
from forerun.describe.model.parameters import model_flops_per_token
from forerun.describe.plan.plan import Plan

EXAMPLES = "github.com/NVIDIA/DeepLearningExamples at 729963dd"
MXNET = f"{EXAMPLES}, MxNet/Classification/RN50v1.5/README.md, Training performance"
PYTORCH = f"{EXAMPLES}, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, Training performance; configs.yml"
BERT = f"{EXAMPLES}, PyTorch/LanguageModeling/BERT/README.md, Pre-training"
MLPERF = "github.com/mlcommons/training_results_v1.0, NVIDIA/results/{}/resnet, tracked_stats of the second block"
WITHIN = 0.15


@dataclass(frozen=True)
class Row:
    """A published throughput in images or sequences a second over all GPUs."""

    source: str
    cluster: str
    n_gpus: int
    stack: str
    published: float
    plan: dict[str, Any] = field(default_factory=dict)
    model: str = "resnet50"

    @property
    def name(self) -> str:
        """What tells a row from the others."""
        p = self.plan
        return f"{self.model} {self.n_gpus} {self.cluster} {p['precision']} {self.stack} seq{p.get('seq_len', 1)}"

    def predicted(self) -> float:
        """Images or sequences a second."""
        model: dict[str, Any] = {"seq_len": 1, "zero_stage": 0, "optimizer": "sgd", "optimizer_impl": "foreach"}
        plan = Plan(**{**model, "dp_shard": self.n_gpus, "stack": self.stack, **self.plan})
        setup = Setup(load_any(self.model), plan, load_cluster(self.cluster))
        return plan.global_batch / simulate_setup(setup, folded=True).prediction.step_time_s


def resnet(source: str, cluster: str, stack: str, precision: str, batch: int, rows: dict[int, float]) -> list[Row]:
    """Rows by GPUs."""
    plan = {"precision": precision, "micro_batch": batch}
    return [Row(source, cluster, n, stack, figure, plan) for n, figure in rows.items()]


def bert(cluster: str, precision: str, seq: int, batch: int, accumulation: int, rows: dict[int, float]) -> list[Row]:
    """Rows by GPUs; LAMB's traffic is taken for Adam's."""
    plan = {
        "precision": precision,
        "seq_len": seq,
        "micro_batch": batch,
        "n_microbatches": accumulation,
        "optimizer": "adam",
        "optimizer_impl": "fused",
    }
    return [Row(BERT, cluster, n, "nvidia-bert", figure, plan, "bert-large") for n, figure in rows.items()]


A100, DGX1, DGX1_16, DGX2 = "a100-80gb-sxm", "v100-dgx1", "v100-dgx1-16gb", "v100-dgx2"
ROWS = [
    *resnet(MXNET, A100, "mxnet-vision", "fp16", 512, {1: 3410.52, 4: 13442.66, 8: 26673.72}),
    *resnet(MXNET, DGX1_16, "mxnet-vision", "fp16", 192, {1: 1376, 2: 2768, 4: 5357, 8: 10723}),
    *resnet(MXNET, DGX2, "mxnet-vision", "fp16", 256, {1: 1492, 2: 2935, 4: 5726, 8: 11368, 16: 21484}),
    *resnet(MXNET, A100, "mxnet-vision-nchw", "tf32", 512, {1: 1055.78, 8: 8247.44}),
    *resnet(MXNET, DGX1_16, "mxnet-vision-nchw", "fp32", 96, {1: 384, 8: 3005}),
    *resnet(MXNET, DGX2, "mxnet-vision-nchw", "fp32", 128, {1: 417, 8: 3223, 16: 6338}),
    *resnet(MLPERF.format("dgxa100_ngc21.05_mxnet"), A100, "mxnet-vision", "fp16", 408, {8: 26706.5}),
    *resnet(MLPERF.format("dgxa100_n8_ngc21.05_mxnet"), A100, "mxnet-vision", "fp16", 204, {64: 201020}),
    *resnet(PYTORCH, A100, "pytorch-vision", "fp16", 256, {1: 2470}),
    *resnet(PYTORCH, A100, "pytorch-vision-nchw", "tf32", 256, {1: 938, 8: 7248}),
    *resnet(PYTORCH, DGX1, "pytorch-vision", "fp16", 256, {1: 1156}),
    *resnet(PYTORCH, DGX1_16, "pytorch-vision", "fp16", 256, {1: 1200}),
    *resnet(PYTORCH, DGX1, "pytorch-vision-nchw", "fp32", 112, {1: 356, 8: 2766}),
    *bert(A100, "fp16", 128, 256, 32, {1: 580, 8: 4591}),
    *bert(A100, "fp16", 128, 256, 16, {16: 9191}),
    *bert(A100, "fp16", 128, 256, 4, {64: 35774}),
    *bert(A100, "tf32", 128, 128, 64, {1: 317, 8: 2505}),
    *bert(DGX1, "fp16", 128, 64, 64, {1: 224, 8: 1746}),
]
BINNED = [
    *bert(A100, "fp16", 512, 32, 128, {1: 210, 8: 1657}),
    *bert(DGX1, "fp16", 512, 8, 256, {8: 586}),
]
"""phase 2 of BERT: `run_pretraining.py` sorts sequences into bins of lengths up to 512 ("phase2 binning"), and the
README does not say how long they are on average"""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_published_throughput_is_met(row: Row) -> None:
    assert row.predicted() == pytest.approx(row.published, rel=WITHIN)


def test_the_mean_error_is_small() -> None:
    errors = [row.predicted() / row.published - 1 for row in ROWS]
    assert sum(abs(error) for error in errors) / len(errors) < 0.06
    assert abs(sum(errors) / len(errors)) < 0.04


@pytest.mark.parametrize("row", BINNED, ids=lambda row: row.name)
@pytest.mark.xfail(strict=True, reason="published of shorter sequences, sorted by length; 512 is the longest")
def test_binned_sequences_are_not_met(row: Row) -> None:
    assert row.predicted() == pytest.approx(row.published, rel=WITHIN)


def test_binned_sequences_can_not_all_be_of_512_tokens() -> None:
    """8 V100s in fp32, 149.6 sequences/s published: of 512 tokens that would be more than the device can."""
    flops = model_flops_per_token(load_any("bert-large"), 512) * 512 * 149.6 / 8
    assert flops > load_device("v100-sxm2-32gb").peak("fp32")
