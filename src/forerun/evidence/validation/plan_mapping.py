"""Maps a measured row to its plan, one function for each concern, and notes every assumption."""

from __future__ import annotations

import re
from typing import Any

from forerun.common.errors import ForerunError
from forerun.describe.kernels.attention import kernel_in_words
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan import rules
from forerun.describe.plan.complete import complete_plan
from forerun.describe.plan.plan import FP8_PRECISIONS, V_SCHEDULES, Plan
from forerun.describe.stacks.catalog import UNKNOWN_STACK, load_stack
from forerun.evidence.validation import wording
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.wording import says

FULL_RECOMPUTE_SHARE = 1 / 3
"""FLOPs of recomputing every block over model FLOPs: one forward pass of three (backward counts as two)"""

CHUNKS = 8
"""parts of a chunked loss where the number is not stated: that of torchtune and torchtitan (loss.py of both)"""

USUAL_LORA_RANK = 16
"""rank of adapters that no words state: that of MLPerf's LoRA benchmark and of most examples of peft"""

NOT_STATED = "activation_checkpointing not stated: taken as none"
"""note of a row that doesn't state its checkpointing"""

Fields = dict[str, Any]


class Inexpressible(ForerunError):
    """Raised for a row that no plan, model or cluster can express; the message is the reason."""


def plan_of(row: Measurement, model: ModelSpec, notes: list[str]) -> Plan:
    """Returns the Plan of a row. Raises Inexpressible with the reason; appends each assumption to `notes`.

    It sets only the fields that the row states. The stack decides the others, as it does for every user.
    """
    named = wording.named_stack(row)
    stack = named or UNKNOWN_STACK
    if wording.undated(row, named):
        notes.append(f"version of {row.framework} not stated: taken as {stack}, the middle one of its generations")
    if named is None:
        notes.append(f"software {row.framework or 'not stated'}: taken as {stack}")
    fields = {"stack": stack, **stated_fields(row, model, notes)}
    batch = row.global_batch_seqs if fields.keys().isdisjoint(("micro_batch", "n_microbatches")) else None
    try:
        plan = complete_plan(fields, global_batch=batch)
    except ForerunError as error:
        raise Inexpressible(str(error)) from None
    if batch:
        notes.append(f"micro_batch not stated: taken as {plan.micro_batch}")
    if not _gradient_dtype(row):
        reduced = rules.reduce_dtype(plan, load_stack(stack))
        notes.append(f"grad_reduce_dtype not stated: taken as {reduced}, as {stack} reduces gradients")
    return plan


def stated_fields(row: Measurement, model: ModelSpec, notes: list[str]) -> Fields:
    """Returns the plan fields that the row states, without its stack. Raises Inexpressible; appends to `notes`."""
    mesh = _mesh(row, notes)
    fields: Fields = {"seq_len": _stated(row.seq_len, "seq_len"), **mesh}
    fields |= _batch(row, mesh, notes)
    fields |= _pipeline(row, model, mesh["pp"], notes)
    fields |= _tensor_and_context(row, notes)
    fields |= _precision(row, notes)
    fields |= _checkpointing(row, notes)
    fields |= _kernels(row, notes)
    fields |= _experts(row, model)
    fields |= _adapters(row, notes)
    return fields | _offload(row, model, notes)


def _stated(value: int | None, column: str) -> int:
    if not value:
        raise Inexpressible(f"{column} is not stated")
    return value


def _mesh(row: Measurement, notes: list[str]) -> Fields:
    """Returns the degrees of the mesh, and ZeRO stage and reshard policy of the shard axis."""
    mesh = {axis: getattr(row, axis) or 1 for axis in ("dp_replicate", "cp", "tp", "pp", "ep")}
    n_gpus = _stated(row.n_gpus, "n_gpus")
    known = mesh["dp_replicate"] * mesh["cp"] * mesh["tp"] * mesh["pp"]
    dp_shard = row.dp_shard or max(n_gpus // known, 1)
    if known * dp_shard != n_gpus:
        degrees = f"{mesh['dp_replicate']} x {dp_shard} x {mesh['cp']} x {mesh['tp']} x {mesh['pp']}"
        raise Inexpressible(
            f"dp_replicate x dp_shard x cp x tp x pp = {degrees} = {known * dp_shard}, but n_gpus is {n_gpus}"
        )
    zero_stage = row.zero_stage
    if zero_stage is None:
        zero_stage = 1 if dp_shard > 1 else 0
        notes.append(f"zero_stage not stated: taken as {zero_stage}")
    if zero_stage == 0 and dp_shard > 1:
        mesh["dp_replicate"], dp_shard = mesh["dp_replicate"] * dp_shard, 1
    around = dp_shard * mesh["cp"] * mesh["tp"]
    if around % mesh["ep"]:
        raise Inexpressible(f"ep {mesh['ep']} does not divide dp_shard x cp x tp = {around}")
    return {**mesh, "dp_shard": dp_shard, **_sharding(row, zero_stage)}


def _sharding(row: Measurement, zero_stage: int) -> Fields:
    """Returns ZeRO stage and reshard policy."""
    fields: Fields = {"zero_stage": zero_stage}
    stated = re.search(wording.RESHARD, row.notes, re.IGNORECASE)
    if stated:
        fields["reshard_after_forward"] = stated[1].lower()
    if says(row.ac_detail, wording.KEEPS_GATHERED):
        fields["reshard_after_forward"] = "never"
    if says(row.notes, wording.NO_GRADIENT_OVERLAP):
        fields["overlap_grad_reduce"] = False
    return fields


def _batch(row: Measurement, mesh: Fields, notes: list[str]) -> Fields:
    """Returns size and number of micro batches of a data-parallel rank; {} where only the global batch is stated."""
    dp = mesh["dp_replicate"] * mesh["dp_shard"]
    micro, count = row.micro_batch, row.n_microbatches
    if count is None and mesh["pp"] == 1:
        count = row.grad_accum
    if micro and count:
        _check_batch(row, micro * count * dp, micro * dp, notes)
        return {"micro_batch": micro, "n_microbatches": count}
    local = _local_batch(row, dp)
    if local is None:
        if not micro:
            raise Inexpressible("neither micro_batch nor global_batch_seqs is stated")
        notes.append("global_batch_seqs not stated: one micro batch per step")
        return {"micro_batch": micro, "n_microbatches": 1}
    if not micro and not count:
        return {}
    micro = micro or local // (count or 1)
    count = count or local // micro
    if micro * count != local:
        raise Inexpressible(f"{local} sequences per data-parallel rank do not split into micro batches of {micro}")
    if row.micro_batch is None:
        notes.append(f"micro_batch not stated: taken as {micro}")
    return {"micro_batch": micro, "n_microbatches": count}


def _local_batch(row: Measurement, dp: int) -> int | None:
    """Returns the sequences of one data-parallel rank in one step."""
    if not row.global_batch_seqs:
        return None
    if row.global_batch_seqs % dp:
        raise Inexpressible(f"global_batch_seqs {row.global_batch_seqs} is not a multiple of {dp} data-parallel ranks")
    return row.global_batch_seqs // dp


def _check_batch(row: Measurement, product: int, per_microbatch: int, notes: list[str]) -> None:
    """Raises Inexpressible where the stated global batch differs by more than a smaller last micro batch."""
    stated = row.global_batch_seqs
    if not stated or stated == product:
        return
    if not product - per_microbatch < stated < product:
        raise Inexpressible(
            f"micro_batch x n_microbatches x data-parallel ranks = {product}, but global_batch_seqs is {stated}"
        )
    notes.append(f"the last micro batch is smaller ({stated} of {product} sequences): taken as full")


def _pipeline(row: Measurement, model: ModelSpec, pp: int, notes: list[str]) -> Fields:
    """Returns the schedule, the stages of each rank and the layers of each stage."""
    if pp == 1:
        return {}
    stated = "" if row.pp_schedule.lower() == "none" else row.pp_schedule
    named = wording.first_match(wording.SCHEDULES, stated)
    if stated and named is None:
        raise Inexpressible(f"pp_schedule {row.pp_schedule!r} is not known")
    if named in V_SCHEDULES:
        return {"pp_schedule": named, "virtual_stages": 2, **_stages(row, model, 2 * pp, notes)}
    chunks = row.pp_virtual_stages or 0
    if named == "Interleaved1F1B" and not chunks:
        chunks = _usual_chunks(model.n_layers, pp)
        notes.append(f"pp_virtual_stages not stated: taken as {chunks}")
    elif not chunks:
        chunks = 1
        notes.append("pp_virtual_stages not stated: taken as 1")
    if not row.pp_schedule:
        notes.append("pp_schedule not stated: taken as 1F1B")
    if not row.pp_schedule and not row.pp_virtual_stages:
        return _stages(row, model, pp, notes)
    schedule = named if named in ("GPipe", "ZB1P") else "Interleaved1F1B" if chunks > 1 else "1F1B"
    return {"pp_schedule": schedule, "virtual_stages": chunks, **_stages(row, model, pp * chunks, notes)}


def _usual_chunks(n_layers: int, pp: int) -> int:
    """Returns the least number of chunks above one that splits the layers evenly, or 2."""
    for layers in (n_layers, n_layers + 2):
        if layers % pp == 0:
            return next((chunks for chunks in range(2, layers // pp + 1) if (layers // pp) % chunks == 0), 2)
    return 2


def _stages(row: Measurement, model: ModelSpec, stages: int, notes: list[str]) -> Fields:
    """Returns the distribution of layers over stages. It is the one that the source states. Otherwise embedding and
    head count as layers if only that makes the stages even.
    """
    layers = model.n_layers
    full = -(-layers // stages)
    last = layers - full * (stages - 1)
    if says(row.notes, wording.SHORT_LAST_STAGE) and last > 0:
        return {"layers_per_stage": (full,) * (stages - 1) + (last,)}
    if says(row.notes, wording.BALANCED_ENDS):
        return {"balance_ends": True}
    if layers % stages and (layers + 2) % stages == 0:
        notes.append("layers divide over the stages only with embedding and head counted as layers: taken so")
        return {"balance_ends": True}
    return {}


def _tensor_and_context(row: Measurement, notes: list[str]) -> Fields:
    """Returns the fields that say how tensor-parallel and context-parallel ranks share a sequence."""
    fields: Fields = {}
    if row.sp is not None:
        fields["sequence_parallel"] = row.sp
    elif (row.tp or 1) > 1:
        notes.append("sp not stated: taken as the stack's own")
    if row.async_tp is not None:
        fields["async_tp"] = row.async_tp
    if (row.cp or 1) > 1:
        method = wording.first_match(wording.CP_METHODS, row.notes)
        if method is not None:
            fields["cp_method"] = method
    return fields


def _precision(row: Measurement, notes: list[str]) -> Fields:
    """Returns the dtypes of products, reductions, gradient buffers and the weights that the optimizer updates."""
    precision = wording.PRECISIONS.get(row.precision.lower())
    if precision is None:
        known = ", ".join(wording.PRECISIONS)
        raise Inexpressible(f"precision {row.precision!r} is not known; known: {known}")
    fields: Fields = {"precision": precision}
    if row.param_dtype == "fp32" and precision not in ("fp32", "tf32") and (row.dp_shard or 1) > 1:
        notes.append("weights are gathered in fp32 and cast for each use: gathers taken in the compute dtype")
    if row.param_dtype == "fp32" and not row.zero_stage and (row.dp_shard or 1) == 1:
        fields["autocast"] = precision in ("bf16", "fp16")  # Nothing but autocast then casts weights.
    if says(row.notes, wording.NARROW_STATE) and row.param_dtype in ("bf16", "fp16"):
        fields |= {"master_dtype": row.param_dtype, "moment_dtype": row.param_dtype}
    reduced = _gradient_dtype(row)
    if reduced is not None:
        fields["reduce_dtype"] = reduced
    accumulated = wording.first_match(wording.ACCUMULATION, row.notes)
    if accumulated is not None:
        fields["accumulate_dtype"] = accumulated
    if precision in FP8_PRECISIONS:
        recipe = "mx" if precision != "fp8" else wording.first_match(wording.FP8_RECIPES, row.fp8_recipe)
        if recipe is None:
            recipe = "tensorwise"
            notes.append(f"fp8 scaling {row.fp8_recipe or 'not stated'}: taken as tensorwise")
        fields |= {"fp8_recipe": recipe, "fp8_all_gather": says(row.fp8_recipe, wording.FP8_ALL_GATHER)}
    return fields


def _gradient_dtype(row: Measurement) -> str | None:
    """Returns the stated dtype of gradient reduction."""
    stated = row.grad_reduce_dtype.lower()
    return stated if stated in ("fp32", "bf16", "fp16") else None


def _checkpointing(row: Measurement, notes: list[str]) -> Fields:
    """Returns the recomputation of the backward pass. A stated detail is more exact than the mode."""
    mode, detail = row.activation_checkpointing.lower(), row.ac_detail
    modules = re.search(wording.RECOMPUTED, detail, re.IGNORECASE)
    if modules:
        named = tuple(re.findall(r"[a-z_]+", modules[0].split(maxsplit=1)[1].lower()))
        return {"activation_checkpointing": "selective", "recompute_modules": named}
    if mode not in ("", "none", "full", "selective"):
        raise Inexpressible(f"activation_checkpointing {row.activation_checkpointing!r} is not known")
    for pattern, (level, policy) in wording.CHECKPOINTING:
        if says(detail, pattern):
            return {"activation_checkpointing": level, "selective_policy": policy}
    if mode == "selective":
        return _selective(row, detail, notes)
    if not mode:
        notes.append(NOT_STATED)
        return {}
    every = re.search(wording.EVERY_NTH_LAYER, detail, re.IGNORECASE)
    return {"activation_checkpointing": mode, "checkpoint_every": int(every[1]) if every else 1}


def _selective(row: Measurement, detail: str, notes: list[str]) -> Fields:
    every = re.search(wording.EVERY_NTH_LAYER, detail, re.IGNORECASE)
    if every:
        return {"activation_checkpointing": "full", "checkpoint_every": int(every[1])}
    if says(detail, wording.UNSTATED_FRACTION):
        return _recomputed_fraction(row, notes)
    notes.append("what selective checkpointing keeps is not stated: taken as the stack's own")
    return {"activation_checkpointing": "selective"}


def _recomputed_fraction(row: Measurement, notes: list[str]) -> Fields:
    """Returns the fields that recompute every n-th block; HFU / MFU gives n, as a forward pass is a third of the
    FLOPs."""
    every = 2
    if row.hfu_pct and row.mfu_pct and row.hfu_pct > row.mfu_pct:
        share = min((row.hfu_pct / row.mfu_pct - 1) / FULL_RECOMPUTE_SHARE, 1.0)
        every = max(round(1 / share), 1)
    notes.append(f"fraction of checkpointed blocks not stated: taken as one in {every}")
    return {"activation_checkpointing": "full", "checkpoint_every": every}


def _experts(row: Measurement, model: ModelSpec) -> Fields:
    """Returns the dispatcher of tokens to experts, and whether other passes hide the exchange."""
    if model.moe is None:
        return {}
    fields: Fields = {}
    dispatcher = wording.first_match(wording.DISPATCHERS, row.notes)
    if dispatcher is not None:
        fields["dispatcher"] = dispatcher
    if says(row.notes, wording.EXPERT_OVERLAP):
        fields["expert_overlap"] = True
    return fields


def _adapters(row: Measurement, notes: list[str]) -> Fields:
    """Returns the low-rank adapters that are trained where the row's words say LoRA or QLoRA."""
    words = "; ".join((row.framework, row.model, row.optimizer, row.notes))
    if not says(words, wording.LORA):
        return {}
    stated = re.search(wording.LORA_RANK, words, re.IGNORECASE)
    rank = int(stated[1] or stated[2]) if stated else USUAL_LORA_RANK
    if not stated:
        notes.append(f"rank of LoRA not stated: taken as {rank}")
    return {"lora_rank": rank, "frozen_dtype": "nf4" if says(words, wording.QLORA) else "wide"}


def _kernels(row: Measurement, notes: list[str]) -> Fields:
    """Returns compilation, attention kernel and optimizer."""
    compiled, fields = row.torch_compile.lower(), Fields()
    if compiled:
        fields |= {
            "compile": says(compiled, r"^(yes|aot)"),
            "compile_model": not says(compiled, wording.LOSS_ALONE),
            "compile_loss": not says(compiled, r"\(model\b"),
            "graph_breaks": compiled.startswith("yes") and says(row.ac_detail, wording.GRAPH_BREAKS),
            "cuda_graphs": says(compiled, r"cuda ?graphs"),
        }
    if says(row.notes, wording.CHUNKED_LOSS):
        fields["loss_chunks"] = CHUNKS
    attention = kernel_in_words(row.attention_kernel)
    if attention is not None:
        fields["attention"] = attention
    elif not says(row.attention_kernel, wording.NO_ATTENTION):
        notes.append(f"attention kernel {row.attention_kernel or 'not stated'}: taken as the stack's own")
    optimizer = wording.first_match(wording.OPTIMIZERS, row.optimizer)
    if optimizer is not None:
        fields["optimizer"] = optimizer
    else:
        notes.append(f"optimizer {row.optimizer or 'not stated'}: taken as adamw")
    kernels = wording.first_match(wording.OPTIMIZER_KERNELS, row.optimizer)
    if kernels in (None, "foreach") and says(compiled, wording.COMPILED_STEP):
        kernels = "fused"  # The compiler fuses the optimizer into one pass.
    return fields if kernels is None else fields | {"optimizer_impl": kernels}


def _offload(row: Measurement, model: ModelSpec, notes: list[str]) -> Fields:
    text = row.cpu_offload.lower()
    if text in ("", "none", "no"):
        return {}
    if says(text, r"^optimizer"):
        return {"offload": "optimizer"}
    if says(text, r"^param"):
        return {"offload": "params"}
    fraction = re.search(r"activations: fraction (\d*\.?\d+)", text)
    if fraction:
        return {"activation_offload": float(fraction[1])}
    layers = re.search(r"activations \((\d+)(?:-(\d+))? layers", text)
    if layers:
        count = (int(layers[1]) + int(layers[2] or layers[1])) / 2
        notes.append(f"activations of {count:g} of {model.n_layers} layers taken as offloaded")
        return {"activation_offload": min(count / model.n_layers, 1.0)}
    raise Inexpressible(f"cpu_offload {row.cpu_offload!r} is not known")
