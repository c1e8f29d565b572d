"""What commands do with their answers, which stand-ins give here: exit codes, what is printed, what work is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace as Hand

import pytest
from command_here import run_here

from forerun.answers.jobs.placement import Shape
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates
from forerun.interfaces.cli import (
    calibrate,
    cluster,
    doctor,
    dse,
    experiment,
    fit,
    measure_step,
    plan,
    profile,
    profile_compare,
    run,
    simulate,
    stragglers,
    validate,
)
from forerun.interfaces.cli.collective import SizeOptions


def stand_in(monkeypatch, module, **answers):
    """Has functions of a command's module return these answers."""
    for name, answer in answers.items():
        monkeypatch.setattr(module, name, lambda *_, answer=answer, **__: answer)


def of_plans(fits):
    ranking = Hand(fitting=[1] if fits else [])
    return plan, {"rank_programs": ranking, "programs_record": {}}, ("plan", "--programs", ".", "--cluster", "h100-sxm")


def of_points(fits):
    pairs = [Hand(ranked_within_limit=each, workload="w", system="s") for each in ([], ["point"] if fits else [])]
    answers = {"read_exploration": None, "explore": Hand(pairs=pairs), "exploration_record": {}}
    return dse, answers, ("dse", "x.yaml", "--out", "folder", "--no-plot")


def of_a_run(fits):
    answers = {"run": Hand(prediction=Hand(fits=fits)), "_request": None, "_show": None}
    return experiment, answers, ("experiment", "run", "x.yaml", "--must-fit", "--no-analysis")


def of_a_scale(fits):
    points = [Hand(fits=False), Hand(fits=fits)]
    answers = {"scale": Hand(points=points), "_request": None, "_finish": None}
    return experiment, answers, ("experiment", "scale", "x.yaml", "--nodes", "1")


def of_rows(good):
    report = {"rows": {"faults": 0 if good else 1}}
    answers = {
        "read_measurements": [], "load_architectures": {}, "read_hardware": {}, "run": ["row"], "build_report": report,
    }  # fmt: skip
    return validate, answers, ("validate", "x.csv", "--models", "m", "--hardware", "h")


@pytest.mark.parametrize("kind", [of_plans, of_points, of_a_run, of_a_scale, of_rows])
@pytest.mark.parametrize("is_good", [True, False])
def test_the_exit_code_says_what_was_found(kind, is_good, monkeypatch, tmp_path):
    module, answers, words = kind(is_good)
    stand_in(monkeypatch, module, **answers)
    done = run_here(tmp_path, *words, "--json")
    assert (done.returncode, done.stderr) == (0 if is_good else 1 if kind is of_rows else 3, "")


def test_a_script_is_measured_or_traced_with_its_own_arguments(monkeypatch, tmp_path):
    jobs, runs = [], []
    (tmp_path / "train.py").write_text("")
    stand_in(monkeypatch, measure_step, predict_program=Hand(prediction=None), figures=[], step_record={})
    monkeypatch.setattr(measure_step, "trace_job", lambda job, limits: (jobs.append(job), (None, 0.0))[1])
    on_gpu = Hand(measure_step=lambda *asked: runs.append(asked))
    monkeypatch.setattr(measure_step, "import_module", lambda name: on_gpu)
    command = ("measure", "step", "train.py", "--cluster", "h100-sxm", "--json")
    for has_gpu, more in ((False, ()), (True, ("--world-size", "16", "--", "--layers", "4"))):
        stand_in(monkeypatch, measure_step, _has_gpu=has_gpu)
        assert run_here(tmp_path, *command, *more).returncode == 0
    first, second = jobs
    assert (first.target, first.arguments, first.world_size, first.gpus_per_node) == ("train.py", (), 1, 8)
    assert (second.arguments, second.world_size) == (("--layers", "4"), 16)
    assert runs == [("train.py", ["--layers", "4"], 3, 10)]
    monkeypatch.setenv("RANK", "1")  # only the first rank of torchrun predicts and prints
    assert run_here(tmp_path, *command).stdout == ""
    assert len(jobs) == 2


def test_a_range_of_sizes_ends_with_its_last_one_or_is_refused():
    assert SizeOptions(first="1", last="10", factor=1.01).bytes() == list(range(1, 11))
    assert SizeOptions(first="1KiB", last="1MiB", factor=float("inf")).bytes() == [1024]
    assert SizeOptions(["3B"], "1KiB", "4KiB").bytes() == [3, 1024, 2048, 4096]
    thousand = SizeOptions(first="1", last="1000", factor=1.0005).bytes()
    assert thousand == list(range(1, 1001))
    with pytest.raises(ForerunError, match="--from 1 --to 1001: 1,001 sizes; at most 1,000 are simulated"):
        SizeOptions(first="1", last="1001", factor=1.0005).bytes()


def test_options_that_would_change_nothing_are_refused(tmp_path, monkeypatch):
    stand_in(monkeypatch, profile_compare, read_memory_snapshot=None)
    memory = ("profile", "memory", "x.pickle")
    for words, told in (
        ((*memory, "--seq-len", "8"), "--seq-len: only with --model, --program or --script"),
        ((*memory, "--tp", "2", "--cluster", "h100-sxm"), "--tp, --cluster: only with"),
        ((*memory, "--model", "gpt2-small"), "profile memory: name the cluster of the prediction with --cluster"),
        ((*memory, "--model", "gpt2-small", "--program", "x.program"), "profile memory: give only one of"),
        ((*memory, "--program", "p", "--cluster", "h100-sxm", "--seq-len", "8"), "--seq-len: a saved program has its"),
        ((*memory, "--script", "s", "--cluster", "h100-sxm", "--tp", "8"), "--tp: a script has its own plan"),
        (("profile", "compare", "x.json"), "profile compare: give one of"),
        (("experiment", "run", "--example", "1", "--scaling", "--must-fit"), "--must-fit: it goes with a run only"),
    ):
        done = run_here(tmp_path, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {told}"), done.stderr


def shows(module, words, works, prints, record, files=()):
    """A command, its functions that work (with answers), that prints, that makes the record, and that write files."""
    return pytest.param(module, words, works, prints, record, files, id=" ".join(words[:2]))


NODE = Shape(1, 1, 8)


@dataclass(frozen=True)
class Asked:
    """Jobs of a cluster."""

    shape: Shape = NODE
    policies: tuple[str, ...] = ("fifo",)
    placement: str = "packed"


OF_FILES = {"--csv", "--report", "--pictures", "--trace", "--write"}
COSTS = {"read_steps": None, "straggler_costs": None, "step_rows": None, "costs_document": None}
JOBS = {
    "read_cluster": Asked(), "compare": None, "job_rows": None, "schedules_document": None, "schedules_pictures": None,
    "drawing_is_possible": True,
}  # fmt: skip
RUNS = {
    "load_run": None, "load_alternatives": [], "study_run": Hand(outcomes=None, request=None), "walk": None,
    "run_rows": None, "whole_run_document": None, "whole_run_pictures": None, "drawing_is_possible": True,
}  # fmt: skip
STEP = Hand(program="program", flat=None, timeline=None, costs=Hand(issue_ps=None), slowest=0)
FIT = {
    "read_measurements": [], "load_architectures": None, "read_hardware": None, "load_registry": None, "steps_of": [],
    "StepTimes": None, "StepFit": Hand(fit=Hand(constants=None, posterior=None)), "step_fit_csv": "a,b\n",
}  # fmt: skip
EXPLORED = Hand(pairs=[Hand(workload="w", system="s", ranked_within_limit=True)])


@pytest.mark.parametrize(
    ("module", "words", "works", "prints", "record", "files"),
    [
        shows(profile, ("profile", "info", "x.json"), {"read_profiles": []}, "print_facts", "facts_record"),
        shows(
            profile, ("profile", "analyze", "x.json", "--csv", "tables"),
            {"read_profiles": [], "analyze_profiles": 0}, "print_analysis", "analysis_record", ["write_analysis"],
        ),
        shows(
            profile, ("profile", "import", "x.json", "-o", "x.program"),
            {"read_profiles": [], "import_step": STEP}, "print_import", "import_record", ["save"],
        ),
        shows(
            profile_compare, ("profile", "memory", "x.pickle"), {"read_memory_snapshot": None},
            "print_snapshot", "snapshot_record",
        ),
        shows(
            simulate, ("simulate", "--program", "p", "--cluster", "h100-sxm", "--trace", "t"),
            {"simulate_file": STEP}, "print_timeline", "timeline_record", ["write_trace"],
        ),
        shows(
            stragglers, ("stragglers", "x.parquet", "--csv", "c", "--report", "r"), COSTS,
            "print_costs", "costs_record", ["write_rows", "write_page"],
        ),
        shows(
            cluster, ("cluster", "x.yaml", "--csv", "c", "--report", "r", "--pictures", "p"), JOBS,
            "print_schedules", "schedules_record", ["write_rows", "write_page", "write_pictures"],
        ),
        shows(
            run, ("run", "x.yaml", "--csv", "c", "--report", "r", "--pictures", "p"), RUNS, "print_study",
            "study_record", ["write_rows", "write_page", "write_pictures"],
        ),
        shows(
            fit, ("fit", "x.csv", "--models", "m", "--hardware", "h", "--write"), FIT,
            "print_step_fit", "step_fit_record", ["write_constants"],
        ),
        shows(
            dse, ("dse", "x.yaml", "--out", "folder"),
            {"read_exploration": None, "explore": EXPLORED, "drawing_is_possible": True}, "print_exploration",
            "exploration_record", ["write_pareto_plot"],
        ),
        shows(
            calibrate, ("calibrate", "h100-sxm", "--kernels", "k.csv"), {"read_samples": None, "fit": None},
            "print_calibration", "calibration_record",
        ),
        shows(doctor, ("doctor",), {"examine": None}, "print_doctor", "doctor_record"),
    ],
)  # fmt: skip
def test_a_command_prints_text_or_one_object_and_writes_its_files(
    module, words, works, prints, record, files, monkeypatch, tmp_path
):
    written = []
    stand_in(monkeypatch, module, **works)
    monkeypatch.setattr(module, prints, lambda out, *_, **__: out.print("as text"))
    monkeypatch.setattr(module, record, lambda *_, **__: {"as": "an object"})
    for name in files:
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: written.append(name))
    text, an_object = (run_here(tmp_path, *words, *more) for more in ((), ("--json",)))
    assert (text.returncode, text.stderr, text.stdout.splitlines()[:1]) == (0, "", ["as text"])
    assert (an_object.returncode, an_object.stderr) == (0, "")
    assert json.loads(an_object.stdout) == {"schema_version": 1, "as": "an object"}
    assert sorted(written) == sorted([*files, *files])
    plain = [word for word, before in zip(words, ("", *words), strict=False) if not {word, before} & OF_FILES]
    written.clear()
    assert run_here(tmp_path, *plain).returncode == 0
    assert {"save", "write_pareto_plot"} >= set(written)


def test_a_script_is_traced_as_it_is_written_in_one_option(monkeypatch):
    jobs = []
    monkeypatch.setattr(profile_compare, "trace_job", lambda job, limits: (jobs.append(job), ("program", 0.0))[1:][0])
    where, under = Hand(node_size=4, device=Hand(name="h100-sxm-80gb")), Hand(tokens_per_step=4096)
    assert profile_compare._traced("train.py --name 'a b'", 16, where, under) == "program"
    assert profile_compare._traced("-m pkg.train -m", 8, where, under) == "program"
    plain, module = jobs
    assert (plain.target, plain.arguments, plain.is_module) == ("train.py", ("--name", "a b"), False)
    assert (plain.world_size, plain.gpus_per_node, plain.device, plain.tokens_per_step) == (
        16,
        4,
        "h100-sxm-80gb",
        4096,
    )
    assert (module.target, module.arguments, module.is_module, module.world_size) == ("pkg.train", ("-m",), True, 8)
    for script, told in (
        ("", "name a script, or a module after -m"),
        ("-m", "name a script"),
        ("'a", "No closing quot"),
    ):
        with pytest.raises(ForerunError, match=rf"--script .*: {told}"):
            profile_compare._traced(script, 8, where, under)


def test_what_corrects_a_prediction_is_written_and_predicted_again(monkeypatch):
    written = []
    made = Hand(rates="measured rates")
    stand_in(monkeypatch, profile_compare, corrections=made, KernelRates="usual")
    monkeypatch.setattr(profile_compare, "write_corrections", lambda *asked: written.append(asked))
    monkeypatch.setattr(profile_compare, "read_measured", lambda kernels, network: kernels or network)
    monkeypatch.setattr(profile_compare, "with_host", lambda step, rates, found: (rates, step("host")))
    monkeypatch.setattr(profile_compare, "write_anchor", lambda *asked: written.append(asked))

    def predictor(rates, measured):
        return Hand(prediction=Hand(step_time_s=(rates, measured)))

    predictor.under = Hand(measured=lambda: "of the user")
    files = profile_compare.CorrectingFiles
    assert profile_compare._write("found", predictor, files(), "h100") == {}
    assert written == []
    of_kernels = profile_compare._write("found", predictor, files(kernel_profile_out="k"), "h100")
    assert of_kernels == {"corrected_step_s": ("usual", "k")}
    anchored = profile_compare._write("found", predictor, files(anchor_out="a"), "h100")
    rates = ("measured rates", ("host", "of the user"))
    assert anchored == {"corrected_step_s": (rates, "of the user")}
    assert written == [(made, "k", None), (made, None, None), ("a", "found", rates, "h100")]


def test_a_calibration_takes_files_or_tables_and_keeps_what_is_in_its_profile(monkeypatch, tmp_path):
    asked = []
    for name in ("read_tables", "read_samples", "of_source"):
        monkeypatch.setattr(calibrate, name, lambda *given, name=name: (asked.append((name, *given[1:])), name)[1])
    stand_in(monkeypatch, calibrate, network_times=None, network_csv="a,b\n", print_calibration=None)
    monkeypatch.setattr(calibrate, "fit", lambda cluster, samples: Hand(text=lambda old: f"{old}from {samples}\n"))
    command = ("calibrate", "h100-sxm", "--profile-out", "mine.yaml")
    for words in (
        ("--kernels", "k.csv"),
        ("--network", "n.csv", "--network-out", "n"),
        ("--tables", "t", "--table-device", "x"),
    ):
        assert run_here(tmp_path, *command, *words, "--source", "me").returncode == 0
    assert [name for name, *_ in asked] == ["read_samples", "of_source"] * 2 + ["read_tables", "of_source"]
    assert {each[1] for each in asked if each[0] == "of_source"} == {"me"}
    assert (tmp_path / "mine.yaml").read_text() == "from of_source\n" * 3
    assert (tmp_path / "n").read_text() == "a,b\n"
    for words in (
        (),
        ("--tables", "t"),
        ("--table-device", "x", "--kernels", "k"),
        ("--tables", "t", "--network", "n"),
    ):
        done = run_here(tmp_path, *command, *words)
        assert (done.returncode, done.stderr[:25]) == (2, "error: give measurements:")
    done = run_here(tmp_path, *command[:2], "--kernels", "k", "--profile-out", "mine.txt")
    assert done.stderr == "error: --profile-out mine.txt: a profile's file ends in .yaml or .yml; rename it\n"


@pytest.mark.parametrize(("stack", "told"), [("torchtitan", "torchtitan"), ("", None)])
def test_a_program_is_predicted_as_the_options_say(stack, told, monkeypatch):
    asked = []
    monkeypatch.setattr(profile_compare, "predict_program", lambda *given, **how: asked.append((given, how)))
    under = Hand(topology=lambda where: ("network of", where.name), tokens_per_step=4096)
    where = load_cluster("h100-sxm")
    predictor = profile_compare._Predictor(where, under, stack, program="program", gpus=16)
    predictor(KernelRates(), "measured")
    (((program, cluster), how),) = asked
    assert (program, cluster) == ("program", where)
    assert how == {
        "n_gpus": 16, "network": ("network of", "h100-sxm"), "measured": "measured", "tokens_per_step": 4096,
        "stack": told, "whole_timeline": True,
    }  # fmt: skip


def test_the_prediction_beside_a_snapshot_is_that_of_predict(monkeypatch, tmp_path):
    shown = []
    stand_in(monkeypatch, profile_compare, read_memory_snapshot=None)
    monkeypatch.setattr(
        profile_compare, "snapshot_record", lambda _, prediction, top: (shown.append(prediction), {})[1]
    )
    plan_of_it = ("--cluster", "h100-sxm", "--seq-len", "1024", "--dp-shard", "8", "--micro-batch", "2", "--json")
    assert run_here(tmp_path, "profile", "memory", "x.pickle", "--model", "gpt2-small", *plan_of_it).returncode == 0
    told = json.loads(run_here(tmp_path, "predict", "gpt2-small", *plan_of_it).stdout)
    for name in ("step_time_s", "peak_allocated_gib", "peak_reserved_gib", "n_gpus"):
        assert getattr(shown[0], name) == pytest.approx(told[name], rel=1e-6)
