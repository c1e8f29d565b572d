"""Names of a step's work: the operator that launched it, the module around it, and the phase of the step."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from forerun.common.admission import parse_json
from forerun.common.errors import ForerunError
from forerun.core.program.types import Phase
from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.profile import Profile
from forerun.sources.profile.step import NONE, Step

MODULE = "nn.Module: "
"""begin of the name of an event that is a call of a module"""
ANNOUNCEMENT = "nccl:"
"""begin of the name of an annotation of c10d around the launch of a collective; the rest names its kind"""
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward")
_OPTIMIZER = re.compile(r"^Optimizer\.step")
_TYPES = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64"}


class Operator(NamedTuple):
    """An operator with the sizes of its arguments; None if the file says none."""

    name: str
    sizes: tuple[tuple[int, ...], ...] | None
    dtype: str
    type: str = ""
    """PyTorch's own name of the type of the first argument"""


class Label(NamedTuple):
    """Holds the phase, the module and the operator around a launch."""

    operator: int
    """row of the innermost operator, NONE without one"""
    module: str
    """path of modules from the outermost in, joined by dots; backward that of the operator whose gradient it is"""
    phase: Phase
    announcement: int = NONE
    """row of the innermost annotation of c10d, NONE without one"""


def labels_of(step: Step) -> list[Label]:
    """Returns the label of the launch of each work of a step, from the launching thread.

    Autograd's threads call no modules. Work that they launch belongs to the module of the forward operator that made
    the autograd node.
    """
    profile, rows = step.profile, step.profile.rows
    is_module = profile.text_mask(lambda text: text.startswith(MODULE))[rows.name]
    is_backward = profile.text_mask(lambda text: bool(_BACKWARD.search(text)))[rows.name]
    is_update = profile.text_mask(lambda text: bool(_OPTIMIZER.search(text)))[rows.name]
    announces = profile.text_mask(lambda text: text.startswith(ANNOUNCEMENT))[rows.name]
    is_operator = profile.is_operator
    node = profile.values(Key.NODE_NUMBER, NONE).astype(np.int64)
    launches = {int(row) for row in step.call.tolist() if row != NONE}
    around = (is_operator | is_module | is_backward | is_update | announces) & (rows.dur_ns >= 0) & (rows.stream < 0)
    around &= (rows.ts_ns < step.end_ns) & (rows.ts_ns + rows.dur_ns >= step.begin_ns)
    chosen = np.concatenate((np.flatnonzero(around), np.array(sorted(launches), np.int64)))
    end = rows.ts_ns + rows.dur_ns
    order = chosen[np.lexsort((-rows.dur_ns[chosen], rows.ts_ns[chosen], rows.tid[chosen], rows.pid[chosen]))]
    found: dict[int, Label] = {}
    made_in: dict[int, dict[object, str]] = {}
    """node of autograd -> thread -> the module in which its last operator before the node ran"""
    runs: dict[int, int] = {}
    """launch -> the node of autograd that it is a part of"""
    stack: list[int] = []
    thread = None
    for row in order.tolist():
        if (rows.pid[row], rows.tid[row]) != thread:
            thread, stack = (rows.pid[row], rows.tid[row]), []
        while stack and end[stack[-1]] < end[row]:
            stack.pop()
        makes = node[row] >= 0 and not is_backward[row] and row not in launches
        if makes or row in launches:
            path = ".".join(profile.texts[rows.name[one]][len(MODULE) :] for one in stack if is_module[one])
            nodes = [int(node[one]) for one in stack if is_backward[one]]
        if makes and (path or not nodes):
            made_in.setdefault(int(node[row]), {})[thread] = path
        if row in launches:
            operators = [one for one in stack if is_operator[one]]
            phase = Phase.OPTIMIZER if any(is_update[one] for one in stack) else Phase.FORWARD
            if phase == Phase.FORWARD and nodes:
                phase = Phase.BACKWARD
            announced = next((one for one in reversed(stack) if announces[one]), NONE)
            found[row] = Label(operators[-1] if operators else NONE, path, phase, announced)
            runs[row] = max(nodes[-1:], default=NONE) if not path else NONE
        else:
            stack.append(row)
    nothing = Label(NONE, "", Phase.FORWARD)
    for row, number in runs.items():
        paths = {*made_in.get(number, {}).values()}
        if len(paths) == 1:  # each thread counts its nodes, so numbers may mean several
            found[row] = found[row]._replace(module=paths.pop())
    return [found.get(int(row), nothing) for row in step.call.tolist()]


def operators_of(profile: Profile, wanted: Iterable[int]) -> dict[int, Operator]:
    """Returns the operators, or annotations, in the rows `wanted`; NONE is no row."""
    rows, texts = profile.rows, profile.texts
    sizes, types = profile.values(Key.INPUT_DIMS, NONE), profile.values(Key.INPUT_TYPES, NONE)
    found = {}
    for row in {*wanted} - {NONE}:
        dims = _sizes(texts[int(sizes[row])]) if sizes[row] >= 0 else None
        kinds = re.findall(r"[\w:]+", texts[int(types[row])]) if types[row] >= 0 else []
        first = kinds[0] if kinds else ""
        found[row] = Operator(texts[rows.name[row]], dims, _TYPES.get(first, ""), first)
    return found


def _sizes(text: str) -> tuple[tuple[int, ...], ...] | None:
    try:
        value = parse_json(text, "sizes")
    except ForerunError:
        return None
    if not isinstance(value, list):
        return None
    return tuple(
        tuple(one) if isinstance(one, list) and all(isinstance(size, int) for size in one) else () for one in value
    )
