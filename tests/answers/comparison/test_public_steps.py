"""Steps of public profiles beside predictions from other public profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_here import run_here
from profile_files import PUBLIC

_DIFF = "facebookresearch+HolisticTraceAnalysis/tests/data/trace_diff"
_FILES = {"control": f"{_DIFF}/control/control.json.gz", "test": f"{_DIFF}/test/test.json.gz"}


@pytest.mark.parametrize(
    ("measured", "predicted", "where"),
    [
        ("control", "test", ["--cluster", "a100-40gb-sxm", "--gpus", "8"]),
        ("test", "control", ["--cluster", "v100-dgx1-16gb", "--gpus", "2"]),
    ],
)
def test_the_files_of_a_comparison_make_the_next_prediction_right(
    tmp_path: Path, measured: str, predicted: str, where: list[str]
) -> None:
    """The two steps are of one model on 8 A100s and on 2 V100s, whose hosts are unlike too."""
    if not all((PUBLIC / name).exists() for name in _FILES.values()):
        pytest.skip(f"{_DIFF} is not under {PUBLIC} (FORERUN_PUBLIC_PROFILES)")
    program = ["--program", str(tmp_path / "step.program"), *where]
    corrections = {name: str(tmp_path / name) for name in ("anchor", "kernel-profile", "network-profile")}
    run_here(None, "profile", "import", str(PUBLIC / _FILES[predicted]), "-o", program[1])
    out = [word for name, path in corrections.items() for word in (f"--{name}-out", path)]
    found = json.loads(
        run_here(None, "profile", "compare", str(PUBLIC / _FILES[measured]), *program, *out, "--json").stdout
    )
    assert sum(part["lost_s"] for part in found["parts"]) == pytest.approx(
        found["measured_step_s"] - found["predicted_step_s"], abs=1e-4 * found["measured_step_s"]
    )
    assert abs(found["slowdown"]) > 0.05
    given = [word for name, path in corrections.items() for word in (f"--{name}", path)]
    again = json.loads(run_here(None, "predict", *program, *given, "--json").stdout)
    assert again["step_time_s"] == pytest.approx(found["measured_step_s"], rel=0.02)
