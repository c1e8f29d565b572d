"""The shipped constants against the measurements that they were fitted to."""

from dataclasses import replace

import numpy as np
import pytest
from calibration import DEVICES, measured, needs_calibration

from forerun.core.cost.attention import attention_rates, attention_s
from forerun.core.cost.gemm import gemm_rates, gemm_s
from forerun.core.cost.profile import load_profile
from forerun.core.network.nccl import collective_s
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Attention
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import load_cluster, load_device
from forerun.describe.kernels.attention import attention_kernels

pytestmark = needs_calibration
CLUSTERS = {"a100": "a100", "h100": "h100", "h200": "h200", "b200": "b200", "gb200": "gb200-nvl72"}
OPS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
}


def percent(predicted, actual) -> np.ndarray:
    return np.abs(predicted / actual - 1) * 100


@pytest.mark.parametrize(
    ("device", "training", "everything"),
    [
        ("a100", 6.0, 10.3),
        ("h100", 3.1, 7.1),
        ("h200", 2.9, 6.9),
        ("b200", 4.5, 8.8),
        ("gb200", 4.5, 8.8),
        ("l40s", 7.2, 16.2),
    ],
)
def test_matrix_products(device, training, everything):
    table = measured("gemm")
    rows = table[(table.device == DEVICES[device]) & (table.dtype == "bfloat16")]
    m, n, k = (rows[name].to_numpy() for name in ("m", "n", "k"))
    time_us = gemm_s(m, n, k, gemm_rates(load_device(device), "bf16")) * 1e6
    error = percent(time_us, rows.latency_us.to_numpy())
    large = (m >= 2048) & (np.minimum(n, k) >= 1024)
    assert error[large].mean() < training
    assert error.mean() < everything


@pytest.mark.parametrize("device", DEVICES)
def test_attention_without_the_serving_cache_is_close_and_not_slower(device):
    table, spec = measured("attention_forward"), load_device(device)
    kernel = "flash3" if spec.architecture == "hopper" else "cudnn" if spec.architecture == "blackwell" else "flash2"
    rows = table[(table.device == DEVICES[device]) & (table.head_dim == 128) & (table.seq >= 2048)]
    rows = rows[rows.batch * rows.heads >= 16]
    batch, heads, kv_heads, seq, size = (
        rows[name].to_numpy(np.float64) for name in ("batch", "heads", "kv_heads", "seq", "head_dim")
    )
    one = np.ones_like(seq)
    shapes = Attention(batch, heads, kv_heads, seq, seq, size, causal=one, backward=0 * one, v_head_dim=size)
    profile = load_profile(spec.cost_profile).attention
    own = profile.rates.get(kernel)
    factor = (own or attention_kernels()[kernel].rate_on(spec.architecture)).at(128)[0]
    rates = replace(attention_rates(spec, kernel, 128), extra_keys=profile.head_dim[128].extra_keys)
    time_s = attention_s(shapes, rates, speed=1 / factor)
    ratio = time_s * 1e6 / rows.latency_us.to_numpy()
    assert percent(ratio, 1.0).mean() < 11
    assert -6 < (np.median(ratio) - 1) * 100 < 0.5


@pytest.mark.parametrize("device", CLUSTERS)
@pytest.mark.parametrize("op", OPS)
def test_collectives_in_a_node(device, op):
    table, cluster = measured("nccl"), load_cluster(CLUSTERS[device])
    rows = table[(table.device == DEVICES[device]) & (table.op == op)]
    constants = load_profile(cluster.device.cost_profile).collectives
    errors, sizes = [], []
    for count, same in rows.groupby("num_gpus"):
        group = CommGroup("tp", int(count), 1, int(count))
        size = same.message_bytes.to_numpy(np.float64)
        time_us = collective_s(OPS[op], size, group, cluster, constants) * 1e6
        errors.append(percent(time_us, same.latency_us.to_numpy()))
        sizes.append(size)
    error, large = np.concatenate(errors), np.concatenate(sizes) >= 2**20
    assert error[large].mean() < 8
    assert error[~large].mean() < (14 if op == "alltoall" else 8)
