"""Every mode of training on every model: what is traced, and why the rest is not. Tests and docs/tracing.md read it.

`python tests/sources/trace/mode_table.py` prints the table.
"""

import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from models_plain import ResNet
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from forerun.core.memory.profile import profile
from forerun.core.program.counts import op_counts
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Collective, Phase
from forerun.describe.plan.plan import Plan
from forerun.sources.trace.module import trace_module

# Traced processes are forks: what is imported here they don't import again.
for _name in ("two_functions", "parallelize.module_program", "parallelize.pipeline", "compiled.backend"):
    import_module(f"forerun.sources.trace.inside.{_name}")
for _name in ("torch.distributed.tensor.experimental._attention", "torch.distributed.fsdp", "torchao.float8"):
    import_module(_name)

_FILE = Path(__file__).parents[3] / "examples" / "llama" / "model.py"
_SPEC = importlib.util.spec_from_file_location("llama_of_table", _FILE)
llama = importlib.util.module_from_spec(_SPEC)
sys.modules["llama_of_table"] = llama
_SPEC.loader.exec_module(llama)

SEQ, BATCH, IMAGES = 256, 2, 16
WIDTH, WORDS = 128, 1024
SIZES = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 256}
TEXT = {**SIZES, "vocab_size": WORDS, "use_cache": False}
DROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Model:
    make: object
    """number of layers -> module"""
    images: bool = False
    tp_plan: dict | None = None

    def inputs(self):
        if self.images:
            return torch.empty(IMAGES, 3, 64, 64, device="meta")
        return torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")


def own_llama(layers, **more):
    sizes = {"dim": WIDTH, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 256, "vocab_size": WORDS, "seq_len": SEQ}
    return llama.Llama(llama.LlamaConfig(n_layers=layers, **sizes, **more))


def gpt2(layers):
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": 4, "vocab_size": WORDS, "n_positions": SEQ}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropped))


def deepseek(layers):
    heads = {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    ranks = {"kv_lora_rank": 32, "q_lora_rank": 48, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
    groups = {"n_group": 2, "topk_group": 1, "num_hidden_layers": layers}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**TEXT, **heads, **ranks, **experts, **groups))


def qwen3(layers):
    heads = {"num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": layers}
    return Qwen3ForCausalLM(Qwen3Config(**TEXT, **heads))


def mixtral(layers):
    more = {"num_key_value_heads": 2, "num_local_experts": 4, "num_hidden_layers": layers}
    return MixtralForCausalLM(MixtralConfig(**TEXT, **more))


def bert(layers):
    return BertForMaskedLM(BertConfig(**SIZES, **DROPPED, vocab_size=WORDS, num_hidden_layers=layers))


def vit(layers):
    more = {"image_size": 64, "patch_size": 8, "num_labels": 16, "num_hidden_layers": layers}
    return ViTForImageClassification(ViTConfig(**SIZES, **DROPPED, **more))


def split(attention, queries, into, rest):
    """A plan of tensor parallelism: paths of the attention, of its projections in and out, and of the other layers."""
    ins = {f"{attention}.{name}": "colwise" for name in queries}
    return ins | {into: "colwise"} | dict.fromkeys(rest, "rowwise")


_BERT, _VIT = "bert.encoder.layer.*", "vit.layers.*"
BERT_TP = split(
    f"{_BERT}.attention.self",
    ("query", "key", "value"),
    f"{_BERT}.intermediate.dense",
    (f"{_BERT}.attention.output.dense", f"{_BERT}.output.dense"),
)
VIT_TP = split(
    f"{_VIT}.attention",
    ("q_proj", "k_proj", "v_proj"),
    f"{_VIT}.mlp.fc1",
    (f"{_VIT}.attention.o_proj", f"{_VIT}.mlp.fc2"),
)
MODELS = {
    "Llama": Model(own_llama),
    "Llama, experts": Model(lambda layers: own_llama(layers, n_experts=4)),
    "ResNet-50": Model(lambda layers: ResNet((1,) * layers), images=True),
    "BERT": Model(bert, tp_plan=BERT_TP),
    "ViT": Model(vit, images=True, tp_plan=VIT_TP),
    "GPT-2": Model(gpt2),
    "Qwen3": Model(qwen3),
    "Mixtral": Model(mixtral),
    "DeepSeek-V3": Model(deepseek),
}

GATHERS, SCATTERS, REDUCES = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
EXCHANGES, SENDS = Collective.ALL_TO_ALL, Collective.SEND_RECV


@dataclass(frozen=True)
class Mode:
    """One trace, and the columns of the table that it fills."""

    columns: tuple[str, ...]
    plan: dict
    kinds: tuple[Collective, ...] = ()
    """collectives that there must be; SEND_RECV for transfers between stages"""
    layers: int = 2
    only: str = ""
    """the one model that it is tried on"""


BF16 = {"master_dtype": "bf16"}  # without FSDP2; else autocast would be in every column
STAGES = {"pp": 2, "n_microbatches": 2, **BF16}
SHARDED = {"dp_shard": 2}
SHARDS = (GATHERS, SCATTERS, REDUCES)
MESH_3D = {**SHARDED, "tp": 2, "pp": 2, "n_microbatches": 2}


def stages(column, schedule, virtual=1):
    plan = {**STAGES, "pp_schedule": schedule, "virtual_stages": virtual}
    return Mode((column,), plan, (SENDS,), layers=4)


MODES = {
    one.columns[0]: one
    for one in (
        Mode(("single GPU",), BF16),
        Mode(("DDP", "autocast"), {"dp_replicate": 2, "zero_stage": 0}, (REDUCES,)),
        Mode(("FSDP2", "accumulation", "clipping"), {**SHARDED, "n_microbatches": 2}, SHARDS),
        Mode(("HSDP", "full AC"), {"dp_replicate": 2, **SHARDED, "activation_checkpointing": "full"}, SHARDS),
        Mode(("TP", "SP"), {"tp": 2, **BF16}, (REDUCES,)),
        stages("GPipe", "GPipe"),
        stages("1F1B", "1F1B"),
        stages("interleaved", "Interleaved1F1B", 2),
        stages("ZB1P", "ZB1P"),
        stages("ZBV", "ZBV", 2),
        Mode(("CP ring",), {"cp": 2}, (EXCHANGES, *SHARDS)),
        Mode(("CP all-gather",), {"cp": 2, "cp_method": "allgather"}, (EXCHANGES, *SHARDS)),
        Mode(("EP",), {**SHARDED, "ep": 2}, (EXCHANGES, *SHARDS)),
        Mode(("2-D",), {**SHARDED, "tp": 2}, SHARDS),
        Mode(("3-D",), MESH_3D, (SENDS, *SHARDS), layers=4),
        Mode(("4-D",), {**MESH_3D, "cp": 2}, (SENDS, EXCHANGES, *SHARDS), layers=4, only="Llama"),
        Mode(("5-D",), {**MESH_3D, "cp": 2, "dp_replicate": 2}, (SENDS, EXCHANGES, *SHARDS), layers=4, only="Llama"),
        Mode(("selective AC",), {**SHARDED, "activation_checkpointing": "selective"}, SHARDS),
        Mode(("offload",), {**SHARDED, "offload": "params"}, (GATHERS, SCATTERS)),
        Mode(("fp8",), {"precision": "fp8", "fp8_recipe": "tensorwise"}),
        Mode(("compile",), {**SHARDED, "compile": True}, SHARDS),
    )
}

_NO_EXPERTS = (r"no module with stacked experts", "it has no experts")
_OWN_EXPERTS = (r"no module with stacked experts", "its experts are called with the routing, not as experts(x, counts)")
_NO_SEQUENCE = (r"no input has seq_len", "images have no sequence")
_NO_TP_PLAN = (r"has no tp_plan and no module named as in Llama", "convolutions have no tensor-parallel style")
_CONV1D = (r"has no tp_plan and no module named as in Llama", "its Conv1D layers fit no tensor-parallel style")
_FORWARD = (r"fails in stage \d", "its forward does more than call its parts in turn; cut it by hand")
_UNMASKED = (r"Load balancing requires `is_causal=True`", "PyTorch balances causal attention only")
_CHANGED = (r"has been mutated", "its router changes top-k weights in place that the policy saves; PyTorch refuses")
REASONS: dict[tuple[str, str], tuple[str, str]] = {}
"""(model, mode) -> the error, and what the table says of it"""
PIPELINES = ("GPipe", "1F1B", "interleaved", "ZB1P", "ZBV")


def refused(model, modes, reason):
    REASONS.update({(model, mode): reason for mode in modes})


for _model in ("Llama", "ResNet-50", "BERT", "ViT", "GPT-2", "Qwen3"):
    refused(_model, ("EP",), _NO_EXPERTS)
for _model in ("Mixtral", "DeepSeek-V3"):
    refused(_model, ("EP",), _OWN_EXPERTS)
for _model in ("ResNet-50", "ViT"):
    refused(_model, ("CP ring", "CP all-gather"), _NO_SEQUENCE)
refused("BERT", ("CP ring", "CP all-gather"), _UNMASKED)
refused("ResNet-50", ("TP", "2-D", "3-D"), _NO_TP_PLAN)
refused("GPT-2", ("TP", "2-D", "3-D"), _CONV1D)
for _model in ("BERT", "ViT"):
    refused(_model, (*PIPELINES, "3-D"), _FORWARD)
refused("GPT-2", PIPELINES, _FORWARD)

refused("Mixtral", ("selective AC",), _CHANGED)

PARTS = {
    ("BERT", "TP"): "embedding and head stay whole",
    ("ViT", "TP"): "embedding and head stay whole",
    ("Mixtral", "TP"): "experts stay whole",
    ("DeepSeek-V3", "TP"): "experts and latent projections stay whole",
}
"""what tensor parallelism leaves whole"""
SEQUENCE_PARALLEL = ("Llama", "Llama, experts")
_NO_SP = "its tensor-parallel plan does not shard the sequence"


def plan_of(mode):
    return Plan(**{"seq_len": SEQ, "micro_batch": BATCH, **MODES[mode].plan})


@cache
def traced(model, mode, layers=0):
    """The Program of one cell. Raises ForerunError where it is refused."""
    what, depth = MODELS[model], layers or MODES[mode].layers
    plan = plan_of(mode)
    return trace_module(lambda: what.make(depth), what.inputs(), plan, tp_plan=what.tp_plan, fold=False)


def work(program, phases=tuple(Phase)):
    """FLOPs of matrix products and attention of a step, of all stages."""
    ops = program.ops
    products = ops.flops * ((ops.kind == OpKind.GEMM) | (ops.kind == OpKind.ATTENTION))
    return float((op_counts(program, phases) * products).sum())


def kinds(program):
    """Collectives of a step; SEND_RECV stands for transfers."""
    ops = program.ops
    return {SENDS if k == OpKind.P2P else Collective(c) for k, c in zip(ops.kind, ops.collective, strict=True)} - {
        Collective.NONE
    }


def resident(program, category):
    return max(int(one.resident_bytes[category]) for one in program.rank_classes)


def peak(program):
    return max(one.peak_bytes for one in profile(program))


def table():
    """The table in Markdown: rows are columns of modes, as there are more of them than models."""
    lines = [f"| | {' | '.join(MODELS)} |", "|---" * (len(MODELS) + 1) + "|"]
    marks: dict[str, int] = {}
    for name, mode in MODES.items():
        for column in mode.columns:
            lines.append(f"| {column} | {' | '.join(_cell(model, name, column, marks) for model in MODELS)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for why, number in marks.items())])


def _cell(model, mode, column, marks):
    if MODES[mode].only not in ("", model):
        return "-"
    refusal = REASONS[model, mode][1] if (model, mode) in REASONS else None
    if refusal is None and column == "SP" and model not in SEQUENCE_PARALLEL:
        refusal = _NO_SP
    why = refusal or (PARTS.get((model, "TP")) if plan_of(mode).tp > 1 else None)
    if why is None:
        return "yes"
    number = marks.setdefault(why, len(marks) + 1)
    return f"{'no' if refusal else 'yes'} ({number})"


if __name__ == "__main__":
    print(table())
