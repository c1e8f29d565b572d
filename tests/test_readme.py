"""What README.md and docs/cli.md tell people to type works."""

import re
import shlex
from pathlib import Path

from forerun.describe.plan.fields import MEANINGS
from forerun.interfaces.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
OWN_OPTIONS = {
    *("--cluster", "--gpus", "--seq-len", "--global-batch", "--top", "--json", "--csv", "--objective", "--explain"),
    *("--trace", "--models", "--hardware", "--help", "--plan-file", "--max-tp", "--exhaustive", "--must-fit"),
    *("--network", "--program", "--programs", "--tokens-per-step", "--kernel-profile", "--network-profile"),
    *("--memory-limit", "--memory-snapshot", "--chakra", "--rank-class", "--depth", "--top", "--csv"),
    *("--world-size", "--gpus-per-node", "--steps", "--rank", "--module", "--device", "--torchtitan", "--override"),
    *("--expert-skew", "--dynamo", "--source-lines", "--plans", "--time-limit", "--host-memory-limit", "--show-output"),
    *("--install-completion", "--report", "--out", "--nodes", "--weak", "--patterns", "--devices"),
    *("--store", "--executor", "--ray-address", "--workers", "--allocator"),
    *("--kernels", "--tables", "--table-device", "--profile-out", "--network-out", "--source"),
    *("--nproc-per-node", "--no-python"),  # of torchrun
    *("--launch", "--launch-out", "--scheduler", "--mtp", "--images"),
    *("--encoder-seq-len", "--freeze-encoder"),
    *("--space", "--headroom", "--pareto", "--pareto-plans", "--why", "--heat", "--pictures"),
    *("--anchor", "--suggest-anchor", "--with-anchor", "--leave-out", "--write"),
    *("--every", "--checkpoint-mode", "--storage", "--outer-steps"),
    *("--warm-up", "--steps"),
    *("--max-slowdown", "--max-growth"),
    *("--time-limit", "--memory-limit-process"),
    *("--generated-tokens-per-s", "--generated-share", "--generation-gib", "--critic", "--no-old-scores"),
    *(
        "--rank-rows",
        "--traced",
        "--programs",
        "--download",
        "--traces",
        "--trace-workers",
        "--recipe",
        "--trace-limit",
        "--only",
        "--markdown",
    ),
    "--mode",  # of the script that README.md traces
}


def test_the_python_of_the_readme_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Plan(seq_len=8192" in printed
    assert "'considered'" in printed


def test_commands_and_options_that_are_named_exist():
    known = OWN_OPTIONS | {"--" + name.replace("_", "-") for name in MEANINGS}
    for page in (ROOT / "README.md", ROOT / "docs" / "cli.md"):
        text = page.read_text(encoding="utf-8")
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
        assert options <= known, page.name
        for command in re.findall(r"`forerun ([^`]+)`", text):
            assert shlex.split(command)[0].rstrip(",") in {*COMMANDS, "COMMAND", "--install-completion"}, page.name


def test_files_that_are_linked_exist():
    for page in (ROOT / "README.md", ROOT / "docs" / "cli.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
