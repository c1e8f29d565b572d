"""`forerun collective` as a user runs it."""

import json

import pytest
from collective_building import CASE, system

from forerun.astrasim.astra.single import collective_times
from forerun.astrasim.chakra.trace import CommType
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology
from forerun.interfaces.cli.collective import parse_bytes
from forerun.interfaces.cli.main import run

NETWORK = ("--topology", "ring:8@50/500")


def figures(capsys, *arguments):
    assert run(["collective", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_cases_come_as_lines(tmp_path, capsys):
    path = tmp_path / "cases.jsonl"
    path.write_bytes(json.dumps(CASE).encode() + b"\n\xff\xfe{\n" + json.dumps(CASE | {"case": "two"}).encode())
    assert run(["collective", "--cases", str(path)]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["case"] for record in records] == ["one", "line 2", "two"]
    assert [record.get("time_ns_max") for record in records] == [64440, None, 64440]


def test_a_table_by_size_and_algorithm(capsys):
    assert run(["collective", "all_reduce", "--from", "1MiB", "--to", "4MiB", *NETWORK]) == 0
    out = capsys.readouterr().out
    assert [out.count(word) for word in ("1 MiB", "2 MiB", "4 MiB", "doubleBinaryTree")] == [4, 4, 4, 3]


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875), ("broadcast", 1.0)],
)
def test_bandwidths_are_those_of_nccl_tests(collective, factor, capsys):
    for point in figures(capsys, collective, "--bytes", "8MiB", "--bytes", "8000008", *NETWORK)["points"]:
        assert point["algbw_gbps"] == pytest.approx(point["size_bytes"] / point["time_ns"])
        assert point["busbw_gbps"] == pytest.approx(factor * point["algbw_gbps"])


def test_an_all_gather_takes_as_long_as_a_reduce_scatter_without_reductions(capsys):
    gather, scatter = (
        figures(capsys, name, "--bytes", "64MiB", "--algorithm", "ring", "--local-mem-bw", "1e9", *NETWORK)["points"][0]
        for name in ("all_gather", "reduce_scatter")
    )
    assert gather["size_bytes"] == 64 << 20
    assert gather["time_ns"] == scatter["time_ns"]


def test_hottest_links_of_a_congested_network(capsys):
    points = figures(
        capsys,
        "all_to_all",
        "--bytes",
        "1MiB",
        "--topology",
        "mesh2d:4x4",
        "--backend",
        "aware",
        "--algorithm",
        "direct",
    )["points"]
    links = points[0]["hottest"]
    assert len(links) == 5
    assert 0.5 < links[0]["busy"] <= 1
    assert all((link["source"] % 4 in (1, 2) or link["source"] // 4 in (1, 2)) for link in links)


@pytest.mark.parametrize(
    ("topology", "aware"),
    [
        ("ring:8", False), ("switch:8", False), ("fullyconnected:8", False), ("ring:4,switch:2", False),
        ("mesh2d:4x4", True), ("torus2d:4x4", True), ("fat-tree:8", True), ("ring:4,mesh2d:2x2", True),
    ],
)  # fmt: skip
def test_topologies_whose_routes_share_links_get_queues(topology, aware, capsys):
    by_itself = figures(capsys, "all_reduce", "--bytes", "1MiB", "--topology", topology, "--algorithm", "direct")
    assert by_itself["congestion_aware"] is aware
    arguments = ("--bytes", "1MiB", "--topology", topology, "--algorithm", "direct", "--backend")
    asked = figures(capsys, "all_reduce", *arguments, "aware" if aware else "unaware")
    (own,), (other_way,) = by_itself["points"], asked["points"]
    assert (own if aware else own["unqueued_ns"]) == (other_way if aware else other_way["time_ns"])
    other = figures(capsys, "all_reduce", *arguments, "unaware" if aware else "aware")
    assert other["congestion_aware"] is not aware


@pytest.mark.parametrize("topology", ["mesh2d:4x4", "torus2d:4x4", "ring:8", "dragonfly:3x2x2", "fat-tree:16"])
def test_with_queues_no_rank_moves_more_than_its_links_carry(topology, capsys):
    found = figures(capsys, "all_reduce", "--bytes", "64MiB", "--topology", topology, "--backend", "aware")
    ran = [point for point in found["points"] if point["time_ns"]]
    assert ran
    assert all(point["busbw_gbps"] <= found["rank_links_gbps"] and not point["beyond_links"] for point in ran)


@pytest.mark.parametrize("topology", ["ring:8", "switch:8", "fullyconnected:8", "ring:4,ring:4"])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all"])
def test_by_default_no_rank_moves_more_than_its_links_carry(topology, collective, capsys):
    asked = (collective, "--bytes", "64MiB", "--topology", topology, "--active", "4")
    found, queued = figures(capsys, *asked), figures(capsys, *asked, "--backend", "aware")
    assert found["serialising"]
    for point, queues in zip(found["points"], queued["points"], strict=True):
        if point["time_ns"]:
            assert point["busbw_gbps"] <= found["rank_links_gbps"]
            assert point["unqueued_ns"] <= point["time_ns"] <= queues["time_ns"] * 1.001


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halvingDoubling", "doubleBinaryTree"])
def test_on_a_ring_the_default_is_close_to_queues(algorithm, capsys):
    asked = ("all_reduce", "--bytes", "64MiB", "--topology", "ring:8", "--active", "4", "--algorithm", algorithm)
    (found,), (queued,) = (figures(capsys, *asked, *more)["points"] for more in ((), ("--backend", "aware")))
    assert found["time_ns"] == pytest.approx(queued["time_ns"], rel=0.35)


@pytest.mark.parametrize("topology", ["ring:5", "ring:8", "fullyconnected:6"])
@pytest.mark.parametrize(
    "kind", [CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.REDUCE_SCATTER, CommType.ALL_TO_ALL]
)
def test_ring_algorithms_that_never_queue(topology, kind):
    network = parse_topology(topology, [50.0], [500.0])
    of = system("ring", splits=3)
    for size in (1 << 12, 1 << 20, 12_345_678):
        without, queued = (collective_times(network, of, kind, size, aware=aware)[0] for aware in (False, True))
        assert without.tolist() == queued.tolist()


def test_both_has_a_column_without_queues(capsys):
    asked = ["collective", "all_reduce", "--bytes", "64MiB", "--topology", "ring:8", "--algorithm", "direct"]
    for backend, shown in (("both", True), ("auto", False)):
        assert run([*asked, "--backend", backend]) == 0
        assert ("without queues\n" in capsys.readouterr().out.replace(" \n", "\n")) is shown


def test_bandwidth_above_the_links_is_marked_and_explained(capsys):
    mesh = ("all_reduce", "--bytes", "64MiB", "--topology", "mesh2d:4x4@50/500", "--backend", "unaware")
    found = figures(capsys, *mesh)
    assert found["rank_links_gbps"] == 100.0  # a corner has two links
    beyond = {point["algorithm"]: point["busbw_gbps"] > 100 for point in found["points"]}
    assert beyond == {point["algorithm"]: point["beyond_links"] for point in found["points"]}
    assert beyond["direct"]
    assert not beyond["ring"]
    assert run(["collective", *mesh]) == 0
    out = capsys.readouterr().out
    assert "629.94!" in out
    assert "! above the 100.00 GB/s that all links of a rank carry together" in out
    assert run(["collective", *mesh[:-2]]) == 0
    assert "! above" not in capsys.readouterr().out


def test_queues_of_many_ranks_are_announced(capsys):
    many = ("broadcast", "--bytes", "1KiB", "--topology", "mesh2d:33x32", "--algorithm", "binomial", "--splits", "1")
    assert run(["collective", *many]) == 0
    assert capsys.readouterr().err == "queues for 1,056 NPUs can take minutes; --backend unaware is quick\n"
    assert run(["collective", *many, "--backend", "aware"]) == 0
    assert capsys.readouterr().err == ""
    rings = ("all_reduce", "--bytes", "1MiB", "--topology", "torus2d:33x32", "--algorithm", "ring")
    assert run(["collective", *rings]) == 0
    assert capsys.readouterr().err == ""


def test_the_header_says_which_backend_the_network_gets(capsys):
    for topology, words in (("mesh2d:2x2", "congestion-aware (on Mesh2D"), ("ring:4", "without queues, but on Ring")):
        assert run(["collective", "all_reduce", "--bytes", "1MiB", "--topology", topology]) == 0
        assert words in capsys.readouterr().out


def test_algorithms_by_dimension_and_custom_ones(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from forerun.astrasim.astra.custom import Wait\n\n\nclass Mine:\n"
        "    def steps(self, rank, n_ranks, size, costs):\n        yield Wait(ns=rank)\n"
    )
    names = f"ring+direct,ring,{path}:Mine"
    arguments = ("--topology", "ring:4,switch:2", "--algorithm", names, "--splits", "1")
    points = figures(capsys, "all_reduce", "--bytes", "1MiB", *arguments)["points"]
    assert [point["algorithm"] for point in points] == names.split(",")
    assert points[2]["time_ns"] == 7


def test_what_cannot_run_is_said_below_the_table(capsys):
    assert run(["collective", "all_reduce", "--bytes", "1MiB", "--topology", "ring:6"]) == 0
    assert "halvingDoubling needs a power of two" in capsys.readouterr().out


BAD = [
    (("all_reduced", "--bytes", "1MiB", *NETWORK), "all_reduce"),
    (("all_reduce", *NETWORK), "--bytes"),
    (("all_reduce", "--bytes", "1MiB"), "--topology"),
    (("all_reduce", "--bytes", "lots", *NETWORK), "lots"),
    (("all_reduce", "--bytes", "0", *NETWORK), "'0'"),
    (("all_reduce", "--from", "1KiB", *NETWORK), "--to"),
    (("all_reduce", "--bytes", "1MiB", "--topology", "rong:8"), "Ring"),
    (("all_reduce", "--bytes", "1MiB", *NETWORK, "--algorithm", "rong"), "rong"),
    (("all_to_all", "--bytes", "1MiB", *NETWORK, "--algorithm", "halvingDoubling"), "all_to_all"),
    (("all_reduce", "--bytes", "1MiB", *NETWORK, "--algorithm", "no.such:Thing"), "no.such"),
    (("all_reduce", "--bytes", "1MiB", *NETWORK, "--group-size", "3"), "do not divide"),
    (("all_reduce", "--bytes", "1MiB", *NETWORK, "--group-size", "4", "--algorithm", "direct"), "ring"),
    (("all_reduce", "--bytes", "1MiB", *NETWORK, "--latency", "x"), "--latency"),
    (("all_reduce", "--bytes", "1MiB", "--network", "no_such.yml"), "no_such.yml"),
    (("all_gather", "--bytes", "4", *NETWORK), "8 bytes"),
    (("--cases", "no_such.jsonl"), "no_such.jsonl"),
    (("all_reduce", "--cases", "x.jsonl"), "--cases"),
    ((), "--cases"),
]


@pytest.mark.parametrize(("arguments", "problem"), BAD, ids=range(len(BAD)))
def test_bad_input_is_one_line(arguments, problem, capsys):
    assert run(["collective", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1
    assert problem in captured.err


def test_sizes():
    sizes = {"64MiB": 64 << 20, "1GB": 10**9, "1048576": 1 << 20, "1.5KiB": 1536, "8 B": 8}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "MiB", "-1", "1.5", "1e9", "2000TiB", "9" * 50):
        with pytest.raises(ForerunError):
            parse_bytes(text)


# -- what NCCL chooses on a cluster ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "gpus", "size", "algorithm", "protocol"),
    [
        ("h100", 8, "1GiB", "NVLS", "Simple"),
        ("h100", 4, "1GiB", "Ring", "Simple"),
        ("h100", 16, "1GiB", "NVLSTree", "Simple"),
        ("h100", 64, "8GiB", "Ring", "Simple"),
        ("h100", 64, "1KiB", "Tree", "LL"),
        ("a100", 8, "1GiB", "Ring", "Simple"),
        ("rtx4090", 8, "1MiB", "Ring", "through host memory"),
    ],
)
def test_the_algorithm_of_nccl_on_a_cluster(cluster, gpus, size, algorithm, protocol, capsys):
    found = figures(capsys, "all_reduce", "--bytes", size, "--cluster", cluster, "--gpus", str(gpus))
    (point,) = found["points"]
    assert (found["gpus"], point["algorithm"], point["protocol"]) == (gpus, algorithm, protocol)
    assert point["busbw_gb_s"] == pytest.approx(point["algbw_gb_s"] * 2 * (gpus - 1) / gpus)
    assert point["algbw_gb_s"] == pytest.approx(point["size_bytes"] / point["time_s"] / 1e9)


def test_a_cluster_without_a_number_of_gpus_is_one_node(capsys):
    assert figures(capsys, "all_gather", "--bytes", "1MiB", "--cluster", "h100")["gpus"] == 8
    assert run(["collective", "all_gather", "--bytes", "1MiB", "--cluster", "h100"]) == 0
    assert "all_gather of 8 GPUs of h100-sxm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", "--cluster", "h100", *NETWORK), "leave out --topology and --network"),
        (("all_reduce", "--cluster", "h100", "--algorithm", "ring"), "leave out --algorithm"),
        (("all_reduce", "--gpus", "8", *NETWORK), "--gpus goes with --cluster"),
        (("all_gathered", "--cluster", "h100"), "unknown collective"),
    ],
)
def test_what_goes_with_a_cluster(arguments, message, capsys):
    assert run(["collective", *arguments, "--bytes", "1MiB"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
