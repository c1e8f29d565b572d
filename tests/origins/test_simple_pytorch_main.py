"""simple_pytorch's training script: traced at its own defaults, by the command that its author would type.

Its `main.py` is public code, of which nothing stands here. `compiled_transformer.py` is a script of the same structure;
`main.py` itself is run where the environment variable FORERUN_SIMPLE_PYTORCH names a checkout of
https://github.com/lucasb-eyer/simple_pytorch.
"""

import importlib.util
import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

import forerun
from forerun.core.program.counts import op_counts
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Phase
from forerun.interfaces.cli.main import run

pytest.importorskip("torch", reason="tracing needs torch")
pytestmark = pytest.mark.long
SCRIPT = Path(__file__).with_name("compiled_transformer.py")
CHECKOUT = os.environ.get("FORERUN_SIMPLE_PYTORCH", "")
LACKING = [name for name in ("einops", "rich") if importlib.util.find_spec(name) is None]
BATCH, LENGTH, WIDTH, DEPTH, VOCABULARY = 8, 4096, 4096, 4, 32_768
MEASURED_MS = {(): 1119, ("--no-remat",): 974}
"""its author's figures on two A100, in the README"""


def traced(script, folder, *flags):
    """The Program of two ranks, and what `forerun predict --json` says of it."""
    out, printed = folder / "step.program", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        assert run(["trace", str(script), "--world-size", "2", "--device", "a100", "-o", str(out), "--", *flags]) == 0
        printed.truncate(printed.seek(0))
        assert run(["predict", "--program", str(out), "--cluster", "a100-80gb-sxm", "--json"]) == 0
    return forerun.load_program(out), json.loads(printed.getvalue())


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return traced(SCRIPT, tmp_path_factory.mktemp("ours"))


def flops(program, kind):
    of_kind = program.ops.kind == kind
    return float((op_counts(program)[0] * program.ops.flops)[of_kind].sum())


def counts(program, phases=tuple(Phase)):
    """How often an operation of each name runs."""
    found = {}
    for name, count in zip(program.ops.name, op_counts(program, phases)[0].tolist(), strict=True):
        found[name] = found.get(name, 0) + count
    return found


def largest_tensor(program):
    return max(int(block.tensor_bytes.max()) for block in program.blocks if len(block.tensor_bytes))


def check_whole_step(program):
    """FLOPs are what arithmetic says, and the update is one fused kernel of the optimizer's."""
    tokens, square = BATCH * LENGTH, WIDTH * WIDTH
    forward = 2 * tokens * (DEPTH * 10.5 * square + WIDTH * VOCABULARY)
    recomputed = (flops(program, OpKind.GEMM) - 3 * forward) / (2 * tokens * DEPTH * square)
    assert 5.5 <= recomputed <= 6  # queries, keys, values and the wide layer; no block's last product
    scores = DEPTH * BATCH * WIDTH * LENGTH * LENGTH / 2
    assert flops(program, OpKind.ATTENTION) == pytest.approx(4 * scores * (1 + 1 + 2.5))
    assert counts(program, (Phase.OPTIMIZER,))["_fused_adamw_"] == 1
    assert counts(program)["_fused_adamw_"] == 1
    assert largest_tensor(program) == tokens * VOCABULARY * 2
    assert not any("torch.compile" in note for note in program.meta["notes"])


def test_the_default_is_traced_whole(ours):
    program, _ = ours
    check_whole_step(program)
    parameters = 2 + 2 + DEPTH * (4 + 4 + 4)
    assert counts(program)["reduce_scatter"] == parameters
    assert parameters < counts(program)["all_gather"] < 2 * parameters


def test_the_default_takes_what_its_author_measured(ours):
    _, prediction = ours
    assert prediction["step_time_s"] * 1000 == pytest.approx(MEASURED_MS[()], rel=0.05)


def test_logits_of_four_gib_are_there(tmp_path):
    program, prediction = traced(SCRIPT, tmp_path, "-b", "16", "-d", "1", "-w", "512")
    assert largest_tensor(program) == 1 << 32
    assert prediction["peak_allocated_gib"] > 4


@pytest.mark.skipif(not CHECKOUT, reason="FORERUN_SIMPLE_PYTORCH names no checkout of simple_pytorch")
@pytest.mark.skipif(bool(LACKING), reason=f"its main.py imports {', '.join(LACKING)}")
@pytest.mark.parametrize("flags", MEASURED_MS, ids=" ".join)
def test_main_itself_unmodified(tmp_path, flags):
    program, prediction = traced(Path(CHECKOUT) / "main.py", tmp_path, *flags)
    if not flags:
        check_whole_step(program)
    assert np.isfinite(prediction["step_time_s"])
    assert prediction["step_time_s"] * 1000 == pytest.approx(MEASURED_MS[flags], rel=0.05)
