"""`forerun diff`: two saved programs as a user compares them."""

import json

import pytest
from saved_programs import plan_of, program_of

from forerun.core.program.storage import save

CLUSTER = ("--cluster", "h100-sxm")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diff")
    save(program_of(plan_of(dp_shard=8)), folder / "main.program")
    save(program_of(plan_of(dp_shard=8, activation_checkpointing="full")), folder / "change.program")
    save(program_of(plan_of(dp_shard=8, micro_batch=12)), folder / "large.program")
    return folder


def test_the_tables_name_what_changed(forerun, saved):
    done = forerun("diff", saved / "main.program", saved / "change.program", *CLUSTER)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("step time") and "+" in line for line in lines)
    assert any(line.startswith("came") and "recompute" in line for line in lines)
    assert any("shrank" in line or "went" in line for line in lines[lines.index("") :])


def test_equal_programs_differ_in_nothing(forerun, saved):
    done = forerun("diff", saved / "main.program", saved / "main.program", *CLUSTER, "--max-slowdown", "0")
    assert done.returncode == 0, done.stderr
    assert "do the same work" in done.stdout


def test_json_is_sorted_by_lost_time(forerun, saved):
    done = forerun("diff", saved / "main.program", saved / "change.program", *CLUSTER, "--json")
    record = json.loads(done.stdout)
    lost = [one["lost_s"] for one in record["work"]]
    assert lost == sorted(lost, reverse=True)
    assert record["slowdown"] == pytest.approx(record["after"]["step_time_s"] / record["before"]["step_time_s"] - 1)
    assert sum(one["lost_s"] for one in record["causes"]) == pytest.approx(
        record["after"]["step_time_s"] - record["before"]["step_time_s"]
    )


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--max-slowdown", "2%"), 4),
        (("--max-slowdown", "0.02"), 4),
        (("--max-slowdown", "90%"), 0),
        (("--max-growth", "0"), 0),
        (("--must-fit",), 0),
    ],
)
def test_bounds_decide_the_exit_code(forerun, saved, options, code):
    done = forerun("diff", saved / "main.program", saved / "change.program", *CLUSTER, *options)
    assert done.returncode == code, done.stderr
    assert "step time" in done.stdout


def test_what_does_not_fit_ends_with_3(forerun, saved):
    done = forerun("diff", saved / "main.program", saved / "large.program", *CLUSTER, "--must-fit")
    assert done.returncode == 3, done.stderr


def test_growth_ends_with_4(forerun, saved):
    done = forerun("diff", saved / "change.program", saved / "main.program", *CLUSTER, "--max-growth", "1%")
    assert done.returncode == 4, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("main.program", "missing.program"), "missing.program: no such file"),
        (("main.program", "main.program", "--max-slowdown", "much"), "--max-slowdown much: expected a share"),
        (("main.program", "main.program", "--max-growth", "-1%"), "--max-growth -1%: expected a share"),
    ],
)
def test_bad_input_is_one_line(forerun, saved, arguments, words):
    first, second, *options = arguments
    done = forerun("diff", saved / first, saved / second, *CLUSTER, *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
