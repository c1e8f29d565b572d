"""The traced step of the example Llama and the symbolic one: the same work, the same messages, the same memory."""

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forerun.core.memory.profile import profile  # noqa: E402
from forerun.core.program.counts import op_counts  # noqa: E402
from forerun.core.program.kinds import OpKind  # noqa: E402
from forerun.core.program.types import Collective, Phase  # noqa: E402
from forerun.describe.cluster.catalog import load_cluster  # noqa: E402
from forerun.describe.model.spec import ModelSpec, MoESpec  # noqa: E402
from forerun.describe.plan.plan import Plan  # noqa: E402
from forerun.describe.stacks.catalog import load_stack  # noqa: E402
from forerun.sources.symbolic.build import build  # noqa: E402
from forerun.sources.trace.module import trace_module  # noqa: E402

_FILE = Path(__file__).parents[3] / "examples" / "llama" / "model.py"
_SPEC = importlib.util.spec_from_file_location("llama_to_compare", _FILE)
llama = importlib.util.module_from_spec(_SPEC)
sys.modules["llama_to_compare"] = llama
_SPEC.loader.exec_module(llama)

SEQ = 4096
SIZES = {"dim": 2048, "n_layers": 4, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 5632, "vocab_size": 32000}
EXPERTS = {"n_experts": 8, "top_k": 2}


@dataclass(frozen=True)
class Mode:
    """A plan under which both are compared, and where they differ."""

    plan: dict
    model: dict = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    """keys of DIFFERENCES"""


DIFFERENCES = {
    "buckets": "DDP closes a bucket at the tensor that fills it, the first at 1 MiB; the symbolic path reduces unit by"
    " unit and cuts a unit in equal parts. The bytes are equal, the number of all-reduces is not.",
    "buffers": "DDP broadcasts the model's buffers (here the table of rotary positions) before each forward pass; a"
    " ModelSpec has no buffers.",
    "rings": "PyTorch passes keys, values and their gradients on by an all-to-all with one receiver. The symbolic path"
    " uses sends. Counts and bytes are equal.",
}

PIPELINE = {"pp": 2, "n_microbatches": 4}
WIDE = {"precision": "fp32"}  # without FSDP2, torch.autocast would mix dtypes
MODES = {
    "one GPU": Mode(WIDE),
    "DDP": Mode({"dp_replicate": 8, "zero_stage": 0, **WIDE}, differs=("buckets", "buffers")),
    "FSDP2": Mode({"dp_shard": 8}),
    "FSDP2, full checkpointing": Mode({"dp_shard": 8, "activation_checkpointing": "full"}),
    "FSDP2, selective checkpointing": Mode({"dp_shard": 8, "activation_checkpointing": "selective"}),
    "FSDP2, accumulating": Mode({"dp_shard": 8, "n_microbatches": 3}),
    "HSDP": Mode({"dp_replicate": 2, "dp_shard": 4}),
    "TP and SP": Mode({"tp": 4, **WIDE}),
    "FSDP2, TP and SP": Mode({"dp_shard": 2, "tp": 4}),
    "PP": Mode({**PIPELINE, **WIDE}),
    "CP, ring": Mode({"cp": 2}, differs=("rings",)),
    "CP, all-gather": Mode({"cp": 2, "cp_method": "allgather"}, differs=("rings",)),
    "EP": Mode({"dp_shard": 8, "ep": 4}, model=EXPERTS),
    "FSDP2, TP and PP": Mode({"dp_shard": 2, "tp": 2, **PIPELINE}),
}
MEMORY_TOLERANCE = 0.02


def plan_of(mode):
    return Plan(seq_len=SEQ, stack="pytorch", **MODES[mode].plan)


@cache
def both(mode):
    """(traced, symbolic) Program of one mode."""
    config = llama.LlamaConfig(**SIZES, seq_len=SEQ, **MODES[mode].model)
    moe = MoESpec(config.n_experts, config.top_k, config.ffn_dim) if config.n_experts else None
    spec = ModelSpec(
        "llama",
        config.n_layers,
        config.dim,
        config.n_heads,
        config.n_kv_heads,
        config.dim // config.n_heads,
        config.ffn_dim,
        config.vocab_size,
        moe=moe,
    )
    tokens = torch.empty(1, SEQ, dtype=torch.int64, device="meta")
    traced = trace_module(lambda: llama.Llama(config), tokens, plan_of(mode), fold=False)
    stack = replace(load_stack("pytorch"), blas_workspaces=0)  # a trace counts them, and a prediction adds them
    return traced, build(spec, plan_of(mode), load_cluster("h100-sxm"), stack)


def flops(program, kind, phase, role):
    counts = op_counts(program, (phase,))[role]
    return float((counts * program.ops.flops * (program.ops.kind == kind)).sum())


def messages(program, role):
    """(kind, ranks of the group, how far they are apart, bytes) -> how often."""
    ops, found = program.ops, Counter()
    for i, count in enumerate(op_counts(program)[role].tolist()):
        if ops.kind[i] in (OpKind.COLLECTIVE, OpKind.P2P):
            group = program.groups[ops.group[i]]
            kind = "SEND" if ops.kind[i] == OpKind.P2P else Collective(ops.collective[i]).name
            found[kind, group.size, group.inner, float(ops.bytes_comm[i])] += count
    return +found


def bytes_of(found, kind):
    return sum(key[3] * count for key, count in found.items() if key[0] == kind)


def table():
    """What docs/tracing.md shows: by mode, peaks in MiB of the first and last stage, and the differences."""
    lines = ["| mode | peak traced, MiB | peak symbolic, MiB | ratio | differs in |", "|---|---|---|---|---|"]
    for name, mode in MODES.items():
        peaks = [[p.peak_bytes / 2**20 for p in profile(program)] for program in both(name)]
        ratios = [one / other for one, other in zip(*peaks, strict=True)]
        texts = [", ".join(f"{value:,.0f}" for value in values) for values in peaks]
        ratio = ", ".join(f"{value:.4f}" for value in ratios)
        lines.append(f"| {name} | {texts[0]} | {texts[1]} | {ratio} | {', '.join(mode.differs) or '-'} |")
    return "\n".join([*lines, "", *(f"* **{name}**: {why}" for name, why in DIFFERENCES.items())])


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_work_is_equal(mode):
    traced, symbolic = both(mode)
    assert len(traced.rank_classes) == len(symbolic.rank_classes)
    for role in range(len(symbolic.rank_classes)):
        for phase in Phase:
            for kind in (OpKind.GEMM, OpKind.ATTENTION):
                assert flops(traced, kind, phase, role) == flops(symbolic, kind, phase, role), (role, phase, kind)
        assert flops(symbolic, OpKind.GEMM, Phase.FORWARD, role) > 0


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_messages_are_equal(mode):
    differs = MODES[mode].differs
    for role in range(len(both(mode)[1].rank_classes)):
        traced, symbolic = (messages(program, role) for program in both(mode))
        if "rings" in differs:
            assert bytes_of(traced, "ALL_TO_ALL") > 0
            symbolic = Counter({("ALL_TO_ALL" if k[0] == "SEND" else k[0], *k[1:]): n for k, n in symbolic.items()})
        if "buffers" in differs:
            turned = SIZES["dim"] // SIZES["n_heads"] // 2
            assert traced.pop(("BROADCAST", 8, 1, 8.0 * SEQ * turned)) == 1
        if "buckets" in differs:
            assert bytes_of(traced, "ALL_REDUCE") == pytest.approx(bytes_of(symbolic, "ALL_REDUCE"), rel=1e-12)
            traced, symbolic = ({k: n for k, n in one.items() if k[0] != "ALL_REDUCE"} for one in (traced, symbolic))
        assert traced == symbolic, role


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_peaks_are_equal(mode):
    traced, symbolic = (profile(program) for program in both(mode))
    for one, other in zip(traced, symbolic, strict=True):
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=MEMORY_TOLERANCE)


@pytest.mark.long
def test_the_documentation_tells_the_differences():
    text = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text(encoding="utf-8")
    section = text.partition("## Agreement with the symbolic path")[2].partition("\n## ")[0]
    assert all(f"| {name} |" in section for name in MODES)
    assert all(f"* **{name}**: {why}" in section for name, why in DIFFERENCES.items())


if __name__ == "__main__":
    print(table())
