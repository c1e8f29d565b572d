"""The action that compares the training step before and after a change, and the workflow that shows how it is used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
EXAMPLE = yaml.safe_load((ROOT / "examples" / "ci" / "step.yml").read_text(encoding="utf-8"))
SCRIPT = """
import sys
import torch

width = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(width, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, width)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.rand(4096, width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(sys.argv[2])
"""


def test_the_example_gives_what_the_action_asks_for():
    (step,) = (each for each in EXAMPLE["jobs"]["step"]["steps"] if each.get("uses", "").startswith("OWNER/"))
    inputs = ACTION["inputs"]
    assert set(step["with"]) <= set(inputs)
    assert {name for name, each in inputs.items() if each.get("required")} <= set(step["with"])
    assert (ROOT / step["with"]["script"]).is_file()
    assert all(each["description"] for each in inputs.values())


def _git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", folder, *author, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _compare(folder: Path, base: str) -> tuple[int, str]:
    """Runs the action's last step, as GitHub would, and returns its exit code and its summary."""
    given = {"script": "deep/train.py", "arguments": "512 'two words'", "world-size": "1", "cluster": "h100-sxm"}
    usual = {name: each.get("default", "") for name, each in ACTION["inputs"].items()}
    values = {**usual, **given, "base": base}
    step = ACTION["runs"]["steps"][-1]
    texts = {name: value.removeprefix("${{ inputs.").removesuffix(" }}") for name, value in step["env"].items()}
    summary = folder.parent / "summary.md"
    summary.write_text("")
    environment = {
        **os.environ,
        **{name: values[key] for name, key in texts.items()},
        "GITHUB_STEP_SUMMARY": str(summary),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(bash, cwd=folder, env=environment, capture_output=True, text=True)
    assert summary.read_text() in done.stdout, done.stderr
    return done.returncode, summary.read_text()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_change_that_costs_too_much_fails(tmp_path: Path):
    folder = tmp_path / "repository"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "train.py").write_text(SCRIPT.replace("WIDTH", "1024"))
    _git(folder, "init", "-q")
    _git(folder, "add", ".")
    _git(folder, "commit", "-qm", "before")
    base = _git(folder, "rev-parse", "HEAD")
    code, summary = _compare(folder, base)
    assert code == 0, summary
    (folder / "deep" / "train.py").write_text(SCRIPT.replace("WIDTH", "2048"))
    code, summary = _compare(folder, base)
    assert code == 4
    assert summary.startswith("```\n")
    assert summary.endswith("```\n")
    assert "step time" in summary
