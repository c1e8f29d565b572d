"""torchtitan 0.3: a Python module with one function that returns the trainer's configuration.

Models are made by the functions that build torchtitan's own flavors. Source of all names: torchtitan 0.3.0, models/*,
config/configs.py, trainer.py, distributed/activation_checkpoint.py, components/optimizer and components/quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forerun.describe.kernels.attention import names_in
from forerun.describe.plan.plan import FP8_PRECISIONS
from forerun.interfaces.report.launch.python_text import Call, Code, python_text
from forerun.interfaces.report.launch.torchrun import script
from forerun.interfaces.report.launch.torchtitan_model import Family, family_of, rope_theta, shared_experts
from forerun.interfaces.report.launch.torchtitan_settings import Settings, coarser_checkpointing, common_settings

if TYPE_CHECKING:
    from forerun.interfaces.report.launch.translation import Launch, Translation

MODULE, FUNCTION = "forerun_torchtitan", "planned"
_FAMILY = "torchtitan.models"
_LONG = 60
"""characters of imported names on one line"""


@dataclass
class _Source:
    """A module that is being written: names to import, by module."""

    names: dict[str, set[str]] = field(default_factory=dict)

    def use(self, module: str, name: str) -> str:
        """Returns `name`, imported from `module`."""
        self.names.setdefault(module, set()).add(name.partition(".")[0])
        return name

    def lines(self) -> list[str]:
        """Returns the import lines."""
        lines = []
        for module, names in sorted(self.names.items()):
            words = ", ".join(sorted(names))
            broken = "(\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"
            lines.append(f"from {module} import {words if len(words) < _LONG else broken}")
        return lines


def torchtitan_registry(t: Translation) -> Launch:
    """Returns the files of torchtitan 0.3. Raises ForerunError for a plan or model that it would train differently."""
    plan, source = t.plan, _Source()
    family = family_of(t)
    if family == "qwen3" and not t.model.qk_norm:
        t.refuse_model("torchtitan 0.3 has a head_dim of its own only with qk_norm")
    settings = common_settings(t, family, "lm_head")
    _parallelism(t, settings)
    replicated = plan.dp_replicate * plan.dp_shard > 1 and not plan.shards_optimizer
    if replicated:
        t.remark("replicas are FSDP2's with one shard each (torchtitan 0.3 has no DDP), which all-reduces unit by unit")
    t.remark("data, tokenizer, learning rate and checkpoints are torchtitan's defaults; set them in the function")
    command = ["-m torchtitan.train", f"--module {MODULE}", f"--config {FUNCTION}"]
    text = _module(t, family, settings, source)
    path = ['export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"']
    return t.finish({f"{MODULE}.py": text, "launch.sh": script(t, command, path)})


def _parallelism(t: Translation, settings: Settings) -> None:
    plan, parallelism = t.plan, settings["parallelism"]
    if plan.tp > 1:
        parallelism["enable_sequence_parallel"] = t.give("sequence_parallel")
        t.implied_if(plan.loss_parallel, "loss_parallel", "torchtitan 0.3 always keeps the logits split over tp")
        if plan.async_tp and not plan.compiles_layers:
            t.note("async_tp", "torchtitan overlaps tensor-parallel collectives only in compiled layers")
        elif t.give("async_tp"):
            settings["compile"]["enable_async_tensor_parallel"] = True
    if plan.cp > 1:
        t.implied_if(plan.cp_method == "allgather", "cp_method", "torchtitan 0.3 gathers keys and values")
    if plan.ep > 1 and plan.tp > 1:
        t.remark(f"ep {plan.ep}: torchtitan takes it from tp {plan.tp} first; predicted inside dp_shard x cp")
    graphs = plan.cuda_graphs and plan.pp == 1 and plan.ep == 1
    if plan.cuda_graphs and not graphs:
        t.note("cuda_graphs", "torchtitan captures no pipelines and no expert parallelism")
    else:
        t.give("cuda_graphs")
    settings["training"]["disable_cuda_graphs"] = not graphs


def _module(t: Translation, family: Family, settings: Settings, source: _Source) -> str:
    model = _model(t, family, source)
    converters = _converters(t, source)
    converted = [
        f"    for converter in {python_text(converters, 4)}:",
        "        model = converter.build().convert(model)",
    ]
    config = {
        "loss": Call(
            source.use("torchtitan.components.loss", "CrossEntropyLoss.Config"), {"global_vocab_size": t.model.vocab}
        ),
        "optimizer": _optimizer(t, source),
        "training": _section(source, "TrainingConfig", settings["training"]),
        "parallelism": _section(source, "ParallelismConfig", settings["parallelism"]),
        "activation_checkpoint": _checkpointing(t, source),
        "compile": _section(source, "CompileConfig", settings["compile"]),
    }
    registry = source.use(f"{_FAMILY}.{family}", "model_registry")
    trainer = source.use("torchtitan.trainer", "Trainer.Config")
    replace = source.use("dataclasses", "replace")
    body = [
        f"def {FUNCTION}() -> {trainer}:",
        f'    """{t.title}."""',
        f"    model = {python_text(model, 4)}",
        *(converted if converters else []),
        f'    spec = {replace}({registry}("debugmodel"), flavor="{FUNCTION}", model=model)',
        f"    return {python_text(Call(trainer, {'model_spec': Code('spec'), **config}), 4)}",
        "",
    ]
    head = [f'"""For torchtitan 0.3: --module {MODULE} --config {FUNCTION}."""', ""]
    return "\n".join([*head, *source.lines(), "", "", *body])


def _section(source: _Source, name: str, values: Mapping[str, Any]) -> Call:
    return Call(source.use("torchtitan.config", name), values)


def _optimizer(t: Translation, source: _Source) -> Call:
    group = Call(
        source.use("torchtitan.components.optimizer", "ParamGroupConfig"),
        {
            "pattern": ".*",
            "optimizer_name": t.word("optimizer"),
            "optimizer_kwargs": {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        },
    )
    return Call(
        source.use("torchtitan.components.optimizer", "OptimizersContainer.Config"),
        {"param_groups": [group], "implementation": t.word("optimizer_impl")},
    )


def _checkpointing(t: Translation, source: _Source) -> Call | None:
    mode = t.give("activation_checkpointing")
    policy = t.plan.selective_policy
    full = mode == "full"
    if mode == "selective" and policy != "op":
        coarser_checkpointing(t)
        full, mode = policy != "params", "none"
    elif mode == "selective":
        t.give("selective_policy")
    every = t.plan.checkpoint_every
    t.implied_if(every == 1, "checkpoint_every", "torchtitan 0.3 checkpoints every layer")
    if not full and mode == "none":
        return None
    name = "FullAC.Config" if full else "SelectiveAC.Config"
    return Call(source.use("torchtitan.distributed.activation_checkpoint", name), {})


def _converters(t: Translation, source: _Source) -> list[Call]:
    plan, module = t.plan, "torchtitan.components.quantization"
    if plan.precision not in FP8_PRECISIONS:
        t.implied("fp8_recipe", "fp8_all_gather")
        return []
    t.implied_if(not plan.fp8_all_gather, "fp8_all_gather", "torchtitan 0.3 gathers parameters in the mixed precision")
    arguments: dict[str, Any] = {"model_compile_enabled": plan.compiles_layers}
    if plan.precision == "fp8":
        if plan.fp8_recipe not in ("rowwise", "none"):
            t.refuse("fp8_recipe", "torchtitan 0.3 scales fp8 rowwise; its version 0.2 scales tensorwise too")
        if t.give("fp8_recipe") == "none":
            t.remark("fp8_recipe none: rowwise is written")
        arguments |= {"recipe_name": "rowwise", "filter_fqns": ["lm_head"]}
        return [Call(source.use(module, "Float8LinearConverter.Config"), arguments)]
    t.scaled_in_blocks()
    name = "MXFP8LinearConverter.Config" if plan.precision == "mxfp8" else "NVFP4LinearConverter.Config"
    return [Call(source.use(module, name), arguments | {"fqns": ["layers"]})]


def _attention(t: Translation) -> str:
    name = "flex" if t.plan.attention == "auto" else names_in("torchtitan").get(t.plan.attention)
    if name:
        t.give("attention")
        if name == "varlen":
            t.remark("attention varlen: torchtitan runs FlashAttention-3 on Hopper and 4 on Blackwell")
        return name
    t.note("attention", "torchtitan 0.3 has flex, and varlen (FlashAttention); flex is written")
    return "flex"


def _model(t: Translation, family: Family, source: _Source) -> Call:
    model, backend, home = t.model, _attention(t), f"{_FAMILY}.{family}"
    common = f"{_FAMILY}.common"
    layers: dict[str, Any] = {"n_layers": model.n_layers, "dim": model.hidden, "n_heads": model.n_heads}
    layers["attn_backend"] = backend
    theta = {"max_seq_len": t.plan.seq_len, "theta": rope_theta(t, family)}
    if family == "deepseek_v3":
        builder = "_build_dsv3_layers"
        layers |= _latent(t)
        rope = Call(source.use(common, "ComplexRoPE.Config"), {"dim": layers["qk_rope_head_dim"], **theta})
    else:
        layers["n_kv_heads"] = model.n_kv_heads
        kind = "ComplexRoPE.Config" if family == "llama3" else "CosSinRoPE.Config"
        rope = Call(source.use(common, kind), {"dim": model.head_dim, **theta})
        builder = _plain(t, family, layers)
    if model.moe:
        layers["moe_comm_backend"] = "standard"
    layers["rope"] = rope
    config = {"llama3": "Llama3Model", "qwen3": "Qwen3Model", "deepseek_v3": "DeepSeekV3Model"}[family] + ".Config"
    return Call(
        source.use(home, config),
        {"dim": model.hidden, "vocab_size": model.vocab, **_ends(t, family, source)}
        | {"layers": Call(source.use(home, builder), layers)},
    )


def _ends(t: Translation, family: Family, source: _Source) -> dict[str, Any]:
    """Returns embedding, last norm and head as the family's own flavors have them."""
    model, home, common = t.model, f"{_FAMILY}.{family}", f"{_FAMILY}.common"
    tied = {"enable_weight_tying": True} if model.tied_embeddings else {}
    embedding = Code(source.use(home, "_EMBEDDING_SKIP_INIT" if tied else "_EMBEDDING_INIT"))
    norm: Call | Code
    if family == "qwen3":
        norm = Code(f"{source.use(home, '_qwen3_norm')}({model.hidden})")
        head = Code(source.use(home, "_LINEAR_INIT"))
    else:
        head = Code(f"{source.use(home, '_output_linear_init')}({model.hidden})")
        init = Code(source.use(home, "_NORM_INIT"))
        norm = Call(source.use(common, "RMSNorm.Config"), {"normalized_shape": model.hidden, "param_init": init})
    return tied | {
        "tok_embeddings": Call(
            source.use(common, "Embedding.Config"),
            {"num_embeddings": model.vocab, "embedding_dim": model.hidden, "param_init": embedding},
        ),
        "norm": norm,
        "lm_head": Call(
            source.use(common, "Linear.Config"),
            {"in_features": model.hidden, "out_features": model.vocab, "param_init": head},
        ),
    }


def _plain(t: Translation, family: Family, layers: dict[str, Any]) -> str:
    """Returns the name of the function that builds the layers of llama3 or qwen3; adds its arguments to `layers`."""
    model = t.model
    if family == "llama3":
        layers["hidden_dim"] = model.ffn_hidden
        return "_build_llama3_layers"
    layers["head_dim"] = model.head_dim
    if model.moe is None:
        layers["hidden_dim"] = model.ffn_hidden
        return "_build_qwen3_layers"
    layers |= {"moe_hidden_dim": model.moe.expert_ffn, "num_experts": model.moe.n_experts, "top_k": model.moe.top_k}
    return "_build_qwen3_moe_layers"


def _latent(t: Translation) -> dict[str, Any]:
    model = t.model
    assert model.mla is not None
    assert model.moe is not None
    if not model.moe.shared_ffn:
        t.refuse_model("torchtitan 0.3's deepseek_v3 has shared experts")
    score = "sigmoid" if model.moe.router_bias else "softmax"
    t.remark(f"router: {score} scores; check groups and scale of the scores against the model's own")
    return {
        "n_dense_layers": model.moe.n_dense_layers,
        "q_lora_rank": model.mla.q_lora_rank or 0,
        "kv_lora_rank": model.mla.kv_lora_rank,
        "qk_nope_head_dim": model.mla.qk_nope_dim,
        "qk_rope_head_dim": model.mla.qk_rope_dim,
        "v_head_dim": model.mla.v_head_dim,
        "mscale": 1.0,
        "dense_hidden_dim": model.ffn_hidden,
        "moe_hidden_dim": model.moe.expert_ffn,
        "num_experts": model.moe.n_experts,
        "num_shared_experts": shared_experts(model),
        "router_top_k": model.moe.top_k,
        "router_score_func": score,
        "non_blocking_capacity_factor": None,
    }
