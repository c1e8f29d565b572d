"""A complete measured row, and ways to vary it."""

from __future__ import annotations

import csv
from pathlib import Path

from forerun.answers.analysis.prediction import Prediction
from forerun.describe.plan.plan import Plan
from forerun.evidence.validation.rows import Measurement, read_measurements

ROW = {
    "id": "row-1",
    "split": "open",
    "tier": "A",
    "source_id": "lab",
    "framework": "torchtitan FSDP2",
    "software": "torchtitan 2025",
    "model": "Small-Llama",
    "n_layers": "16",
    "hidden": "2048",
    "n_heads": "16",
    "n_kv_heads": "8",
    "head_dim": "128",
    "ffn_hidden": "5632",
    "mlp": "swiglu",
    "vocab": "32000",
    "seq_len": "4096",
    "is_moe": "no",
    "gpu": "H100-SXM",
    "gpu_mem_gb": "80",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "intra_node": "NVLink4/NVSwitch",
    "inter_node_gbit_s_per_gpu": "400",
    "hw_key": "lab-h100",
    "dp_replicate": "1",
    "dp_shard": "16",
    "zero_stage": "3",
    "tp": "1",
    "sp": "no",
    "pp": "1",
    "pp_schedule": "none",
    "pp_virtual_stages": "1",
    "n_microbatches": "2",
    "cp": "1",
    "ep": "1",
    "micro_batch": "1",
    "grad_accum": "2",
    "global_batch_seqs": "32",
    "precision": "bf16",
    "param_dtype": "bf16",
    "grad_reduce_dtype": "fp32",
    "fp8_recipe": "",
    "async_tp": "no",
    "activation_checkpointing": "none",
    "ac_detail": "",
    "torch_compile": "no",
    "attention_kernel": "sdpa(flash2)",
    "optimizer": "adamw_fused",
    "cpu_offload": "none",
    "step_time_s": "1.5",
    "tokens_per_s_per_gpu": "",
    "peak_mem_gib": "40",
    "peak_mem_kind": "allocated",
    "outcome": "ok",
    "flops_convention": "",
    "step_time_s_derived": "",
    "notes": "",
}


def write_rows(path: Path, *changes: dict[str, str]) -> Path:
    """Write one row per dict of changed cells (ids are numbered unless given)."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        for number, change in enumerate(changes or ({},), start=1):
            writer.writerow({**ROW, "id": f"row-{number}", **change})
    return path


def measurement(tmp_path: Path, **change: str) -> Measurement:
    """One parsed row that differs from ROW in the cells given."""
    return read_measurements(write_rows(tmp_path / "one.csv", change))[0]


def prediction(step_time_s: float, allocated_gib: float, reserved_gib: float, fits: bool) -> Prediction:
    """A Prediction with these figures and plain values elsewhere."""
    return Prediction(
        model="Small-Llama",
        cluster="lab",
        plan=Plan(seq_len=4096, dp_shard=16),
        n_gpus=16,
        step_time_s=step_time_s,
        step_time_low_s=0.9 * step_time_s,
        step_time_high_s=1.2 * step_time_s,
        tokens_per_s_per_gpu=1000.0,
        mfu=0.4,
        hfu=0.4,
        peak_allocated_gib=allocated_gib,
        peak_reserved_gib=reserved_gib,
        peak_reserved_low_gib=reserved_gib,
        peak_reserved_high_gib=1.1 * reserved_gib,
        device_gib=reserved_gib + 2,
        memory_limit_gib=80.0,
        fits=fits,
        fit_in_doubt=False,
        warnings=(),
        memory_by_category_gib={"parameters": allocated_gib},
        peak_rank_class="0",
        peak_owner="layer 0",
        exposed_comm_s=0.0,
        bubble_s=0.0,
        breakdown={"compute": step_time_s},
        bottleneck="compute",
        dollars_per_billion_tokens=None,
        coverage=1.0,
        explain=(),
    )
