"""What people expect of a console command: completion, man pages, a first file, a look at the installation."""

import io
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from console_command import COMMAND

from forerun.interfaces.cli import completion
from forerun.interfaces.cli.main import COMMANDS, run
from forerun.interfaces.report import doctor
from forerun.interfaces.starts import GOALS
from forerun.sources.trace.inside.torch_versions import supported

MAN = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "write_man.py"))


def completed(words, shell="bash"):
    """What the shell is told on a line whose last word is to be completed."""
    line = shlex.join(words[:-1]) + " " + words[-1]
    asked = {"_FORERUN_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        asked |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    else:
        asked |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [COMMAND], env={**os.environ, **asked}, capture_output=True, text=True, timeout=100, check=False
    )
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected", "others"),
    [
        (["forerun", "pre"], "predict", "plan"),
        (["forerun", "predict", "llama-3.1"], "llama-3.1-8b", "h100-sxm"),
        (["forerun", "plan", "x", "--cluster", "h100-s"], "h100-sxm", "b200"),
        (["forerun", "plan", "x", "--stack", "torchtitan,megatron-c"], "torchtitan,megatron-core", "deepspeed"),
        (["forerun", "predict", "x", "--precision", "f"], "fp8", "bf16"),
        (["forerun", "predict", "x", "--seq"], "--seq-len", "--cluster"),
        (["forerun", "experiment", "sc"], "scale", "compare"),
    ],
)
def test_a_shell_completes(words, expected, others):
    found = completed(words).split("\n")
    assert expected in found
    assert not any(each.startswith(others) for each in found)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_too(shell):
    assert "h100-sxm" in completed(["forerun", "plan", "x", "--cluster", "h100-s"], shell)


def test_an_open_quote_is_no_fault():
    assert completion.words_to_complete({"COMP_WORDS": "forerun plan 'my mo"}) == ["plan", "'my", "mo"]
    assert completion.words_to_complete({}) is None


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_shown(shell):
    told = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([COMMAND, "--show-completion", shell], env=told, capture_output=True, text=True, check=True)
    assert "_FORERUN_COMPLETE" in done.stdout


def test_bash_runs_its_script(tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    told = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = subprocess.run(
        [COMMAND, "--show-completion", "bash"], env=told, capture_output=True, text=True, check=True
    )
    line = f'COMP_WORDS=(forerun plan x --cluster h100-s); COMP_CWORD=4; {{}} "{COMMAND}"; echo "${{{{COMPREPLY[@]}}}}"'
    function = next(word for word in script.stdout.split() if word.startswith("_forerun") and "completion" in word)
    text = script.stdout + "\n" + line.format(function.rstrip("(){"))
    done = subprocess.run([bash, "-c", text], capture_output=True, text=True, check=True)
    assert "h100-sxm" in done.stdout.split()


def test_every_command_has_a_man_page():
    pages = MAN["pages"]()
    assert {f"forerun-{name}.1" for name in COMMANDS} | {"forerun.1", "forerun-experiment-scale.1"} <= set(pages)
    assert "\\-\\-seq\\-len" in pages["forerun-plan.1"]
    for name, page in pages.items():
        lines = page.split("\n")
        assert lines[0].startswith(f'.TH "{name[:-2].upper()}" "1"')
        requests = {line.split()[0] for line in lines if line.startswith((".", "'"))}
        assert requests <= {".TH", ".SH", ".TP", ".PP"}, name


def test_no_text_is_read_as_a_request_of_troff():
    assert MAN["roff"](".SH not a heading") == "\\&.SH not a heading"
    assert MAN["roff"]("a\\b --c") == "a\\eb \\-\\-c"


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff")
def test_groff_reads_the_pages_without_a_warning(tmp_path):
    MAN["main"].__globals__["sys"].argv = ["write_man.py", str(tmp_path)]
    MAN["main"]()
    pages = sorted(tmp_path.glob("*.1"))
    done = subprocess.run(["groff", "-man", "-Tascii", "-ww", "-z", *pages], capture_output=True, text=True, check=True)
    assert "warning" not in done.stderr


def test_doctor_says_what_is_missing_and_how_to_install_it(capsys, monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("matplotlib", "torch") else real(name))
    assert run(["doctor", "--json"]) == 0
    findings = {each["what"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["extra plot"]["fix"] == "pip install 'forerun[plot]'"
    assert "matplotlib" in findings["extra plot"]["found"]
    assert findings["tracing"]["fix"] == "pip install 'forerun[trace]'"
    assert findings["extra data"]["good"]
    assert run(["doctor"]) == 0
    assert "pip install 'forerun[plot]'" in capsys.readouterr().out


def test_doctor_looks_at_every_extra_that_users_install():
    """All but those of developers: tests and the documentation."""
    extras = set(metadata.metadata("forerun").get_all("Provides-Extra"))
    assert {each.what for each in doctor.examine()} >= {f"extra {name}" for name in extras - {"test", "docs"}}


def test_only_a_model_of_the_hub_is_downloaded(capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert run(["models", "gpt2-small", "--download"]) == 0, "a preset is there"
    assert "gpt2-small" in capsys.readouterr().out
    for words, says in (([], "name a model"), (["gpt9"], "org/model"), (["org/model"], "can't be downloaded")):
        assert run(["models", *words, "--download"]) == 2
        assert says in capsys.readouterr().err


def test_doctor_knows_which_torch_is_supported():
    real = metadata.requires("forerun")
    (first, second), (third, fourth) = supported.FIRST, supported.LAST
    assert doctor.supports(f"{first}.{second}.0", real)
    assert doctor.supports(f"{third}.{fourth}.1+cpu", real)
    assert not doctor.supports(f"{first}.{second - 1}.1", real)
    assert not doctor.supports(f"{third}.{fourth + 1}.0", real)
    assert not doctor.supports("nightly", real)


def test_doctor_finds_the_packages_of_extras():
    assert doctor.needed_by_extras(["numpy>=1", 'plotly>=5; extra == "plot"', "a[b]>=1 ; extra == 'x'"]) == {
        "plot": ["plotly"],
        "x": ["a"],
    }


@pytest.mark.parametrize("goal", GOALS)
def test_the_file_of_init_is_what_its_command_takes(goal, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    path = tmp_path / "first.yaml"
    options = ["--goal", goal, "--gpus", "8", "--model", "llama-3.2-1b", "--cluster", "h100-sxm"]
    assert run(["init", str(path), *options]) == 0
    command = shlex.split(capsys.readouterr().out.split("Next:")[1])
    assert command[0] == "forerun"
    assert str(path) in command
    assert run([*command[1:], *(["--runs", "2", "--no-gains"] if goal == "weeks" else [])]) == 0
    assert run(["init", str(path), *options]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(["init", str(path), *options, "--force"]) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "lama-3.1-8b"], "llama-3.1-8b"),
        (["--goal", "plna"], "did you mean plan"),
        (["--gpus", "12"], "whole nodes"),
        (["--cluster", "h100-sx"], "h100-sxm"),
    ],
)
def test_a_wrong_answer_is_named_and_nothing_is_written(options, says, tmp_path, capsys):
    path = tmp_path / "first.yaml"
    assert run(["init", str(path), *options]) == 2
    assert says in capsys.readouterr().err
    assert not path.exists()


def test_init_asks_where_someone_can_answer(tmp_path, capsys, monkeypatch):
    answers = iter(["llama-3.2-1b", "h100-sxm", "16", "predict"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda text, default: next(answers))
    assert run(["init", str(tmp_path / "first.yaml")]) == 0
    assert "forerun predict llama-3.2-1b --cluster h100-sxm --plan-file" in capsys.readouterr().out
    assert "dp_shard: 16" in (tmp_path / "first.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "command", "says"),
    [
        ("nodes: 2\njobz: []", "cluster", ("did you mean jobs?", "docs/jobs.md explains the keys")),
        ("name: x\ngpsu: 8", "run", ("did you mean gpus?", "docs/goodput.md explains the keys")),
    ],
)
def test_an_unknown_key_names_the_nearest_one_and_the_page(text, command, says, tmp_path, capsys):
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    assert run([command, str(path)]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in says), error


def test_doctor_runs_where_only_the_requirements_are_installed():
    absent = ("torch", "pandas", "matplotlib", "scipy", "pyarrow")
    hidden = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))"
    text = f"{hidden}; from forerun.interfaces.cli.main import run; run(['doctor'])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "error" not in done.stderr
    assert "compiled functions" in done.stdout
