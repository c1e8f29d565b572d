"""The console command `forerun cluster` and the files that it reads."""

from __future__ import annotations

import csv
import json

import pytest

from forerun.answers.jobs.comparison import compare
from forerun.answers.jobs.description import cluster_of
from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.trace_file import read_jobs
from forerun.common.errors import ForerunError
from forerun.interfaces.cli.main import run
from forerun.interfaces.report.job_schedules import gantt

TRACES = {
    "tiresias": "job_id,num_gpu,submit_time,iterations,duration,interval\n0,1,5,606,164,30\n1,8,35,9,147,2\n",
    "philly": "timestamp,duration,num_gpus,gpu_time,cluster\n5,164,1,164,x\n35,147,8,1,y\n40,0,1,0,y\n",
    "acme": (
        "job_id,user,node_num,gpu_num,submit_time,duration\n"
        "a,u,1,1,2023-03-01 08:00:00+08:00,164\nb,u,1,8,2023-03-01 08:00:30+08:00,147\n"
    ),
    "openb": ("name,num_gpu,creation_time,deletion_time,scheduled_time\np0,1,5,170,6\np1,8,35,190,43\np2,0,50,60,51\n"),
}


@pytest.mark.parametrize("name", list(TRACES))
def test_traces_of_four_kinds_hold_the_same_jobs(name, tmp_path):
    file = tmp_path / f"{name}.csv"
    file.write_text(TRACES[name])
    trace = read_jobs(file)
    assert [(job.gpus, job.submit_s, job.duration_s) for job in trace.jobs] == [(1, 0, 164), (8, 30, 147)]
    assert trace.left_out == (name in ("philly", "openb"))


def test_a_share_of_a_gpu_counts_as_a_whole_one_and_the_command_says_so(tmp_path, capsys):
    file = tmp_path / "openb.csv"
    file.write_text(
        "name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time\n"
        "p0,1,460,5,170,6\np1,8,1000,35,190,43\np2,0,0,50,60,51\n"
    )
    assert [read_jobs(file).shares, read_jobs(file).left_out] == [1, 1]
    run(["cluster", str(file), "--nodes", "2", "--policy", "fifo"])
    assert "1 job asks for a share of a GPU (gpu_milli)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "no column for gpus"),
        ("num_gpus,timestamp\n1,2\n", "no column for the duration"),
        ("num_gpus,timestamp,duration\n1,soon,3\n", "line 2: expected seconds or a date and time, got 'soon'"),
        ("num_gpus,timestamp,duration\nx,1,3\n", "line 2: num_gpus: expected a number, got 'x'"),
        ("num_gpus,timestamp,duration\n0,1,3\n", "no job has a GPU and a duration"),
        ("num_gpus,timestamp,duration,gpu_milli\n1,1,3,x\n", "line 2: gpu_milli: expected a number, got 'x'"),
        ("num_gpus,timestamp,duration\n1,1,nan\n", "line 2: duration: expected a number, got 'nan'"),
    ],
)
def test_what_is_wrong_in_a_trace_is_one_line(text, words, tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(ForerunError) as error:
        read_jobs(file)
    assert words in str(error.value)


def test_a_trace_is_scheduled_and_written(tmp_path, capsys):
    trace, table, page = tmp_path / "t.csv", tmp_path / "jobs.csv", tmp_path / "page.html"
    trace.write_text(TRACES["tiresias"])
    files = ["--csv", str(table), "--report", str(page)]
    assert run(["cluster", str(trace), "--nodes", "1", "--policy", "fifo,srtf", "--json", *files]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in record["policies"]] == ["fifo", "srtf"]
    assert record["policies"][0]["makespan_s"] == 311 - 0
    rows = list(csv.DictReader(table.open()))
    assert {(row["policy"], row["job"], row["start_s"]) for row in rows} >= {("fifo", "1", "164.0")}
    assert "GPUs in use" in page.read_text()
    assert run(["cluster", str(trace)]) == 2
    assert "a trace has no cluster; give --nodes" in capsys.readouterr().err


def test_a_file_says_cluster_jobs_and_policies(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text(
        "nodes: 2\npolicies: [fifo, fair-share]\njobs:\n"
        "  - {name: a, gpus: 8, duration_s: 100, group: one}\n  - {name: b, gpus: 16, duration_s: 50, group: two}\n"
    )
    assert run(["cluster", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "2 jobs on 16 GPUs in 2 nodes" in shown
    assert "mean JCT of group" in shown
    assert run(["cluster", str(file), "--policy", "lifo"]) == 2
    assert "did you mean fifo" in capsys.readouterr().err


def test_a_job_may_be_a_plan():
    plan = {"model": "llama-3.1-8b", "cluster": "h100-sxm", "steps": 100, "fields": {"seq_len": 8192}}
    found = cluster_of({"nodes": 1, "jobs": [{"name": "a", "gpus": 8, "plan": plan}]}, "x").jobs[0]
    assert 50 < found.duration_s < 1_000


def test_drawn_jobs_follow_their_distributions():
    drawn = {"number": 20_000, "per_hour": 60.0, "median_s": 600.0, "sigma": 1.0, "gpus": {1: 3.0, 8: 1.0}}
    jobs = cluster_of({"nodes": 1, "drawn": drawn}, "x").jobs
    assert jobs[-1].submit_s / len(jobs) == pytest.approx(60, rel=0.05)
    assert sorted(job.duration_s for job in jobs)[10_000] == pytest.approx(600, rel=0.05)
    assert sum(job.gpus == 8 for job in jobs) / len(jobs) == pytest.approx(0.25, abs=0.02)
    with pytest.raises(ForerunError, match="give one of trace"):
        cluster_of({"nodes": 1}, "x")


def test_each_job_has_a_lane_with_its_periods(tmp_path, capsys):
    """Under srtf the short job stops the long one; two jobs of one name have lanes of their own."""
    request = cluster_of(
        {
            "nodes": 1,
            "jobs": [
                {"name": "twin", "gpus": 8, "duration_s": 7200},
                {"name": "twin", "gpus": 8, "submit_s": 1800, "duration_s": 1800},
            ],
            "policies": ["srtf"],
        },
        "x",
    )
    (outcome,) = compare(request)
    waits, runs = gantt(outcome).data
    assert len(set(waits["y"])) == 2
    assert list(zip(runs["y"], runs["base"], runs["x"], strict=True)) == [
        (waits["y"][0], 0.0, 0.5),
        (waits["y"][0], 1.0, 1.5),
        (waits["y"][1], 0.5, 0.5),
    ]
    assert waits["x"] == [2.5, 0.5]


def test_pictures_are_written(tmp_path, capsys):
    trace = tmp_path / "t.csv"
    trace.write_text(TRACES["tiresias"])
    assert run(["cluster", str(trace), "--nodes", "1", "--policy", "fifo", "--pictures", str(tmp_path / "p")]) == 0
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {"gpus-in-use.png", "completion-times.png", "jobs-fifo.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "p").iterdir())


def test_a_file_says_failures_and_quotas(tmp_path):
    said = {"per_1000_node_days": 6.5, "repair_hours": 2, "checkpoint_minutes": 30, "seed": 7}
    data = {"nodes": 2, "jobs": [{"name": "a", "gpus": 1, "duration_s": 1}], "failures": said, "quotas": {"x": 4}}
    request = cluster_of(data, "x")
    assert request.terms.failures == NodeFailures(6.5, 7200.0, 1800.0, 7)
    assert request.terms.quotas == {"x": 4}
