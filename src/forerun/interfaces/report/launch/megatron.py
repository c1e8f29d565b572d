"""Megatron-LM: a shell script with the arguments of pretrain_gpt.py.

Source of the names: NVIDIA/Megatron-LM core r0.16, megatron/training/arguments.py and the configuration classes of
megatron/core, whose fields are arguments.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from forerun.describe.kernels.attention import names_in
from forerun.describe.stacks.catalog import load_stack
from forerun.interfaces.report.launch.megatron_model import model_arguments
from forerun.interfaces.report.launch.torchrun import script
from forerun.sources.symbolic.schedule import layers_of_stages

if TYPE_CHECKING:
    from forerun.interfaces.report.launch.translation import Launch, Translation

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FP8_RECIPES = {"delayed": "delayed", "none": "delayed", "tensorwise": "tensorwise"}


def megatron(t: Translation) -> Launch:
    """Returns the files of Megatron-LM (core 0.16). Raises ForerunError for a plan or model that it would train
    differently."""
    groups = {
        "MODEL": model_arguments(t),
        "BATCH": _batch(t),
        "PARALLEL": _mesh(t) + _pipeline(t) + _data_parallel(t),
        "PRECISION": _precision(t),
        "MEMORY": _checkpointing(t) + _offload(t),
        "KERNELS": _kernels(t) + _optimizer(t),
    }
    t.stack()
    t.remark("data, learning rate, --train-iters and checkpoints are yours: launch.sh passes its own arguments on")
    arrays = [_array(name, arguments) for name, arguments in groups.items()]
    words = ['"${MEGATRON:?the folder of Megatron-LM}/pretrain_gpt.py"', *(f'"${{{name}[@]}}"' for name in groups)]
    return t.finish({"launch.sh": script(t, words, [*_environment(t), *arrays])})


def _array(name: str, arguments: list[str]) -> str:
    lines = [shlex.join(argument.split(" ")) for argument in arguments]
    return "\n    ".join([f"{name}=(", *lines]) + "\n)"


def _sharded(t: Translation) -> bool:
    """Returns whether Megatron-FSDP runs: gradients or parameters are sharded too."""
    return t.plan.shards_gradients


def _environment(t: Translation) -> list[str]:
    ordered = t.plan.tp * t.plan.cp > 1 and not _sharded(t)
    return ["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if ordered else ["unset CUDA_DEVICE_MAX_CONNECTIONS"]


def _batch(t: Translation) -> list[str]:
    t.give("n_microbatches")
    return [
        t.argument("seq_len"),
        t.argument("micro_batch"),
        f"--global-batch-size {t.plan.global_batch}",
    ]


def _mesh(t: Translation) -> list[str]:
    plan = t.plan
    lines = [
        t.argument("tp"),
        t.argument("pp"),
        t.argument("cp"),
    ]
    if plan.tp > 1:
        lines += [t.argument("sequence_parallel")] if t.give("sequence_parallel") else []
        t.implied_if(plan.loss_parallel, "loss_parallel", "Megatron-LM keeps the logits split over tp")
        lines += [t.argument("async_tp")] if t.give("async_tp") else []
    if plan.cp > 1:
        if plan.seq_len % (2 * plan.cp):
            t.refuse("seq_len", f"Megatron-LM needs a multiple of 2 x cp {plan.cp}")
        lines.append(t.argument("cp_method"))
    experts = t.argument("ep")
    if t.model.moe:
        lines += [experts, t.argument("etp")]
        lines += [t.argument("expert_overlap"), "--delay-wgrad-compute"] if t.give("expert_overlap") else []
        lines += [t.argument("shared_expert_overlap")] if t.give("shared_expert_overlap") else []
        if plan.tp > 1 and not plan.sequence_parallel:
            t.refuse("sequence_parallel", "Megatron-LM trains experts under tp only with it")
    return lines


def _pipeline(t: Translation) -> list[str]:
    plan = t.plan
    if plan.pp == 1:
        return []
    t.word("pp_schedule")
    virtual = t.give("virtual_stages")
    t.give("layers_per_stage")
    t.give("balance_ends")
    places = []
    if t.open("mesh_order") and t.places_as(t.own.constants["pipeline_inside"]):
        t.give("mesh_order")
        places = ["--use-tp-pp-dp-mapping"]
    layers = layers_of_stages(t.model.n_layers, plan)
    if len(set(layers)) > 1:
        stages = [f"t*{count}" if count else "" for count in layers]
        stages[0], stages[-1] = f"E{',' if stages[0] else ''}{stages[0]}", f"{stages[-1]}{',' if stages[-1] else ''}L"
        return [*places, f"--pipeline-model-parallel-layout {'|'.join(stages)}"]
    return [*places, t.argument("virtual_stages")] if virtual > 1 else places


def _data_parallel(t: Translation) -> list[str]:
    plan = t.plan
    replicas, stage = t.give("dp_replicate"), t.give("zero_stage")
    t.give("dp_shard")
    lines: list[str] = []
    if plan.optimizer == "muon":
        _without_distributed_optimizer(t)
    elif t.give("overlap_grad_reduce") and plan.dp * plan.cp > 1:
        lines.append(t.argument("overlap_grad_reduce"))
    if plan.fsdp > 1 and stage > 0 and plan.optimizer != "muon":
        lines.append("--use-distributed-optimizer")
        lines += ["--overlap-param-gather"] if plan.overlap_grad_reduce else []
        lines += [f"--num-distributed-optimizer-instances {replicas}"] if replicas > 1 else []
    if _sharded(t):
        strategy = {2: "optim_grads", 3: "optim_grads_params"}[stage]
        lines += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}"]
        lines += ["--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor"]
        if plan.reshard_after_forward != "default" and t.open("reshard_after_forward"):
            t.note("reshard_after_forward", "Megatron-FSDP frees unsharded parameters after each use")
        t.implied_if(plan.prefetch == 1, "prefetch", "see --suggested-communication-unit-size")
    t.implied("reshard_after_forward", "prefetch")
    if t.give("ddp_bucket_mib"):
        size = round(plan.ddp_bucket_mib * 2**20 / _BYTES[_gradient_dtype(t)])
        lines.append(f"--ddp-bucket-size {size}")
    return lines


def _gradient_dtype(t: Translation) -> str:
    """Returns the one dtype in which gradients add up and are reduced: fp32, unless that of the training is asked
    for."""
    plan = t.plan
    asked = {getattr(plan, name) for name in ("reduce_dtype", "accumulate_dtype") if t.open(name)} - {"auto"}
    narrow = {"fp16": "fp16", "fp32": "fp32", "tf32": "fp32"}.get(plan.precision, "bf16")
    if len(asked) > 1 or not asked <= {"fp32", narrow}:
        t.refuse("reduce_dtype", f"Megatron-LM adds gradients up and reduces them in one dtype, fp32 or {narrow}")
    return str(asked.pop()) if asked else "fp32"


def _precision(t: Translation) -> list[str]:
    plan = t.plan
    if t.give("master_dtype") != "fp32":
        t.refuse("master_dtype", "Megatron-LM keeps master weights in fp32")
    dtype = _gradient_dtype(t)
    t.give("reduce_dtype")
    t.give("accumulate_dtype")
    lines = {"fp16": ["--fp16"], "fp32": [], "tf32": []}.get(t.give("precision"), ["--bf16"])
    lines += {"bf16": ["--grad-reduce-in-bf16"], "fp16": []}.get(dtype, ["--accumulate-allreduce-grads-in-fp32"])
    if plan.precision == "tf32":
        t.remark("precision tf32: set NVIDIA_TF32_OVERRIDE=1, or allow TF32 in PyTorch")
    if plan.precision == "fp8":
        recipe = t.give("fp8_recipe")
        if recipe not in _FP8_RECIPES:
            t.refuse("fp8_recipe", "Megatron-LM scales fp8 tensorwise or delayed")
        if recipe == "none":
            t.remark("fp8_recipe none: delayed is written")
        lines += ["--fp8-format hybrid", f"--fp8-recipe {_FP8_RECIPES[recipe]}"]
    elif plan.precision in ("mxfp8", "nvfp4"):
        t.scaled_in_blocks()
    else:
        t.implied("fp8_recipe")
    if plan.precision == "mxfp8":
        lines += ["--fp8-format e4m3", "--fp8-recipe mxfp8"]
    elif plan.precision == "nvfp4":
        lines += ["--fp4-format e2m1", "--fp4-recipe nvfp4"]
    return lines + _low_precision_gather(t)


def _low_precision_gather(t: Translation) -> list[str]:
    plan = t.plan
    if not plan.fp8_all_gather:
        t.implied("fp8_all_gather")
        return []
    if plan.precision == "nvfp4" or not plan.shards_optimizer:
        t.note("fp8_all_gather", "Megatron-LM gathers fp8 parameters with its distributed optimizer only")
        return []
    return [t.argument("fp8_all_gather")]


def _checkpointing(t: Translation) -> list[str]:
    plan = t.plan
    mode, every = t.give("activation_checkpointing"), plan.checkpoint_every
    if mode == "full" and every > 1:
        layers = max(1, max(layers_of_stages(t.model.n_layers, plan)) // every)
        t.note("checkpoint_every", f"Megatron-LM recomputes the first {layers} layers of a stage instead")
        return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {layers}"]
    t.implied_if(every == 1 or mode == "none", "checkpoint_every", "Megatron-LM recomputes in every layer")
    if mode == "full":
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if mode == "none":
        return []
    return _selective(t)


def _selective(t: Translation) -> list[str]:
    policy, same = t.plan.selective_policy, t.own.constants["recompute_modules"]
    if t.plan.recompute_modules:
        modules = t.give("recompute_modules")
    elif policy in same:
        t.give("selective_policy")
        modules = tuple(same[policy])
    elif policy == "mlp-act-norm":
        grouped = ("moe_act",) if t.model.moe else ()
        modules = ("layernorm", *grouped)
        t.note("selective_policy", f"Megatron-LM recomputes {' and '.join(modules)}")
    elif policy == "params":
        t.note("selective_policy", "Megatron-LM keeps activations; nothing is recomputed")
        return []
    else:
        modules = ("core_attn",)
        t.note("selective_policy", "Megatron-LM recomputes the attention core (core_attn), which it is closest to")
    return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]


def _offload(t: Translation) -> list[str]:
    plan, lines = t.plan, list[str]()
    if plan.offload == "optimizer" and plan.fsdp > 1 and plan.zero_stage == 1:
        t.give("offload")
        lines += ["--offload-optimizer-states"]
    else:
        t.implied_if(plan.offload == "none", "offload", "Megatron-LM offloads the optimizer's state at zero_stage 1")
    layers = round(plan.activation_offload * t.model.n_layers)
    if not plan.activation_offload:
        t.implied("activation_offload")
    elif plan.pp == 1 and plan.activation_checkpointing == "none" and 0 < layers < t.model.n_layers:
        t.give("activation_offload")
        t.remark(f"activation_offload {plan.activation_offload}: of whole layers, {layers}")
        lines.append(f"--cpu-offloading-num-layers {layers}")
    else:
        t.note("activation_offload", "Megatron-LM offloads some layers of one stage without recomputation; none here")
    return lines


def _kernels(t: Translation) -> list[str]:
    plan, lines = t.plan, list(load_stack(t.plan.stack).launch_arguments)
    t.implied_if(not plan.compile, "compile", "Megatron-LM has fused kernels in place of torch.compile")
    t.implied_if(plan.compile_model, "compile_model", "Megatron-LM has no torch.compile of layers")
    t.implied_if(plan.compile_loss, "compile_loss", "the loss is a fused kernel")
    if plan.cuda_graphs and t.model.moe:
        t.note("cuda_graphs", "Megatron-LM captures no layers whose experts take as many tokens as are routed to them")
    else:
        lines += ["--cuda-graph-impl local"] if t.give("cuda_graphs") else []
    kernel = t.give("attention")
    backend = names_in("megatron-lm").get(kernel)
    if backend:
        lines.append(f"--attention-backend {backend}")
        if backend == "flash":
            t.remark(f"attention {kernel}: Transformer Engine runs the newest FlashAttention that is installed")
    elif kernel != "auto":
        t.note("attention", "Transformer Engine chooses among FlashAttention and cuDNN")
    return lines


def _without_distributed_optimizer(t: Translation) -> None:
    """Records that --optimizer dist_muon shares whole matrices out, and takes no option of the distributed optimizer
    (r0.16, validate_args)."""
    if t.plan.shards_optimizer and t.plan.zero_stage > 1:
        t.refuse("zero_stage", "Megatron-LM shares out the matrices of Muon, not parameters or gradients; use 0 or 1")
    text = "Megatron-LM reduces gradients for Muon after the backward pass, by all-reduce"
    t.implied_if(not t.plan.overlap_grad_reduce, "overlap_grad_reduce", text)


def _optimizer(t: Translation) -> list[str]:
    plan = t.plan
    word, name = t.word("optimizer"), plan.optimizer
    t.implied_if(plan.optimizer_impl == "fused", "optimizer_impl", "Megatron-LM runs a fused, multi-tensor optimizer")
    if name == "muon":
        return [f"--optimizer {word if plan.shards_optimizer else 'muon'}", "--muon-tp-mode blockwise"]
    return [f"--optimizer {word}"] + ["--weight-decay 0.0"] * (name == "adam")
