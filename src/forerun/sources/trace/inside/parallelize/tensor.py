"""Tensor and sequence parallelism of a model by a plan of module names, through PyTorch's `parallelize_module`.

A plan maps patterns of module names ("layers.*.attention.wq") to styles: PyTorch's own `ParallelStyle`s, or the words
of Hugging Face's plans (colwise, rowwise, ...). It is the caller's, else the model's own, else the plan below, which
fits models whose parts have torchtitan's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan
from forerun.sources.trace.inside.parallelize.depth import PassThrough

Styles = Mapping[str, Any]
Note = Callable[[str], None]


class Gathered(ParallelStyle):
    """Gathers the first input, sharded over the sequence, once for everything that uses it inside the module."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first = inputs[0]
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, device_mesh, (Shard(1),), run_check=False)
            return (first.redistribute(placements=(Replicate(),)), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


class ReplicatedWeights(ParallelStyle):
    """Replicates weights whose module sees different tokens on each rank: their gradients are partial sums."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                if isinstance(weight, DTensor):
                    continue  # Expert parallelism has sharded this weight.
                shared = DTensor.from_local(weight, device_mesh, (Replicate(),), run_check=False)
                part.register_parameter(name, nn.Parameter(shared, weight.requires_grad))
        LocalWeights((Partial(),)).attach(module)
        return module


class LocalWeights:
    """Replaces a module's DTensor weights by their local parts while the module runs."""

    def __init__(self, grad_placements: Any = None) -> None:
        self.grad_placements = grad_placements

    def attach(self, module: nn.Module) -> None:
        """Replaces weights before each forward of `module` and restores them after it."""
        for part in module.modules():
            names = [name for name, _ in part.named_parameters(recurse=False)]
            if names and "_localised" not in vars(part):
                vars(part)["_localised"] = True
                part.register_forward_pre_hook(self._localise(names))
                part.register_forward_hook(self._restore(names), always_call=True)

    def _localise(self, names: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            for name in names:
                weight = module._parameters[name]
                if isinstance(weight, DTensor):
                    local = weight.to_local(grad_placements=self.grad_placements)
                    vars(module).setdefault("_whole_weights", {})[name] = weight
                    module._parameters[name] = local

        return hook

    def _restore(self, names: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any, _out: Any) -> None:
            for name, weight in vars(module).pop("_whole_weights", {}).items():
                module._parameters[name] = weight

        return hook


def tensor_parallel(model: nn.Module, mesh: Any, plan: Plan, given: Styles | None, note: Note) -> None:
    """Shards `model` over `mesh` by `given`, else by the model's own plan, else by the plan for Llama-like names.

    A key that matches no submodule is noted and skipped.

    Raises:
        ForerunError: there is no plan, nothing of it fits the model, or a style is unknown.
    """
    own = given is None
    styles = dict(given if given is not None else model_styles(model) or llama_styles(model, plan))
    if not styles:
        raise ForerunError(
            f"tp {plan.tp}: {type(model).__name__} has no tp_plan and no module named as in Llama; pass trace_module"
            ' tp_plan={"layers.*.attention.wq": ColwiseParallel(), ...}'
        )
    matches = 0
    for key, style in styles.items():
        found = matching(model, key)
        matches += len(found)
        if not found and not _names_a_parameter(model, key):
            note(f"tp_plan: {key!r} matches no submodule of {type(model).__name__}; skipped")
            continue
        made = style_of(key, style, plan, is_head=own and _is_head(model, key), note=note)
        if made is not None:
            for module in found:
                if not isinstance(module, PassThrough):
                    parallelize_module(module, mesh, made)
    if not matches:
        raise ForerunError(f"tp_plan: none of its {len(styles)} keys matches a submodule of {type(model).__name__}")


def matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Returns the submodules whose path matches `pattern` word by word."""
    words = pattern.split(".")
    found = []
    for path, module in model.named_modules():
        parts = path.split(".")
        if len(parts) == len(words) and all(fnmatchcase(p, w) for p, w in zip(parts, words, strict=True)):
            found.append(module)
    return found


def _names_a_parameter(model: nn.Module, pattern: str) -> bool:
    parent, _, name = pattern.rpartition(".")
    return any(name in module._parameters for module in matching(model, parent)) if parent else False


def model_styles(model: nn.Module) -> Styles | None:
    """Returns the plan that a model brings: `tp_plan`, or Hugging Face's `_tp_plan` and `config.base_model_tp_plan`."""
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(model, name, None)
        if isinstance(plan, Mapping) and plan:
            base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
            prefix = getattr(model, "base_model_prefix", "")
            inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
            return {inside + key: style for key, style in base.items()} | dict(plan)
    return None


def _is_head(model: nn.Module, key: str) -> bool:
    return "." not in key and isinstance(getattr(model, key, None), nn.Linear)


def llama_styles(model: nn.Module, plan: Plan) -> dict[str, ParallelStyle]:
    """Returns torchtitan's plan for Llama, restricted to the modules that `model` has."""
    sequence = plan.sequence_parallel
    across = Shard(1) if sequence else Replicate()
    logits = Shard(-1) if plan.loss_parallel else Replicate()
    row = RowwiseParallel(output_layouts=across)
    styles: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=across),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": row,
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "layers.*.feed_forward.w2": row,
        "output": ColwiseParallel(input_layouts=across, output_layouts=logits, use_local_output=not plan.loss_parallel),
    }
    if sequence:
        styles |= {
            "norm": SequenceParallel(),
            "layers.*.attention_norm": SequenceParallel(),
            "layers.*.ffn_norm": SequenceParallel(),
            "layers.*.attention": Gathered(),
            "layers.*.feed_forward": Gathered(),
            "layers.*.moe": LocalTokens(),
        }
    return {key: style for key, style in styles.items() if matching(model, key)}


class LocalTokens(ReplicatedWeights):
    """Runs a mixture of experts on each rank's own part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def local(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(one.to_local() if isinstance(one, DTensor) else one for one in inputs)

        module.register_forward_pre_hook(local)
        return super()._apply(module, device_mesh)


def style_of(key: str, style: Any, plan: Plan, is_head: bool, note: Note) -> ParallelStyle | None:
    """Returns PyTorch's style for `style`. Returns None if there is nothing to do.

    Raises:
        ForerunError: it is neither a ParallelStyle nor a known word.
    """
    if isinstance(style, ParallelStyle):
        return style
    if is_head and plan.loss_parallel and str(style).startswith("colwise"):
        return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    make = _WORDS.get(style)
    if make is not None:
        return make()
    if style in _LEFT_ALONE:
        note(f"tp_plan: style {style!r} of {key!r} has no counterpart in PyTorch; the module stays whole")
        return None
    raise ForerunError(f"tp_plan: {key!r}: unknown style {style!r}; known: {', '.join(_WORDS)}, or a ParallelStyle")


_WORDS: dict[Any, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": ReplicatedWeights,
}
_LEFT_ALONE = (
    "packed_colwise",
    "packed_rowwise",
    "local_colwise",
    "local_rowwise",
    "local",
    "local_packed_rowwise",
    "moe_tp_experts",
    "moe_identity_expert",
    "grouped_gemm",
    "ep_router",
    "ep_dispatch_experts",
    "gather",
    "replicate",
    "all_reduce",
    "mla_kv_a_proj",
)
