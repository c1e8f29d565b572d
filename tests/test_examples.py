"""The examples run as a user runs them, and print what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
PROMISED = {
    "predict_one": ["step time", "tokens/s/GPU", "MFU", "matmul"],
    "plan_llama": ["considered", "ZeRO-1=", "out of memory, by the largest part"],
    "own_experiment": ["mixer-12: step", "iterations that GPU 3 slows: 50, from 50 on", "bottleneck: network"],
    "compare_clusters": ["h100-sxm", "b200", "my-h100s", "tokens/s/GPU"],
    "own_patterns": ["nccl", "parameter_server", "Butterfly", "in_the_switch", "MFU"],
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    for text in PROMISED[script.stem]:
        assert text in done.stdout
