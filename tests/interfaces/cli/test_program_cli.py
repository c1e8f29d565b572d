"""Commands that read saved Programs: predict --program, simulate, plan --programs."""

import csv
import json
import pickle
import shutil

import pytest
from saved_programs import plan_of, program_of

from forerun.core.program.storage import save
from forerun.interfaces.cli.main import run

CLUSTER = ("--cluster", "h100-sxm")
ASK = ("--program", "fsdp.program", *CLUSTER)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Four Programs in the folder `runs`, and one of them beside it."""
    tmp_path = tmp_path_factory.mktemp("saved")
    folder = tmp_path / "runs"
    folder.mkdir()
    save(program_of(plan_of(dp_shard=8)), folder / "fsdp.program")
    save(program_of(plan_of(dp_shard=4, tp=2, micro_batch=2)), folder / "tp.npz")
    save(program_of(plan_of(dp_shard=8, micro_batch=12)), folder / "large.program")
    save(program_of(plan_of(dp_shard=2, pp=2, n_microbatches=8)), folder / "pp.program")
    (folder / "notes.txt").write_text("not a program")
    save(program_of(plan_of(dp_shard=8), notes=["my_op: costed by its bytes"]), tmp_path / "fsdp.program")
    return tmp_path


@pytest.fixture
def programs(saved, tmp_path):
    """The folder `runs` in a copy of what was saved."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs"


def record_of(done):
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


# -- predict -----------------------------------------------------------------------------------------------------------


def test_a_stack_gives_a_program_its_rates(forerun, programs):
    usual = record_of(forerun("predict", *ASK, "--json"))
    same = record_of(forerun("predict", *ASK, "--stack", "pytorch", "--json"))
    faster = record_of(forerun("predict", *ASK, "--stack", "simple-fsdp", "--json"))
    assert same == usual
    assert faster["step_time_s"] < usual["step_time_s"]
    assert faster["peak_allocated_gib"] == usual["peak_allocated_gib"]
    shown = forerun("simulate", *ASK, "--stack", "simple-fsdp")
    assert shown.returncode == 0


def test_an_unknown_stack_is_named(forerun, programs):
    done = forerun("predict", *ASK, "--stack", "pytoch")
    assert done.returncode == 2
    assert "pytoch" in done.stderr
    assert "pytorch" in done.stderr


def test_predict_reads_a_program(forerun, programs):
    record = record_of(forerun("predict", *ASK, "--json"))
    assert record["model"] == "fsdp"
    assert record["plan"] is None
    assert record["n_gpus"] == 8
    assert record["step_time_s"] == pytest.approx(sum(record["breakdown"].values()), rel=1e-6)
    assert record["warnings"] == ["my_op: costed by its bytes"]
    assert "missing" not in record


def test_predict_scales_a_program(forerun, programs):
    record = record_of(forerun("predict", *ASK, "--gpus", 64, "--json"))
    own = record_of(forerun("predict", *ASK, "--json"))
    assert record["n_gpus"] == 64
    assert record["peak_allocated_gib"] < own["peak_allocated_gib"]


def test_predict_in_words(forerun, programs):
    done = forerun("predict", *ASK, "--gpus", 64, "--explain", "--network", "switch:8@450/300ns,fat-tree:8@50/700ns")
    assert done.returncode == 0, done.stderr
    assert "fsdp on 64 x h100-sxm" in done.stdout
    assert "a saved program" in done.stdout
    assert "my_op: costed by its bytes" in done.stdout
    assert "tflops:" in done.stdout
    assert "Busiest links" in done.stdout


def test_predict_writes_what_it_is_asked_for(forerun, programs, tmp_path):
    outputs = ("--trace", "step.json", "--chakra", "et", "--memory-snapshot", "memory.pickle")
    record = record_of(forerun("predict", *ASK, *outputs, "--json"))
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert len(list((tmp_path / "et").glob("trace.*.et"))) == 8
    events = pickle.loads((tmp_path / "memory.pickle").read_bytes())["device_traces"][0]
    level = peak = 0
    for event in events:
        level += event["size"] * ((event["action"] == "alloc") - (event["action"] == "free_completed"))
        peak = max(peak, level)
    assert peak / 2**30 == pytest.approx(record["peak_allocated_gib"])


def test_a_memory_snapshot_of_a_plan(forerun, tmp_path):
    done = forerun("predict", "qwen3-0.6b", *CLUSTER, "--gpus", 1, "--seq-len", 512, "--memory-snapshot", "m.pickle")
    assert done.returncode == 0, done.stderr
    assert pickle.loads((tmp_path / "m.pickle").read_bytes())["segments"]


def test_predict_must_fit(forerun, programs):
    assert forerun("predict", "--program", "runs/large.program", *CLUSTER, "--must-fit").returncode == 3
    done = forerun("predict", "--program", "runs/fsdp.program", *CLUSTER, "--must-fit", "--memory-limit", 10)
    assert done.returncode == 3


def test_predict_with_measurements(forerun, programs, tmp_path):
    (tmp_path / "net.csv").write_text("collective,ranks,stride,bytes,time_us\nall_gather,8,1,1000000,200000\n")
    (tmp_path / "kernels.csv").write_text("kind,bytes,time_us\nmemory,1000,2\nmemory,1000000000000,500000\n")
    shipped = record_of(forerun("predict", *ASK, "--json"))
    profiles = ("--network-profile", "net.csv", "--kernel-profile", "kernels.csv")
    record = record_of(forerun("predict", *ASK, *profiles, "--json"))
    assert record["step_time_s"] > 2 * shipped["step_time_s"]
    assert any(line.startswith("reduce_scatter over 8 ranks, stride 1: not measured") for line in record["missing"])
    assert any(line.startswith("gemm") for line in record["missing"])
    assert any("extrapolated" in line for line in record["missing"] if line.startswith("all_gather"))
    words = forerun("predict", *ASK, *profiles).stdout
    assert "Not in your measurements" in words
    assert "more (--json lists them)" in words
    plan = ("llama-3.1-8b", *CLUSTER, "--gpus", 8, "--seq-len", 4096)
    assert record_of(forerun("predict", *plan, *profiles, "--json"))["missing"]
    fixed = ("--global-batch", 8, "--tp", 1, "--pp", 1, "--cp", 1, "--dp-shard", 8, "--micro-batch", 1)
    searched = record_of(forerun("plan", *plan, *fixed, *profiles, "--json"))
    assert searched["best"]["missing"]


# -- simulate ----------------------------------------------------------------------------------------------------------


def test_simulate_shows_kernels_streams_and_modules(forerun, programs, tmp_path):
    done = forerun("simulate", *ASK, "--top", 3, "--depth", 1, "--trace", "step.json")
    assert done.returncode == 0, done.stderr
    for heading in ("Kernels by time (3 of", "Streams", "Modules by device time"):
        assert heading in done.stdout
    assert (tmp_path / "step.json").exists()


def test_simulate_in_json(forerun, programs):
    record = record_of(
        forerun("simulate", "--program", "runs/pp.program", *CLUSTER, "--rank-class", "stage 0", "--json")
    )
    assert record["rank_class"] == "stage 0"
    assert record["n_ranks"] == 2
    assert {row["name"] for row in record["streams"]} >= {"compute", "pp_send", "host"}
    assert record["kernels"][0]["total_s"] >= record["kernels"][-1]["total_s"] > 0
    assert record["prediction"]["n_gpus"] == 4
    by_number = record_of(forerun("simulate", "--program", "runs/pp.program", *CLUSTER, "--rank-class", "0", "--json"))
    assert by_number == record


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_ranks_the_programs_of_a_folder(forerun, programs, tmp_path):
    (programs / "torn.program").write_bytes(b"PK\x03\x04 nothing else")
    record = record_of(forerun("plan", "--programs", "runs", *CLUSTER, "--csv", "all.csv", "--json"))
    assert record["counts"] == {"considered": 5, "refused": 1, "out_of_memory": 1, "ok": 3}
    rates = [each["tokens_per_s_per_gpu"] for each in record["top"]]
    assert rates == sorted(rates, reverse=True)
    assert (record["objective"], record["because"]) == (
        "tokens",
        "the steps train on 32,768 to 65,536 tokens, the programs run on 4 to 8 GPUs",
    )
    assert record["best"] == record["top"][0]
    assert record["out_of_memory"][0]["file"] == "large.program"
    assert record["out_of_memory"][0]["cause"] == "temporary"
    assert record["out_of_memory"][0]["needs_gib"] > record["memory_limit_gib"]
    assert record["refused"][0]["file"] == "torn.program"
    assert sum(each["simulated"] for each in record["runtime_histogram"]) == 3
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "out_of_memory", "refused"]
    assert [float(row["tokens_per_s_per_gpu"]) for row in rows[:3]] == rates
    for name in ("fsdp.program", "pp.program"):
        alone = record_of(forerun("predict", "--program", f"runs/{name}", *CLUSTER, "--json"))
        assert alone["step_time_s"] == next(each["step_time_s"] for each in record["top"] if each["file"] == name)


def test_the_number_of_processes_does_not_change_the_ranking(forerun, programs):
    ask = ("plan", "--programs", "runs", *CLUSTER, "--json")
    assert forerun(*ask, "--workers", 1).stdout == forerun(*ask, "--workers", 2).stdout


def test_plan_ranks_in_words(forerun, programs):
    (programs / "torn.program").write_bytes(b"")
    done = forerun("plan", "--programs", "runs", *CLUSTER, "--memory-limit", 30)
    assert done.returncode == 0, done.stderr
    for text in (
        "run out of 30.0 GiB",
        "large.program: needs",
        "1 could not be predicted",
        "torn.program",
        "Ranked by tokens/s of a GPU: the steps train on",
        "Best by tokens: tp.npz (tp 2, dp_shard 4), ",
    ):
        assert text in done.stdout
    done = forerun("plan", "--programs", "runs", *CLUSTER, "--objective", "time")
    assert "Ranked by step time: as asked." in done.stdout
    assert "different numbers of tokens" in done.stdout


@pytest.mark.parametrize(
    ("objective", "figure", "sign"),
    [
        ("time", "step_time_s", 1),
        ("tokens", "tokens_per_s_per_gpu", -1),
        ("memory", "peak_reserved_gib", 1),
        ("cost", "dollars_per_billion_tokens", 1),
    ],
)
def test_programs_are_ranked_by_what_is_asked(forerun, programs, objective, figure, sign):
    record = record_of(forerun("plan", "--programs", "runs", *CLUSTER, "--objective", objective, "--json"))
    values = [sign * each[figure] for each in record["top"]]
    assert values == sorted(values)
    assert len(values) == 3
    assert record["objective"] == objective


def test_equal_batches_are_ranked_by_time(forerun, programs, tmp_path):
    """The order by time is that by tokens, and is what is said."""
    (tmp_path / "equal").mkdir()
    save(program_of(plan_of(dp_shard=8)), tmp_path / "equal" / "fsdp.program")
    save(program_of(plan_of(dp_shard=4, tp=2, micro_batch=2)), tmp_path / "equal" / "tp.program")
    ask = ("plan", "--programs", "equal", *CLUSTER)
    done = forerun(*ask)
    assert "Ranked by step time: every step trains on 32,768 tokens with 8 GPUs." in done.stdout
    assert "Best by time: " in done.stdout
    orders = [
        [each["file"] for each in record_of(forerun(*ask, *more, "--json"))["top"]]
        for more in ((), ("--objective", "tokens"))
    ]
    assert orders[0] == orders[1]


def test_programs_of_unknown_tokens_are_listed_apart(forerun, programs, tmp_path):
    save(program_of(plan_of(dp_shard=8), tokens_per_step=None), programs / "silent.program")
    ask = ("plan", "--programs", "runs", *CLUSTER)
    record = record_of(forerun(*ask, "--csv", "all.csv", "--json"))
    assert record["counts"] == {"considered": 5, "refused": 0, "out_of_memory": 1, "unranked": 1, "ok": 3}
    assert [each["file"] for each in record["unranked"]] == ["silent.program"]
    assert "the tokens of 1 of 4 programs are unknown" in record["because"]
    assert "1 fit and are not ranked: the tokens of their step are unknown (--tokens-per-step N" in forerun(*ask).stdout
    with (tmp_path / "all.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["status"] == "unranked")
    assert (row["file"], row["rank"], row["tokens_per_step"]) == ("silent.program", "", "")
    assert row["reason"] == "the program does not say how many tokens its step trains on"
    told = record_of(forerun(*ask, "--tokens-per-step", 32768, "--json"))
    assert told["counts"]["ok"] == 4
    rates = {each["file"]: each["tokens_per_s_per_gpu"] for each in told["top"]}
    assert rates["silent.program"] == rates["fsdp.program"]
    by_time = record_of(forerun(*ask, "--objective", "time", "--json"))
    assert by_time["counts"]["ok"] == 4


def test_programs_that_all_say_nothing_are_ranked_by_time_with_a_note(forerun, tmp_path):
    (tmp_path / "silent").mkdir()
    save(program_of(plan_of(dp_shard=8), tokens_per_step=None), tmp_path / "silent" / "a.program")
    save(program_of(plan_of(dp_shard=8, micro_batch=2), tokens_per_step=None), tmp_path / "silent" / "b.program")
    done = forerun("plan", "--programs", "silent", *CLUSTER)
    assert "Ranked by step time: no program says how many tokens its step trains on." in done.stdout
    assert "! the order holds if all steps train on the same tokens" in done.stdout
    assert "Best by time: a.program" in done.stdout


def test_a_limit_of_memory_has_a_unit(forerun, programs):
    """80 GB is what a GPU is sold as having, 74.5 GiB."""
    ask = ("plan", "--programs", "runs", *CLUSTER, "--json")
    limits = {
        text: record_of(forerun(*ask, "--memory-limit", text))["memory_limit_gib"]
        for text in ("74.5", "74.5GiB", "80GB", "76288 MiB")
    }
    assert limits == {"74.5": 74.5, "74.5GiB": 74.5, "80GB": pytest.approx(80e9 / 2**30), "76288 MiB": 74.5}


def test_plan_exits_with_3_if_no_program_fits(forerun, programs):
    done = forerun("plan", "--programs", "runs", *CLUSTER, "--memory-limit", 2)
    assert done.returncode == 3
    assert "Nothing fits" in done.stdout


def test_plan_exits_with_2_if_no_program_can_be_read(forerun, programs):
    for path in programs.iterdir():
        path.write_bytes(b"torn")
    done = forerun("plan", "--programs", "runs", *CLUSTER)
    assert done.returncode == 2
    assert done.stderr.startswith("error: runs: none of 4 programs can be predicted")


# -- bad input ---------------------------------------------------------------------------------------------------------

PLAN_ASK = ("plan", "--programs", "runs", *CLUSTER)
BAD = [
    (("predict", *CLUSTER), "give a model, a saved program with --program, or a tool's file with --recipe"),
    (("predict", "llama-3.1-8b", *ASK), "not both"),
    (("predict", "--program", "missing.program", *CLUSTER), "missing.program: can't be read"),
    (("predict", "--program", "runs/notes.txt", *CLUSTER), "notes.txt: damaged or not a saved Program"),
    (("predict", "--program", "fsdp.program", "--cluster", "h900"), "h900"),
    (("predict", *ASK, "--tp", 2, "--seq-len", 5), "--tp, --seq-len: a saved program has its own plan"),
    (("predict", *ASK, "--no-compile"), "--compile: a saved program has its own plan"),
    (("predict", *ASK, "--gpus", 0), "at least 1"),
    (("predict", "--program", "runs/tp.npz", *CLUSTER, "--gpus", 9), "9 GPUs are not a multiple of 2"),
    (("predict", *ASK, "--tokens-per-step", 0), "tokens per step must be at least 1"),
    (("predict", *ASK, "--memory-limit", 500), "memory limit of 500"),
    (("predict", *ASK, "--network", "switch:4@450/300ns"), "4 NPUs"),
    (("predict", *ASK, "--kernel-profile", "nothing.csv"), "nothing.csv: can't be read"),
    (("predict", *ASK, "--network-profile", "bad.csv"), "bad.csv, line 2: column time_us: expected a number above 0"),
    (("predict", *ASK, "--memory-snapshot", "nowhere/m.pickle"), "nowhere/m.pickle"),
    (("predict", "llama-3.1-8b", *CLUSTER, "--seq-len", 512, "--tokens-per-step", 5), "--tokens-per-step: only with"),
    (("simulate", *CLUSTER), "--program"),
    (("simulate", *ASK, "--rank-class", "stage 9"), "rank class 'stage 9'"),
    (("simulate", *ASK, "--depth", 0), "--depth"),
    (("plan", *CLUSTER), "give a model, a tool's file with --recipe, or saved programs with --programs"),
    (("plan", "llama-3.1-8b", *PLAN_ASK[1:]), "not both"),
    (("plan", "llama-3.1-8b", *CLUSTER, "--gpus", 8), "--seq-len, --global-batch missing"),
    (("plan", "--programs", "runs"), "--cluster is missing"),
    (("plan", "--programs", "nowhere", *CLUSTER), "nowhere: can't be read"),
    (("plan", "--programs", ".ci", *CLUSTER), ".ci: it has no Program"),
    ((*PLAN_ASK, "--tp", 2, "--exhaustive"), "--tp, --exhaustive: not with --programs"),
    ((*PLAN_ASK, "--objective", "speed"), "objective must be one of time, tokens, cost, memory"),
    ((*PLAN_ASK, "--memory-limit", "80XB"), "--memory-limit 80XB: expected GiB (70) or a size such as 74.5GiB or 80GB"),
    (("plan", "llama-3.1-8b", *CLUSTER, "--tokens-per-step", 5), "--tokens-per-step: only with --programs"),
    ((*PLAN_ASK, "--workers", 0), "workers must be at least 1"),
    ((*PLAN_ASK, "--csv", "nowhere/all.csv"), "nowhere"),
]


@pytest.mark.parametrize(("arguments", "names"), BAD, ids=lambda value: " ".join(map(str, value))[:60])
def test_bad_input_about_programs_is_one_line(programs, tmp_path, monkeypatch, capsys, arguments, names):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("collective,ranks,bytes,time_us\nall_reduce,8,1,soon\n")
    (tmp_path / ".ci").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    assert run(list(map(str, arguments))) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("error: ")
    assert written.err.count("\n") == 1
    assert names in written.err
    assert {path.name for path in tmp_path.iterdir()} == before
