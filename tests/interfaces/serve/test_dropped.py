"""Dropped files show what the commands show of them, and lead to no other file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_here import run_here
from profile_files import host, kernel, launch, write_profile
from saved_programs import plan_of, program_of
from starlette.testclient import TestClient

from forerun.common.errors import ForerunError
from forerun.core.program.storage import save
from forerun.interfaces.report.figures import seconds
from forerun.interfaces.serve import sealed as sealing
from forerun.interfaces.serve.sealed import sealed

SHARED = Path(__file__).parents[4] / "shared"
EXPERIMENT = """\
hardware: {gpu_model: A100-80GB, num_gpus_per_node: 4}
model: {preset: gpt2-small}
training: {num_nodes: 1, batch_size_per_gpu: 4}
"""
RUN = """\
gpus: 64
days: 2
step: {seconds: 2.0, tokens: 1000000}
checkpoint: {blocking_s: 5, load_s: 60}
"""
JOBS = """\
nodes: 2
jobs:
  - {name: first, gpus: 8, duration_s: 7200}
  - {name: second, gpus: 16, duration_s: 3600}
policies: [fifo, easy]
"""


SYSTEM = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "active-chunks-per-dimension": 1,
    "preferred-dataset-splits": 4,
    "all-reduce-implementation": ["ring"],
    "all-gather-implementation": ["ring"],
    "reduce-scatter-implementation": ["ring"],
    "all-to-all-implementation": ["ring"],
    "local-mem-bw": 1600,
    "peak-perf": 900,
    "roofline-enabled": 1,
}


def drop(client: TestClient, files: dict[str, bytes], cluster: str = "h100-sxm", nodes: str = "1") -> Any:
    query = [("cluster", cluster), ("nodes", nodes)]
    for name, content in files.items():
        query += [("name", name), ("size", str(len(content)))]
    answer = client.post("/api/files", params=query, content=b"".join(files.values()))
    assert "forerun-serve-" not in answer.text  # the server's own folder, into which it writes the files
    return answer


def words(document: dict[str, Any]) -> str:
    return json.dumps(document)


def test_a_program_is_predicted_as_the_command_predicts_it(client: TestClient, tmp_path: Path) -> None:
    save(program_of(plan_of(dp_shard=8)), tmp_path / "step.program")
    content = (tmp_path / "step.program").read_bytes()
    answer = drop(client, {"step.program": content})
    assert answer.status_code == 200, answer.text
    told = json.loads(
        run_here(tmp_path, "predict", "--program", "step.program", "--cluster", "h100-sxm", "--json").stdout
    )
    figures = {each[0]: each[1] for each in answer.json()["parts"][0]["entries"]}
    assert figures["peak memory, reserved"] == f"{told['peak_reserved_gib']:.1f} GiB"
    assert any(part.get("text") == "Timeline of a step" for part in answer.json()["parts"])


def test_an_experiment_is_run(client: TestClient) -> None:
    answer = drop(client, {"mine.yaml": EXPERIMENT.encode()})
    assert answer.status_code == 200, answer.text
    assert "a run of" in answer.json()["title"]


def test_jobs_of_a_cluster_are_scheduled(client: TestClient) -> None:
    answer = drop(client, {"jobs.yaml": JOBS.encode()})
    assert answer.status_code == 200, answer.text
    assert "fifo" in words(answer.json())


def test_a_whole_run_is_simulated(client: TestClient) -> None:
    answer = drop(client, {"run.yaml": RUN.encode()})
    assert answer.status_code == 200, answer.text
    assert "goodput" in words(answer.json())


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz"])
def test_a_profile_shows_what_the_commands_print(
    client: TestClient, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word for word: colours that the environment forces stay in the terminal, and brackets are no markup."""
    work = kernel("gemm[bold]", 8, 20, 1)
    path = write_profile(
        tmp_path / name, [host("aten::mm", 0, 10), launch(2, 4, 1), work, host("ProfilerStep#1", 0, 40)]
    )
    told = [run_here(tmp_path, "profile", how, name).stdout for how in ("info", "analyze")]
    monkeypatch.setenv("FORCE_COLOR", "1")
    answer = drop(client, {name: path.read_bytes()})
    assert answer.status_code == 200, answer.text
    shown = [part["text"] for part in answer.json()["parts"] if part["type"] == "code"]
    assert [text.split() for text in shown] == [text.split() for text in told]
    assert "gemm[bold]" in shown[1]


@pytest.mark.skipif(not (SHARED / "golden" / "stage").is_dir(), reason="no ../shared/golden/stage")
def test_traces_of_several_ranks_are_counted(client: TestClient) -> None:
    paths = sorted((SHARED / "golden" / "stage" / "small" / "dp1_tp1_pp4_sp1_fsdp0_ar1" / "et").glob("*.et"))
    answer = drop(client, {path.name: path.read_bytes() for path in paths})
    assert answer.status_code == 200, answer.text
    table = answer.json()["parts"][1]
    assert table["n_rows"] == len(paths) + 1


def test_a_trace_of_jobs_runs_on_the_nodes_that_the_page_says(client: TestClient, tmp_path: Path) -> None:
    text = "job_id,submit_time,gpus,duration\na,0,8,3600\nb,10,16,1800\nc,20,8,60\n"
    (tmp_path / "jobs.csv").write_text(text)
    answer = drop(client, {"jobs.csv": text.encode()}, nodes="2")
    assert answer.status_code == 200, answer.text
    told = json.loads(run_here(tmp_path, "cluster", "jobs.csv", "--nodes", "2", "--json").stdout)
    assert [row["policy"] for row in told["policies"]] == [row[0] for row in answer.json()["parts"][1]["rows"]]
    assert "--nodes 2" in words(answer.json())
    assert drop(client, {"jobs.csv": text.encode()}, nodes="0").status_code == 400


@pytest.mark.skipif(not (SHARED / "golden" / "stage").is_dir(), reason="no ../shared/golden/stage")
def test_a_case_is_replayed_as_the_command_replays_it(client: TestClient, tmp_path: Path) -> None:
    paths = sorted((SHARED / "golden" / "stage" / "small" / "dp1_tp1_pp4_sp1_fsdp0_ar1" / "et").glob("*.et"))
    files = {path.name: path.read_bytes() for path in paths} | {
        "system.json": json.dumps(SYSTEM).encode(),
        "network.yml": b"topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n",
    }
    answer = drop(client, files)
    assert answer.status_code == 200, answer.text
    (tmp_path / "et").mkdir()
    for name, content in files.items():
        (tmp_path / ("et" if name.endswith(".et") else "") / name).write_bytes(content)
    told = json.loads(run_here(tmp_path, "astra", "--case", ".", "--json").stdout)
    (system,) = told["systems"].values()
    table = next(part for part in answer.json()["parts"] if part["type"] == "table")
    last = max(each["wall_time"] for each in system["per_rank"].values())
    assert len(table["rows"]) == len(system["per_rank"]) == 4
    assert answer.json()["parts"][0]["entries"][0][1] == seconds(last * 1e-9)
    del files["system.json"]
    assert "system.json" in drop(client, files).json()["error"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.csv", b"a,b", "x.csv"),
        ("x.txt", b"hello", "expected a .program"),
        ("x.program", b"hello", "x.program"),
        ("x.yaml", b"a: [", "x.yaml"),
        ("x.json", b"{}", "x.json"),
        ("x.et", b"\xff\xff\xff", "x.et"),
        ("code.yaml", EXPERIMENT.replace("{preset: gpt2-small}", "{layers: 'own.py:make'}").encode(), "Python code"),
        ("..", b"a: 1", "file"),
    ],
)
def test_what_can_not_be_shown_is_refused_in_one_line(
    client: TestClient, name: str, content: bytes, expected: str
) -> None:
    answer = drop(client, {name: content})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert expected in error
    assert "\n" not in error
    assert "/tmp" not in error


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "..\\x.yaml", "a/b.yaml", "\0.yaml"])
def test_a_name_leads_nowhere(client: TestClient, name: str, tmp_path: Path) -> None:
    before = os.path.getmtime("/etc/passwd") if os.path.exists("/etc/passwd") else 0
    answer = drop(client, {name: b"never: read"})
    assert answer.status_code == 400
    assert before == (os.path.getmtime("/etc/passwd") if os.path.exists("/etc/passwd") else 0)


def test_a_file_that_names_another_file_is_refused(client: TestClient, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("job_id,gpus,duration\n1,8,100\n")
    answer = drop(client, {"jobs.yaml": f"nodes: 2\ntrace: {secret}\n".encode()})
    assert answer.status_code == 400
    assert "the page opens none" in answer.json()["error"]
    model = tmp_path / "model.yaml"
    model.write_text("layers: []")
    answer = drop(client, {"x.yaml": EXPERIMENT.replace("{preset: gpt2-small}", f"{{path: {model}}}").encode()})
    assert answer.status_code == 400


def test_sizes_that_are_not_those_of_the_body_are_refused(client: TestClient) -> None:
    answer = client.post("/api/files", params={"name": "a.yaml", "size": "9", "cluster": "h100-sxm"}, content=b"1")
    assert answer.status_code == 400


def test_a_sealed_thread_opens_its_folder_and_the_installed_code_only(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    own, other = tmp_path / "inside" / "a", tmp_path / "b"
    own.write_text("own")
    other.write_text("other")
    (tmp_path / "inside" / "link").symlink_to(other)
    with sealed(tmp_path / "inside"):
        assert own.read_text() == "own"
        assert Path(json.__file__).read_text()
        for path in (other, tmp_path / "inside" / ".." / "b", tmp_path / "inside" / "link"):
            with pytest.raises(ForerunError, match="names another file"):
                path.read_text()
    assert other.read_text() == "other"


def test_a_sealed_thread_opens_compiled_code_wherever_numba_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, usual, other = (tmp_path / name for name in ("named", "usual/numba", "usual/other"))
    for folder in (named, usual, other):
        folder.mkdir(parents=True)
        (folder / "code.nbi").write_text("code")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "usual"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(named))
    sealing._installed.cache_clear()
    try:
        with sealed(tmp_path / "inside"):
            assert [(folder / "code.nbi").read_text() for folder in (named, usual)] == ["code", "code"]
            with pytest.raises(ForerunError, match="names another file"):
                (other / "code.nbi").read_text()
    finally:
        sealing._installed.cache_clear()


@pytest.mark.parametrize(("kind", "name"), [("experiment", "/etc/passwd"), ("run", "./run.yaml"), ("other", "x")])
def test_presets_are_names_and_no_paths(client: TestClient, kind: str, name: str) -> None:
    assert client.post("/api/preset", json={"kind": kind, "name": name}).status_code == 400


def test_an_experiment_of_the_package_is_shown(client: TestClient) -> None:
    answer = client.post("/api/preset", json={"kind": "experiment", "name": "resnet50-a100"})
    assert answer.status_code == 200, answer.text
    assert any(part["type"] == "plot" for part in answer.json()["parts"])
