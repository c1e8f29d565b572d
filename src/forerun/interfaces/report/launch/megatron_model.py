"""An architecture as arguments of Megatron-LM's pretrain_gpt.py.

Source of the names: NVIDIA/Megatron-LM core r0.16, megatron/training/arguments.py and
megatron/core/transformer/transformer_config.py (whose fields are arguments).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.describe.kernels.dispatchers import AUTO
from forerun.describe.plan.rules import drops_attention, drops_hidden
from forerun.describe.stacks.catalog import load_stack
from forerun.interfaces.report.launch.special_parts import special_parts

if TYPE_CHECKING:
    from forerun.describe.model.spec import MoESpec
    from forerun.interfaces.report.launch.translation import Translation


def model_arguments(t: Translation) -> list[str]:
    """Returns arguments, each with its value. Raises ForerunError for an architecture that pretrain_gpt.py can't
    build."""
    _refuse(t)
    model, stack = t.model, load_stack(t.plan.stack)
    length = max(t.plan.seq_len, model.max_positions)
    position = {"rope": "rope", "learned": "learned_absolute", "none": "none"}[model.position]
    lines = [
        t.size("n_layers", model.n_layers),
        t.size("hidden", model.hidden),
        t.size("ffn_hidden", model.ffn_hidden),
        t.size("n_heads", model.n_heads),
        f"--max-position-embeddings {length}",
        f"--position-embedding-type {position}",
        f"--normalization {'RMSNorm' if model.norm == 'rmsnorm' else 'LayerNorm'}",
        f"--attention-dropout {0.1 if drops_attention(model, stack) else 0.0}",
        f"--hidden-dropout {0.1 if drops_hidden(model, stack) else 0.0}",
        "--tokenizer-type NullTokenizer",
        t.size("vocab", model.vocab),
    ]
    multiple = t.own.constants["vocabulary_multiple"]
    if model.vocab % (multiple * t.plan.tp):
        t.remark(f"vocabulary {model.vocab}: Megatron-LM pads it to a multiple of {multiple} x tp")
    if model.position == "rope" and model.rope_theta:
        lines.append(f"--rotary-base {model.rope_theta:.0f}")
    elif model.position == "rope":
        t.remark("rotary base: Megatron-LM's 10000, as the model has none here; see --rotary-base")
    lines += ["--swiglu"] if model.mlp == "swiglu" else []
    lines += [] if model.tied_embeddings else ["--untie-embeddings-and-output-weights"]
    lines += [f"--mtp-num-layers {model.mtp_modules}"] if model.mtp_modules else []
    lines += _biases(t) + _attention(t)
    return lines + (_experts(t, model.moe) if model.moe else [])


def _refuse(t: Translation) -> None:
    model = t.model
    reasons = [
        (model.n_heads == 0, "stack without attention"),
        (model.mlp not in ("swiglu", "gelu"), f"{model.mlp} feed-forward (swiglu or gelu)"),
        (model.position in ("alibi", "sinusoidal"), f"{model.position} positions (rope, learned or none)"),
        (not model.causal, "attention without a causal mask (pretrain_bert.py has)"),
        (model.norm == "layernorm" and not model.norm_bias, "LayerNorm without a bias"),
        (not (model.block_norms and model.final_norm), "layers without norms"),
        (model.head_bias, "bias on the output layer"),
        (
            bool(model.embedding_norm or model.token_types or model.pooler or model.head_transform),
            "norms or heads of BERT",
        ),
        *special_parts(model),
    ]
    for wrong, what in reasons:
        if wrong:
            t.refuse_model(f"Megatron-LM's pretrain_gpt.py has no {what}")


def _biases(t: Translation) -> list[str]:
    model = t.model
    biases = (model.qkv_bias, model.out_bias, model.mlp_bias)
    if all(biases):
        return []
    if model.out_bias or model.mlp_bias:
        t.refuse_model("Megatron-LM has biases on all linear layers, on queries, keys and values alone, or on none")
    return ["--disable-bias-linear", *(["--add-qkv-bias"] if model.qkv_bias else [])]


def _attention(t: Translation) -> list[str]:
    model = t.model
    lines = ["--qk-layernorm"] if model.qk_norm else []
    if model.sliding_window is not None:
        lines.append(f"--window-size {model.sliding_window},0")
    if model.mla is None:
        lines.append(t.size("head_dim", model.head_dim))
        if model.n_kv_heads != model.n_heads:
            lines += ["--group-query-attention", t.size("n_kv_heads", model.n_kv_heads)]
        return lines
    ranks = [] if model.mla.q_lora_rank is None else [t.size("mla.q_lora_rank", model.mla.q_lora_rank)]
    return [
        *lines,
        "--multi-latent-attention",
        *ranks,
        t.size("mla.kv_lora_rank", model.mla.kv_lora_rank),
        t.size("mla.qk_nope_dim", model.mla.qk_nope_dim),
        t.size("mla.qk_rope_dim", model.mla.qk_rope_dim),
        t.size("mla.v_head_dim", model.mla.v_head_dim),
    ]


def _dispatcher(t: Translation) -> list[str]:
    name = t.give("dispatcher")
    if name in ("deepep", "hybridep"):
        return ["--moe-token-dispatcher-type flex", f"--moe-flex-dispatcher-backend {name}"]
    if name not in (AUTO, "alltoall", "allgather"):
        t.refuse("dispatcher", "Megatron-LM has alltoall, allgather, deepep and hybridep")
    return [f"--moe-token-dispatcher-type {'alltoall' if name == AUTO else name}"]


def _experts(t: Translation, moe: MoESpec) -> list[str]:
    lines = [
        t.size("moe.n_experts", moe.n_experts),
        t.size("moe.top_k", moe.top_k),
        t.size("moe.expert_ffn", moe.expert_ffn),
        "--moe-grouped-gemm",
        *_dispatcher(t),
    ]
    if moe.n_dense_layers:
        lines.append(f"--moe-layer-freq [0]*{moe.n_dense_layers}+[1]*{t.model.n_layers - moe.n_dense_layers}")
    if moe.shared_ffn:
        lines.append(t.size("moe.shared_ffn", moe.shared_ffn))
        lines += ["--moe-shared-expert-gate"] if moe.shared_gate else []
    if moe.router_bias:
        lines += ["--moe-router-score-function sigmoid", "--moe-router-enable-expert-bias"]
    if moe.n_groups > 1:
        lines += [t.size("moe.n_groups", moe.n_groups), t.size("moe.top_groups", moe.top_groups)]
    if moe.capacity_factor is not None:
        lines += [f"--moe-expert-capacity-factor {moe.capacity_factor}", "--moe-pad-expert-input-to-capacity"]
    t.remark("router: losses that balance experts and groups of experts are not in the model here; add Megatron-LM's")
    return lines
