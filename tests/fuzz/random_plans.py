"""Random plans of shipped models on shipped clusters, as a user could write them; most of them can run."""

from __future__ import annotations

import random
from collections.abc import Iterator

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.complete import complete_plan

MODELS = (
    "llama-3.1-8b",
    "llama-3.2-1b",
    "qwen2.5-7b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "gemma2-9b",
    "gpt-oss-20b",
    "qwen3-30b-a3b",
)
CLUSTERS = ("h100-sxm", "a100-40gb-sxm", "b200-sxm", "h100-pcie", "mi300x", "l40s", "gb200-nvl72", "rtx4090")
_CHOICES = {
    "zero_stage": (0, 1, 2, 3, 3, 3),
    "micro_batch": (1, 1, 2, 4),
    "n_microbatches": (1, 1, 2, 4, 8),
    "activation_checkpointing": ("none", "selective", "full"),
    "compile": (False, True),
    "stack": ("torchtitan", "megatron-core", "pytorch", "deepspeed", "nemo"),
    "precision": ("bf16", "bf16", "bf16", "fp8", "fp32"),
    "reshard_after_forward": ("default", "always", "never"),
    "prefetch": (0, 1, 2),
    "overlap_grad_reduce": (True, True, False),
    "reduce_dtype": ("auto", "fp32", "bf16"),
    "seq_len": (512, 2048, 8192),
}
_DEGREES = {
    "tp": (1, 1, 1, 2, 4, 8),
    "pp": (1, 1, 1, 2, 4),
    "cp": (1, 1, 1, 2),
    "dp_shard": (1, 2, 4, 8),
    "dp_replicate": (1, 1, 2),
    "ep": (1, 1, 2, 4),
}


def random_setup(dice: random.Random) -> Setup | None:
    """Returns a model under a random plan on a random cluster; None where the plan is refused."""
    cluster = load_cluster(dice.choice(CLUSTERS))
    fields = {name: dice.choice(values) for name, values in (_CHOICES | _DEGREES).items() if dice.random() < 0.6}
    fields.setdefault("seq_len", 2048)
    if fields.get("pp", 1) > 1:
        fields["n_microbatches"] = fields["pp"] * dice.choice((1, 2))
        fields["pp_schedule"] = dice.choice(("1F1B", "GPipe", "Interleaved1F1B", "ZB1P"))
        fields["virtual_stages"] = 2 if fields["pp_schedule"] == "Interleaved1F1B" else 1
    try:
        return Setup(load_model(dice.choice(MODELS)), complete_plan(fields), cluster)
    except ForerunError:
        return None


def random_setups(number: int, seed: int) -> Iterator[Setup]:
    """Yields `number` setups that can be simulated."""
    dice, found = random.Random(seed), 0
    while found < number:
        setup = random_setup(dice)
        if setup is None:
            continue
        try:
            simulate_setup(setup, folded=True)
        except ForerunError:
            continue
        found += 1
        yield setup
