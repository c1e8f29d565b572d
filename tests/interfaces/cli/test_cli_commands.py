"""Every command does its job, as text and as JSON."""

import csv
import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from console_command import COMMAND

from forerun.describe.plan.fields import FIELD_TYPES, MEANINGS
from forerun.interfaces.cli.main import COMMANDS, run

CONFIG = Path(__file__).parents[3] / "examples" / "llama-3.1-8b" / "config.json"
QUESTION = ("--cluster", "h100-sxm", "--gpus", 8, "--seq-len", 4096, "--global-batch", 16)
QUICK = (*QUESTION, "--pp", "1", "--cp", "1", "--activation-checkpointing", "none,full")
PROMISED = {
    "step_time_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "hfu",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "fits",
    "exposed_comm_s",
    "bubble_s",
    "breakdown",
}


def test_help_names_every_command(forerun):
    done = forerun()
    assert done.returncode == 0
    assert done.stdout == forerun("--help").stdout
    for name, summary in COMMANDS.items():
        assert name in done.stdout
        assert summary in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(forerun, name):
    done = forerun(name, "--help")
    assert done.returncode == 0
    assert f"Usage: forerun {name}" in done.stdout
    assert done.stderr == ""


def test_every_field_of_a_plan_is_an_option(forerun):
    assert set(MEANINGS) == set(FIELD_TYPES) - {"seq_len"}
    text = forerun("predict", "--help").stdout
    for name in FIELD_TYPES:
        assert "--" + name.replace("_", "-") in text


def test_help_imports_no_heavy_module():
    code = (
        "import sys; from forerun.interfaces.cli.main import run; run(['--help']); sys.exit('numba' in sys.modules or"
        " 'numpy' in sys.modules)"
    )
    python = Path(COMMAND).with_name("python")
    assert subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def test_predict_prints_one_object(forerun):
    done = forerun("predict", CONFIG, *QUESTION, "--micro-batch", 1, "--tp", 8, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    record = json.loads(done.stdout)
    assert set(record) >= PROMISED
    assert record["step_time_s"] == pytest.approx(sum(record["breakdown"].values()), rel=1e-6)
    assert record["peak_allocated_gib"] == pytest.approx(sum(record["memory_by_category_gib"].values()), rel=1e-6)
    assert record["plan"]["tp"] == 8
    assert record["plan"]["n_microbatches"] == 16


def test_predict_explains_every_figure_in_words(forerun):
    done = forerun("predict", CONFIG, *QUESTION, "--explain")
    assert done.returncode == 0, done.stderr
    for text in ("step time", "MFU, HFU", "peak memory", "exposed comm", "bubble", "tflops:", "mfu:"):
        assert text in done.stdout
    assert "Where the figures come from" in done.stdout
    assert "mfu: 6 N + 12 L h s" in done.stdout


def test_predict_writes_a_trace(forerun, tmp_path):
    done = forerun("predict", CONFIG, *QUESTION, "--pp", 2, "--trace", "step.json")
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(processes) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_predict_takes_a_plan_file_and_options_go_over_it(forerun, tmp_path):
    (tmp_path / "plan.yaml").write_text("seq_len: 2048\ntp: 4\nactivation_checkpointing: full\ncompile: true\n")
    done = forerun(
        "predict", CONFIG, "--cluster", "h100-sxm", "--gpus", 8, "--plan-file", "plan.yaml", "--tp", 2, "--json"
    )
    plan = json.loads(done.stdout)["plan"]
    assert (plan["seq_len"], plan["tp"], plan["dp_shard"], plan["compile"]) == (2048, 2, 4, True)
    (tmp_path / "again.yaml").write_text(json.dumps(plan))
    again = forerun("predict", CONFIG, "--cluster", "h100-sxm", "--plan-file", "again.yaml", "--json")
    assert again.stdout == done.stdout


def test_predict_tells_a_shell_what_does_not_fit(forerun):
    arguments = ("predict", CONFIG, "--cluster", "h100-sxm", "--seq-len", 8192)
    done = forerun(*arguments)
    assert done.returncode == 0
    assert "does not fit" in done.stdout
    assert forerun(*arguments, "--must-fit").returncode == 3


def test_plan_ranks_what_fits(forerun):
    done = forerun("plan", CONFIG, *QUICK, "--top", 4, "--json", "--csv", "all.csv")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    times = [each["step_time_s"] for each in record["top"]]
    assert len(times) == 4
    assert times == sorted(times)
    assert record["best"] == record["top"][0]
    assert set(record["best"]) >= PROMISED
    counts = record["counts"]
    assert counts["considered"] == sum(counts[name] for name in ("impossible", "out_of_memory", "skipped", "ok"))
    assert sum(record["out_of_memory"].values()) == counts["out_of_memory"]


def test_plan_prints_the_command_that_repeats_the_winner(forerun):
    done = forerun("plan", CONFIG, *QUICK, "--workers", 1)
    assert done.returncode == 0, done.stderr
    command = next(line for line in done.stdout.splitlines() if "forerun predict" in line).split()[1:]
    step = next(line for line in done.stdout.splitlines() if line.startswith("step time")).split()[2:]
    again = forerun(*command)
    assert step == next(line for line in again.stdout.splitlines() if line.startswith("step time")).split()[2:]


def test_plan_prints_the_same_every_time(forerun):
    one, two = (
        forerun("plan", CONFIG, *QUICK, "--workers", workers, env={**os.environ, "PYTHONHASHSEED": str(workers)})
        for workers in (1, 2)
    )
    assert one.stdout == two.stdout
    for text in ("Step times", "configurations", "of them valid", "run out of", "Best by time", "Where the step goes"):
        assert text in one.stdout


def test_plan_writes_every_plan_as_csv(forerun, tmp_path):
    done = forerun("plan", CONFIG, *QUICK, "--csv", "all.csv", "--json")
    counts = json.loads(done.stdout)["counts"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "all.csv").read_text())))
    assert len(rows) == counts["considered"] - counts["impossible"]
    assert sum(row["status"] == "ok" for row in rows) == counts["ok"]
    assert all(row["reason"] for row in rows if row["status"] != "ok")
    assert [path.name for path in tmp_path.iterdir()] == ["all.csv"]


def test_plan_says_when_nothing_fits(forerun):
    done = forerun("plan", CONFIG, *QUICK, "--memory-limit", 2, "--json")
    assert done.returncode == 3
    record = json.loads(done.stdout)
    assert record["best"] is None
    assert record["counts"]["ok"] == 0
    done = forerun("plan", CONFIG, *QUICK, "--memory-limit", 2)
    assert done.returncode == 3
    assert "Nothing fits. The nearest miss" in done.stdout


def test_plan_by_memory_finds_less_memory(forerun):
    by_time = json.loads(forerun("plan", CONFIG, *QUICK, "--json").stdout)["best"]
    by_memory = json.loads(forerun("plan", CONFIG, *QUICK, "--objective", "memory", "--json").stdout)["best"]
    assert by_memory["peak_reserved_gib"] < by_time["peak_reserved_gib"]
    assert by_memory["step_time_s"] > by_time["step_time_s"]


def test_tables_are_readable_at_80_columns_without_colour(forerun):
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "80"}
    for arguments in (("plan", CONFIG, *QUICK), ("models",), ("clusters",), ("stacks",)):
        done = forerun(*arguments, env=environment)
        assert done.returncode == 0
        assert "\x1b" not in done.stdout
        assert not re.search(r"\w\.\.\.", done.stdout), "cut text, not a bar of dots"
        assert "…" not in done.stdout
        lines = [line for line in done.stdout.splitlines() if not line.startswith("  forerun predict")]
        assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("name", "expected"), [("models", "llama-3.1-8b"), ("clusters", "h100-sxm"), ("stacks", "torchtitan")]
)
def test_catalogues_are_listed(forerun, name, expected):
    assert expected in forerun(name).stdout
    rows = json.loads(forerun(name, "--json").stdout)[name]
    assert expected in {row["name"] for row in rows}


def test_version(forerun):
    assert forerun("version").stdout.startswith("forerun 0.")
    assert forerun("--version").stdout == forerun("version").stdout


def test_a_reader_that_leaves_is_no_error():
    with subprocess.Popen(
        [str(COMMAND), "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "80"}
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_an_interrupt_ends_it_in_one_line(monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.interfaces.cli.plan_search.search", interrupted)
    assert run(["plan", str(CONFIG), *map(str, QUESTION)]) == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")
