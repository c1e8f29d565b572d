"""`forerun profile` as users type it."""

import csv
import json

import pytest
from profile_files import host, kernel, launch, write_profile

from forerun.interfaces.cli.main import run

STEP = [
    host("ProfilerStep#0", 0, 100, "user_annotation"),
    host("aten::mm", 10, 40),
    launch(20, 10, 1),
    kernel("gemm", 40, 60, 1),
]


@pytest.fixture
def file(tmp_path):
    return str(write_profile(tmp_path / "rank0.json.gz", STEP, deviceProperties=[{"name": "NVIDIA A100"}]))


def test_info_says_what_a_file_holds(file, capsys):
    assert run(["profile", "info", file]) == 0
    text = capsys.readouterr().out
    assert "rank 0 of 2" in text
    assert "NVIDIA A100" in text
    assert "1 kernels, 0 copies" in text
    assert "lacks: no memory events" in text
    assert run(["profile", "info", file, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["profiles"]
    assert (record["kernels"], record["mean_step_s"]) == (1, 1e-4)


def test_analyze_prints_tables_and_writes_them(file, tmp_path, capsys):
    folder = tmp_path / "tables"
    assert run(["profile", "analyze", file, "--csv", str(folder)]) == 0
    assert "Critical path of rank 0, ProfilerStep 0: 100 us" in capsys.readouterr().out.replace("90.0", "100")
    rows = list(csv.DictReader((folder / "temporal_breakdown.csv").open()))
    assert rows[0]["compute_time(us)"] == "60.0"
    assert run(["profile", "analyze", file, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["comm_comp_overlap"] == [{"rank": 0, "comp_comm_overlap_pctg": None}]
    assert record["critical_path_summary"][0]["annotation"] == "ProfilerStep"


def test_the_critical_path_of_another_annotation(file, capsys):
    assert run(["profile", "analyze", file, "--annotation", "nothing"]) == 0
    assert "no event is named nothing" in capsys.readouterr().out
    assert run(["profile", "analyze", file, "--instance", "3"]) == 2
    assert "instance 3 is not among the 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["info", "analyze"])
def test_a_broken_file_is_one_line(tmp_path, capsys, command):
    path = tmp_path / "broken.json"
    path.write_text('{"traceEvents": [{"ph": "X"')
    assert run(["profile", command, str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ends at byte 27")
    assert error.count("\n") == 1


def test_a_step_is_imported_and_predicted(file, tmp_path, capsys):
    program = str(tmp_path / "step.program")
    assert run(["profile", "import", file, "-o", program]) == 0
    assert "replayed  100 us (+0.00%)" in capsys.readouterr().out
    assert run(["predict", "--program", program, "--cluster", "a100-sxm-80gb", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["step_time_s"] == pytest.approx(1e-4)
    assert "memory_bound" not in record["breakdown"]  # a product by its name, as the file tells no sizes
    assert record["breakdown"]["matmul"] > 4e-5
    assert run(["profile", "import", file, "-o", program, "--step", "4"]) == 2
    assert "has no step ProfilerStep#4" in capsys.readouterr().err


def test_a_prediction_from_a_gpu_that_forerun_does_not_know_says_so(tmp_path, capsys):
    gpu = [{"name": "NVIDIA GeForce RTX 2080 Ti", "totalGlobalMem": 11 * 10**9}]
    file = str(write_profile(tmp_path / "rank0.json", STEP, deviceProperties=gpu))
    program = str(tmp_path / "step.program")
    warned = []
    for device in ([], ["--device", "v100-sxm2-32gb"]):
        assert run(["profile", "import", file, "-o", program, *device]) == 0
        capsys.readouterr()
        assert run(["predict", "--program", program, "--cluster", "h100-sxm", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        warned.append(any("RTX 2080 Ti, which Forerun does not know" in one for one in record["warnings"]))
    assert warned == [True, False]
