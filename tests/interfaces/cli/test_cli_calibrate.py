"""`forerun calibrate`: from files of measurements to a profile that a prediction uses."""

import json

import pytest

RANKS = "".join(f"#  Rank  {rank} Group  0 Pid  {rank} on  n1 device  {rank} [0x0] GPU\n" for rank in range(8))
HEAD = (
    "# Collective test starting: all_gather_perf\n# Using devices\n"
    + RANKS
    + "# size count type redop root time algbw\n"
)
SIZES = [2**power for power in range(12, 29)]


def log(latency_us: float, busbw: float) -> str:
    times = [(size, latency_us + size * 0.875 / (busbw * 1e3)) for size in SIZES]
    return HEAD + "".join(f"{s} {s // 4} float none -1 {t:.4f} {s / t / 1e3:.2f}\n" for s, t in times)


@pytest.fixture
def refitted(forerun, tmp_path):
    (tmp_path / "run.log").write_text(log(20, 200))
    done = forerun(
        *("calibrate", "h100-sxm", "--network", "run.log", "--profile-out", "mine.yaml", "--network-out", "net.csv")
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "cluster.yaml").write_text("device: {like: h100-sxm, cost_profile: mine.yaml}\n")
    return done.stdout


def test_a_log_of_nccl_tests_becomes_a_profile_that_predictions_use(forerun, tmp_path, refitted):
    assert "collectives.all_gather.bw3" in refitted
    assert "device: {like: h100-sxm-80gb, cost_profile: mine.yaml}" in refitted
    question = ("predict", "llama-3.1-8b", "--gpus", 8, "--tp", 8, "--seq-len", 4096, "--json")
    shipped, mine = (
        json.loads(forerun(*question, "--cluster", cluster).stdout) for cluster in ("h100-sxm", "cluster.yaml")
    )
    assert mine["exposed_comm_s"] > 1.05 * shipped["exposed_comm_s"]
    assert (tmp_path / "net.csv").read_text().splitlines()[1].startswith("all_gather,8,1,4096,20.0")


def test_a_refit_writes_the_same_file_and_keeps_its_comment(forerun, tmp_path, refitted):
    path = tmp_path / "mine.yaml"
    text = path.read_text()
    path.write_text(text.replace(text.splitlines()[0], "# The machine in the cellar."))
    assert forerun("calibrate", "h100-sxm", "--network", "run.log", "--profile-out", "mine.yaml").returncode == 0
    old, new = text.splitlines(), path.read_text().splitlines()
    assert new[0] == "# The machine in the cellar."
    assert old[1:] == new[1:]


def test_the_result_as_an_object(forerun, tmp_path):
    (tmp_path / "run.log").write_text(log(20, 200))
    done = forerun("calibrate", "h100-sxm", "--network", "run.log", "--json")
    record = json.loads(done.stdout)
    assert record["device"] == "h100-sxm-80gb"
    assert {row["section"] for row in record["errors"]} == {"collectives.all_gather"}
    assert all(row["after"] < row["before"] for row in record["errors"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give measurements: --kernels and --network, or --tables with --table-device"),
        (("--tables", "folder"), "give measurements"),
        (("--network", "none.csv"), "none.csv: can't be read: No such file"),
        (("--kernels", "none.csv"), "none.csv: can't be read: No such file"),
        (
            ("--network", "run.log", "--profile-out", "mine.txt"),
            "--profile-out mine.txt: a profile's file ends in .yaml or .yml",
        ),
        (("--network", "run.log", "--profile-out", "no/mine.yaml"), "mine.yaml: can't be written"),
    ],
)
def test_what_is_wrong_is_one_line(forerun, tmp_path, arguments, message):
    (tmp_path / "run.log").write_text(log(20, 200))
    done = forerun("calibrate", "h100-sxm", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
