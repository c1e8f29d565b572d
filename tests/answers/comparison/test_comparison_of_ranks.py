"""Profiles of several ranks, each beside the pipeline stage that it belongs to; a traced script as the prediction."""

import json
from dataclasses import replace

import pytest
from command_here import run_here
from kineto_writer import perturbed, write_kineto

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.comparison.compare import compare
from forerun.answers.comparison.verdict import verdict
from forerun.answers.profile.imported import import_step
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_any
from forerun.describe.plan.complete import complete_plan
from forerun.sources.profile.read import read_profiles

CLUSTER = load_cluster("h100-sxm")
PLAN = {"pp": 4, "dp_shard": 2, "seq_len": 512}
OPTIONS = ["--model", "gpt2-small", "--pp", "4", "--dp-shard", "2", "--seq-len", "512", "--global-batch", "16"]


@pytest.fixture(scope="module")
def pipeline():
    plan = complete_plan(dict(PLAN), n_gpus=8, global_batch=16)
    return simulate_setup(Setup(load_any("gpt2-small"), plan, CLUSTER))


def _profiles(folder, simulation, factor, stages=range(4)):
    """Rank 2 n is of stage n; the products of the head, which the last stage has, take `factor` times as long."""
    ops = simulation.program.ops
    slow = lambda row: factor if ops.is_gemm[row] and ops.name[row].startswith("head") else 1.0  # noqa: E731
    timeline, issue_ps = perturbed(simulation, slow)
    files = [
        write_kineto(folder / f"rank-{2 * n}.json", simulation, timeline, issue_ps, rank_class=n, rank=2 * n)
        for n in stages
    ]
    return files, timeline


def test_stages_as_predicted_differ_in_nothing(pipeline, tmp_path):
    files, _ = _profiles(tmp_path, pipeline, 1.0)
    found = compare(import_step(read_profiles(files)), pipeline, CLUSTER.device.name)
    assert [(one.rank, one.rank_class) for one in found.ranks] == [(0, 0), (2, 1), (4, 2), (6, 3)]
    assert found.rank.rank_class == pipeline.slowest
    for one in found.ranks:
        assert one.work_s[0] == pytest.approx(one.work_s[1], rel=1e-3)
        assert max(abs(part.lost_s) for part in one.parts) < 1e-3 * found.predicted_s


def test_a_slow_last_stage_is_found_and_the_others_wait_for_it(pipeline, tmp_path):
    files, timeline = _profiles(tmp_path, pipeline, 4.0)
    found = compare(import_step(read_profiles(files)), pipeline, CLUSTER.device.name)
    assert found.measured_s == pytest.approx(timeline.end_of_step_ps / 1e12, rel=1e-3)
    assert found.rank.rank == 6
    assert ", as rank 6 (stage 3) shows, which waits least: " in verdict(found)
    assert found.parts[0].part == "product"
    for one in found.ranks:
        lost_s = sum(part.lost_s for part in one.parts)
        assert lost_s == pytest.approx(found.measured_s - found.predicted_s, abs=1e-9)
        if one.rank != 6:
            assert one.work_s[0] == pytest.approx(one.work_s[1], rel=1e-3)
            assert one.parts[0].part == "waiting"


def test_one_stage_alone_is_compared_with_the_stage_that_it_is_of(pipeline, tmp_path):
    files, _ = _profiles(tmp_path, pipeline, 1.0, stages=[1])
    found = compare(import_step(read_profiles(files)), pipeline, CLUSTER.device.name)
    assert found.rank.stage == "stage 1"


def test_ranks_in_another_order_than_those_of_the_plan_are_said(pipeline, tmp_path):
    files, _ = _profiles(tmp_path, pipeline, 1.0)
    plan = replace(pipeline.subject.plan, mesh_order="pp-tp-cp-dp_shard-dp_replicate")
    other = simulate_setup(Setup(load_any("gpt2-small"), plan, CLUSTER))
    found = compare(import_step(read_profiles(files)), other, CLUSTER.device.name)
    assert "rank 6 is of stage 2 and has kernels like those of stage 3; is --mesh-order the run's?" in found.notes


def test_the_files_of_all_stages_correct_the_prediction(pipeline, tmp_path):
    files, timeline = _profiles(tmp_path, pipeline, 4.0)
    written = [text for name in ("anchor", "kernel-profile") for text in (f"--{name}-out", str(tmp_path / name))]
    done = run_here(None, "profile", "compare", *map(str, files), *OPTIONS, *written, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["slowest_rank"] == 6
    assert [one["stage"] for one in record["ranks"]] == [f"stage {n}" for n in range(4)]
    assert record["corrected_step_s"] == pytest.approx(timeline.end_of_step_ps / 1e12, rel=0.02)


def test_the_console_and_the_page_list_the_ranks(pipeline, tmp_path):
    files, _ = _profiles(tmp_path, pipeline, 4.0)
    page = tmp_path / "page.html"
    text = run_here(None, "profile", "compare", *map(str, files), *OPTIONS, "--report", str(page)).stdout
    for shown in (text, page.read_text()):
        assert "Each rank beside its stage" in shown
        assert "rank 6 (stage 3)" in shown


SCRIPT = """
import sys, torch
width = int(sys.argv[1])
model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(4)]).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(2048, width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_traced_script_is_the_prediction(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_here(tmp_path, "trace", "train.py", "--device", "h100", "-o", "step.program", "--", "1024")
    assert done.returncode == 0, done.stderr
    from forerun.answers.analysis.predict_program import predict_program, read_program

    traced = predict_program(read_program(tmp_path / "step.program"), CLUSTER, whole_timeline=True)
    file = write_kineto(tmp_path / "rank-0.json", traced, *perturbed(traced))
    done = run_here(tmp_path, "profile", "compare", str(file), "--script", "train.py 1024")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("as fast as predicted")


BAD = [
    (["--script", 'a "b'], '--script a "b: No closing quotation'),
    (["--script", "-m"], "name a script, or a module after -m"),
    (["--script", "missing.py"], "missing.py: no such script"),
    (["--script", "a.py", "--tp", "2"], "--tp: a script has its own plan"),
    (
        ["--script", "a.py", "--program", "b"],
        "give one of --model with a plan, a saved program with --program, or --script",
    ),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_options_end_in_one_line(pipeline, tmp_path, options, words):
    (file,), _ = _profiles(tmp_path, pipeline, 1.0, stages=[0])
    done = run_here(tmp_path, "profile", "compare", str(file), *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
