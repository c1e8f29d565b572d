"""The examples run as a user runs them, and print what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
PROMISED = {
    "predict_one": ["step time", "tokens/s/GPU", "MFU", "matmul"],
    "plan_llama": ["considered", "dp_shard", "out of memory, by the largest part"],
    "compare_clusters": ["h100-sxm", "b200", "my-h100s", "tokens/s/GPU"],
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    for text in PROMISED[script.stem]:
        assert text in done.stdout
