"""`forerun astra`: ASTRA-sim's flags and lines, case folders, bad input."""

import json
import re

import pytest
from random_traces import comp, trace

from forerun.astrasim.chakra.writer import write_rank
from forerun.interfaces.cli.main import run

pytestmark = pytest.mark.compiles(40)
STAGE_ARGS = {
    "dp": 2, "tp": 2, "sp": 1, "pp": 1, "weight_sharded": 0, "activation_recompute": 1,
    "din": 64, "dout": 64, "dmodel": 32, "dff": 64, "head": 4, "seq": 16, "batch": 8, "num_stacks": 2,
}  # fmt: skip
SYSTEM = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "active-chunks-per-dimension": 1,
    "preferred-dataset-splits": 4,
    "collective-optimization": "localBWAware",
    "track-local-mem": 1,
    "roofline-enabled": 1,
    "local-mem-bw": 1600,
    "peak-perf": 900,
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
}
NETWORK = "topology: [Ring]\nnpus_count: [4]\nbandwidth: [50.0]\nlatency: [500.0]\n"


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A case folder with generated traces."""
    folder = tmp_path_factory.mktemp("case")
    flags = [word for name, value in STAGE_ARGS.items() for word in (f"--{name}", str(value))]
    place = ["--output_dir", str(folder / "et"), "--output_name", "w", "--comm_group_file", "comm_group.json"]
    assert run(["stage", *place, *flags]) == 0
    (folder / "et" / "comm_group.json").rename(folder / "comm_group.json")
    (folder / "stage_args.json").write_text(json.dumps(STAGE_ARGS))
    (folder / "system.json").write_text(json.dumps(SYSTEM))
    (folder / "network.yml").write_text(NETWORK)
    (folder / "remote_memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}')
    return folder


def flags(case, **more):
    files = {
        "workload-configuration": case / "et" / "w",
        "comm-group-configuration": case / "comm_group.json",
        "system-configuration": case / "system.json",
        "network-configuration": case / "network.yml",
        "remote-memory-configuration": case / "remote_memory.json",
    }
    files.update({name.replace("_", "-"): path for name, path in more.items()})
    return ["astra", *(f"--{name}={path}" for name, path in files.items() if path is not None)]


def test_the_lines_are_those_of_astra_sim(case, capsys):
    assert run(flags(case)) == 0
    text = capsys.readouterr().out
    finished = re.findall(r"sys\[(\d)\] finished, (\d+) cycles, exposed communication (\d+) cycles\.", text)
    assert sorted(rank for rank, _, _ in finished) == ["0", "1", "2", "3"]
    for line in ("Wall time", "GPU time", "Comm time"):
        assert len(re.findall(rf"sys\[\d\], {line}: \d+\n", text)) == 4
    for line in ("Compute bound percentage", "Average memory utilization"):
        assert len(re.findall(rf"sys\[\d\], {line}: \d+\.\d{{3}}%", text)) == 4
    assert len(re.findall(r"Average compute utilization: \d+\.\d{3}\$", text)) == 4
    assert len(re.findall(r"Average operation intensity: \d+\.\d{3}", text)) == 4
    assert len(re.findall(r"sys\[\d\] peak memory usage: \d+\n", text)) == 4


def test_a_case_folder_gives_the_same_as_the_flags(case, capsys):
    assert run([*flags(case), "--json"]) == 0
    by_flags = json.loads(capsys.readouterr().out)
    assert run(["astra", "--case", str(case), "--json"]) == 0
    (system,) = json.loads(capsys.readouterr().out)["systems"].values()
    assert by_flags.pop("schema_version") >= 1
    assert system == {"ok": True, **by_flags}
    assert system["per_rank"]["0"]["peak_memory_bytes"] > 0


def test_traces_that_are_not_there_are_generated_and_systems_may_be_folders(case, tmp_path, capsys):
    for name in ("stage_args.json",):
        (tmp_path / name).write_text((case / name).read_text())
    for system in ("one", "two"):
        (tmp_path / system).mkdir()
        for name in ("system.json", "network.yml"):
            (tmp_path / system / name).write_text((case / name).read_text())
    (tmp_path / "two" / "network.yml").write_text(NETWORK.replace("50.0", "5.0"))
    assert run(["astra", "--case", str(tmp_path), "--json"]) == 0
    systems = json.loads(capsys.readouterr().out)["systems"]
    assert run(["astra", "--case", str(case), "--json"]) == 0
    (read,) = json.loads(capsys.readouterr().out)["systems"].values()
    assert systems["one"] == read
    assert systems["two"]["per_rank"]["0"]["wall_time"] > read["per_rank"]["0"]["wall_time"]


def test_congestion_and_issue_order_are_options(case, capsys):
    for options in (["--backend", "aware"], ["--issue-order", "march-2025"], ["--num-queues-per-dim", "2"]):
        assert run([*flags(case), "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["per_rank"]["3"]["wall_time"] > 0


def test_a_release_sets_the_issue_order_and_the_lines(case, capsys, monkeypatch):
    def printed(*options):
        assert run([*flags(case), *options]) == 0
        return capsys.readouterr().out

    assert " [workload] [info] sys[0] finished, " in printed("--release", "2025-03")
    monkeypatch.setenv("FORERUN_ASTRA_RELEASE", "2025-03")
    assert " [workload] [info] sys[0] finished, " in printed()
    assert " [I] <workload>: sys[0] finished, " in printed("--release", "2025-04")
    assert printed("--json") == printed("--json", "--issue-order", "march-2025")
    assert printed("--json", "--issue-order", "ascending") == printed("--json", "--release", "2025-04")


def test_flags_take_their_values_behind_a_space_too(case, capsys):
    assert run(flags(case)) == 0
    by_sign = capsys.readouterr().out
    assert run([word for flag in flags(case) for word in flag.split("=", 1)]) == 0
    assert [line.split("] ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        line.split("] ", 1)[1] for line in by_sign.splitlines()
    ]


def test_one_trace_may_stand_for_all_ranks(case, tmp_path, capsys):
    (tmp_path / "w.ALL_RANKS.et").write_bytes((case / "et" / "w.0.et").read_bytes())
    groups = tmp_path / "groups.json"
    names = json.loads((case / "comm_group.json").read_text())
    groups.write_text(json.dumps({name: [0, 1, 2, 3] for name in names}))
    assert (
        run([*flags(case, **{"workload-configuration": tmp_path / "w", "comm-group-configuration": groups}), "--json"])
        == 0
    )
    assert len({json.dumps(rank) for rank in json.loads(capsys.readouterr().out)["per_rank"].values()}) == 1


def test_the_hottest_links_are_listed(case, capsys):
    assert run([*flags(case), "--backend", "aware", "--hottest", "3", "--json"]) == 0
    links = json.loads(capsys.readouterr().out)["hottest_links"]
    assert [link["busy"] for link in links] == sorted((link["busy"] for link in links), reverse=True)
    assert len(links) == 3
    assert 0 < links[0]["busy"] <= 1
    assert run([*flags(case), "--hottest", "3"]) == 2
    assert "--backend aware" in capsys.readouterr().err


def test_cuda_streams_are_another_semantics(case, capsys):
    assert run([*flags(case), "--json"]) == 0
    slots = json.loads(capsys.readouterr().out)["per_rank"]["0"]
    assert run([*flags(case), "--json", "--semantics", "streams"]) == 0
    streams = json.loads(capsys.readouterr().out)["per_rank"]["0"]
    assert streams["gpu_time"] == slots["gpu_time"]
    assert run([*flags(case), "--semantics", "streams", "--backend", "aware"]) == 2
    assert "--backend aware" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("system-configuration", "{", "not JSON"),
        ("system-configuration", "[]", "one JSON object"),
        ("system-configuration", json.dumps({**SYSTEM, "all-reduce-implementation": ["rings"]}), "rings"),
        ("system-configuration", json.dumps({**SYSTEM, "preferred-dataset-splits": 0}), "preferred-dataset-splits"),
        ("system-configuration", json.dumps({**SYSTEM, "model-shared-bus": 1}), "model-shared-bus"),
        ("system-configuration", json.dumps({**SYSTEM, "peak-perf": 0}), "peak-perf"),
        ("network-configuration", NETWORK.replace("Ring", "Rong"), "Rong"),
        ("network-configuration", NETWORK.replace("[4]", "[8]"), "et"),
        ("network-configuration", NETWORK.replace("[4]", "[2]"), "rank"),
        ("comm-group-configuration", '{"1": [0, 0]}', "'1'"),
        ("comm-group-configuration", "{}", "not in the communicator group file"),
        ("remote-memory-configuration", '{"memory-type": "POOL"}', "POOL"),
    ],
)
def test_bad_files_are_one_line_and_exit_code_2(case, tmp_path, capsys, file, content, words):
    path = tmp_path / "bad"
    path.write_text(content)
    assert run(flags(case, **{file: path})) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["astra"], "--workload-configuration"),
        (["astra", "--case", "nowhere"], "nowhere"),
        (["astra", "--release", "2024-01", "--case", "."], "known: 2025-03, 2025-04"),
        (["astra", "--rendezvous-protocol", "true", "--case", "."], "rendezvous"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(capsys, arguments, words):
    assert run(arguments) == 2
    assert words in capsys.readouterr().err


def traces_of(case, folder, durations_us):
    """Flags of a case in which each rank runs kernels of these durations, in microseconds, without operations."""
    nodes = [comp(0, 0, (number - 1,) if number else (), duration_us=each) for number, each in enumerate(durations_us)]
    for rank in range(4):
        write_rank(folder / f"t.{rank}.et", trace(nodes))
    return [*flags(case, workload_configuration=folder / "t", comm_group_configuration="empty"), "--semantics=streams"]


def test_kernels_without_a_time_are_said(case, tmp_path, capsys):
    assert run([*traces_of(case, tmp_path, [5, 0, 0]), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["per_rank"]["0"]["wall_time"] == 5000
    assert err == "warning: 8 of 12 compute nodes have neither duration_micros nor num_ops, so that they take no time\n"
    assert run([*traces_of(case, tmp_path, [5, 1])]) == 0
    assert capsys.readouterr().err == ""


def test_traces_in_which_nothing_takes_time_are_refused(case, tmp_path, capsys):
    assert run(traces_of(case, tmp_path, [0, 0])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "error: 8 of 8 compute nodes have neither duration_micros nor num_ops, and nothing else takes time"
    )
