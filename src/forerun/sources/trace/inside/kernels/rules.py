"""Describes the kernels of one dispatched operator as rows of the op table.

The dispatch mode calls `describe` for every operator. An operator has a rule of its own (matrix products, attention,
gathers and scatters, lists of tensors, host copies), or costs its bytes, with the kernels that `rules.yaml` gives it.
An operator that neither knows costs its bytes and is marked as guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from forerun.core.program.builder import OpTableBuilder
from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.kernels.attention import ATTENTION_RULES
from forerun.sources.trace.inside.kernels.cudnn import CUDNN_RULES
from forerun.sources.trace.inside.kernels.gemm import GEMM_RULES
from forerun.sources.trace.inside.kernels.low_bits import LOW_BIT_RULES
from forerun.sources.trace.inside.kernels.memory import MEMORY_RULES
from forerun.sources.trace.inside.kernels.opaque_costs import cost_of_call, kernels_of
from forerun.sources.trace.inside.kernels.tensors import (
    Arguments,
    Call,
    Kernel,
    Keywords,
    Plan,
    Traits,
    by_bytes,
    first_tensor,
    plan_of,
    traffic,
)
from forerun.sources.trace.opaque import OPERATOR, rule_of
from forerun.sources.trace.opaque import Rule as OpaqueRule

__all__ = ["Kernel", "describe"]

Rule = Callable[[Call], list[Kernel]]

_OWN_RULES: dict[str, Rule] = {
    **MEMORY_RULES,
    **GEMM_RULES,
    **LOW_BIT_RULES,
    **CUDNN_RULES,
    **ATTENTION_RULES,
}
"""By name, or by "namespace::name" outside aten."""
_OF_OTHERS = frozenset(
    ("prim", "profiler", "c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor")
)
"""The namespaces whose operators launch nothing, or that the tracer records itself (collectives)."""
_TRUSTED = frozenset(("aten", "prims", "fsdp", "inductor", "inductor_prims", "rngprims", "quantized_decomposed"))
"""The namespaces in which a pointwise or reduction tag is reliable."""

_rules: dict[Any, tuple[Rule, Plan]] = {}


def describe(table: OpTableBuilder, func: Any, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    """Returns the kernels that `func(*args, **kwargs)`, which returned `out`, launches on the device; their rows go
    into `table`.

    `func` is an OpOverload or a higher-order operator. The list is empty for operators that launch nothing (views,
    empty tensors, queries) and for collectives, which the process group records. The tensors may be fake; none is read.
    Sizes that fake tensors leave open count by their hint.
    """
    found = _rules.get(func)
    if found is None:
        found = _rules[func] = _rule_of(func)
    rule, plan = found
    return rule(Call(table, plan, args, kwargs, out))


@cache
def _data() -> tuple[frozenset[str], dict[str, Traits]]:
    """Names that launch nothing, and traits by name, of rules.yaml."""
    data = read_data("kernels/rules.yaml")
    traits = {name: Traits() for name in data["one_pass"]}
    for name, entry in data["traits"].items():
        traits[name] = Traits(
            int(entry.get("launches", 1)),
            tuple(entry.get("unread", ())),
            tuple(entry.get("twice", ())),
            bool(entry.get("sync", False)),
            entry.get("kernel", ""),
        )
    return frozenset(data["nothing"]), traits


def _nothing(call: Call) -> list[Kernel]:
    return []


def _unless_view(call: Call) -> list[Kernel]:
    """Returns a composite operator (reshape, contiguous) that returns a view where it can and a copy elsewhere."""
    given, made = first_tensor(call.args), first_tensor(call.out)
    if given is None or made is None or given.untyped_storage()._cdata == made.untyped_storage()._cdata:
        return []
    return by_bytes(call)


def _unwrapped(result: Callable[[Any], Any], call: Call) -> list[Kernel]:
    """Returns a higher-order operator that runs the operator it is given on the arguments that follow it."""
    for index, value in enumerate(call.args):
        if isinstance(value, torch._ops.OpOverload):
            return describe(call.table, value, tuple(call.args[index + 1 :]), call.kwargs, result(call.out))
    return []


_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "run_and_save_rng_state": lambda out: out[1],
    "run_with_rng_state": lambda out: out,
    "graphsafe_run_with_rng_state": lambda out: out,
    "run_dtensor_rng_op": lambda out: out,
    "with_effects": lambda out: out[1:],
}
"""Higher-order operators that run the operator that they are given, with the position of its result in theirs."""


def _rule_of(func: Any) -> tuple[Rule, Plan]:
    """Returns the rule of an operator and how the operator uses its arguments."""
    if not isinstance(func, torch._ops.OpOverload):
        return _rule_of_higher_order(str(getattr(func, "_name", func)))
    schema = func._schema
    described = rule_of(OPERATOR, schema.name)
    if described is not None and described.of_cost is not None:
        return partial(_as_described, described), plan_of(schema.name, schema, Traits(), False)
    nothing, traits = _data()
    namespace, _, name = schema.name.partition("::")
    if namespace in _OF_OTHERS or (namespace == "aten" and name in nothing) or torch.Tag.inplace_view in func.tags:
        return _nothing, plan_of(name, schema, Traits(), False)
    key = name if namespace == "aten" else schema.name
    own = _OWN_RULES.get(key)
    known = traits.get(key)
    if known is None and own is None:
        known = traits.get(key.removesuffix("_"))
    trusted = namespace == "prims" or (namespace in _TRUSTED and _tagged(namespace, name))
    guessed = own is None and known is None and not trusted
    plan = plan_of(name, schema, known or Traits(), guessed)
    if own is not None:
        return own, plan
    if func.is_view:
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "CompositeImplicitAutograd")
        return _unless_view if composite else _nothing, plan
    return by_bytes, plan


def _as_described(rule: OpaqueRule, call: Call) -> list[Kernel]:
    """Returns an operator whose cost a user describes."""
    cost = cost_of_call(rule, call.args, call.kwargs)
    read, written = traffic(call)
    whole = replace(
        cost,
        bytes_read=read if cost.bytes_read is None else cost.bytes_read,
        bytes_written=written if cost.bytes_written is None else cost.bytes_written,
    )
    return kernels_of(call.table, call.name, whole, call.args, call.out)


def _tagged(namespace: str, name: str) -> bool:
    """Returns whether any overload is tagged as pointwise or a reduction. In-place overloads often lack the tag."""
    operators = getattr(torch.ops, namespace)
    packets = [getattr(operators, n, None) for n in (name, name.removesuffix("_"))]
    overloads = [getattr(packet, o) for packet in packets if packet is not None for o in packet.overloads()]
    return any({torch.Tag.pointwise, torch.Tag.reduction} & set(overload.tags) for overload in overloads)


def _rule_of_higher_order(name: str) -> tuple[Rule, Plan]:
    if name in _WRAPPERS:
        return partial(_unwrapped, _WRAPPERS[name]), plan_of(name, None, Traits(), False)
    own = _OWN_RULES.get(f"higher_order::{name}")
    guessed = own is None or name.startswith("triton")
    return own or by_bytes, plan_of(name, None, Traits(), guessed)
