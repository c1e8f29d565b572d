"""Cases of a file: results, or errors that name the line."""

import json

import pytest
from collective_building import CASE
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.astrasim.astra.collective_cases import case_results, case_times, strided_groups
from forerun.common.errors import ForerunError

P2P = {key: value for key, value in CASE.items() if key not in ("collective", "implementation")} | {"p2p": [0, 3]}


def result(case):
    (record,) = case_results([case if isinstance(case, str) else json.dumps(case)])
    return record


def test_a_known_collective():
    assert result(CASE) == {
        "case": "one",
        "time_ns_max": 64440,
        "time_ns_per_rank": {str(rank): 64440 for rank in range(8)},
    }


def test_what_a_line_says_of_its_result_is_not_looked_at():
    wrong = {"ok": False, "time_ns_max": 1, "time_ns_per_rank": {"0": 1}}
    assert result(CASE | wrong) == result(CASE)


def test_a_message_takes_its_hops_and_the_others_compute():
    size, hops = 1 << 20, 3
    arrival = int(hops * 500 + size / (50 * 2**30 / 1e9))
    assert result(P2P)["time_ns_per_rank"] == {str(rank): arrival if rank in (0, 3) else 2222 for rank in range(8)}
    stored = hops * int(500 + size / (50 * 2**30 / 1e9))
    assert result(P2P | {"congestion_aware": True})["time_ns_per_rank"]["3"] == stored


def test_many_equal_ranks_are_not_listed():
    record = result(CASE | {"npus_count": [512]})
    assert record["time_ns_per_rank"] is None
    tree = result(CASE | {"npus_count": [512], "implementation": ["doubleBinaryTree"]})
    assert len(tree["time_ns_per_rank"]) == 512
    assert max(tree["time_ns_per_rank"].values()) == tree["time_ns_max"]


def test_groups_are_strided():
    assert strided_groups(8, 2, 2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert strided_groups(8, 8, 1) == ()
    with pytest.raises(ForerunError, match="do not divide"):
        strided_groups(8, 3, 1)


BAD = [
    ("not json", "not a JSON"),
    ("[1, 2]", "not a JSON object"),
    ('{"case": ' + "[" * 100_000, "not a JSON"),
    ({key: value for key, value in CASE.items() if key != "bytes"}, "'bytes' is missing"),
    ({key: value for key, value in CASE.items() if key != "topology"}, "'topology' is missing"),
    ({key: value for key, value in CASE.items() if key != "splits"}, "'splits' is missing"),
    (CASE | {"bytes": -1}, "bytes is -1"),
    (CASE | {"bytes": 1.5}, "bytes is 1.5"),
    (CASE | {"bytes": 10**400}, "bytes"),
    (CASE | {"bytes": 1 << 60}, "too large"),
    (CASE | {"collective": "all_reduced"}, "unknown"),
    (CASE | {"collective": ["all_reduce"]}, "unknown"),
    (CASE | {"topology": ["Rong"]}, "Ring"),
    (CASE | {"npus_count": [0]}, "more than 1 NPU"),
    (CASE | {"npus_count": [8, 8]}, "npus_count"),
    (CASE | {"npus": 9}, "npus is 9"),
    (CASE | {"npus_count": [1 << 24]}, "more than the"),
    (P2P | {"npus_count": [1 << 24]}, "more than the"),
    (CASE | {"bandwidth_GBps": [0]}, "bandwidth"),
    (CASE | {"latency_ns": [-1]}, "latency"),
    (CASE | {"latency_ns": ["x"]}, "latency"),
    (CASE | {"implementation": ["rong"]}, "unknown"),
    (CASE | {"implementation": "ring"}, "implementation"),
    (CASE | {"implementation": ["ring", "ring"]}, "1"),
    (CASE | {"implementation": ["halvingDoubling"], "collective": "all_to_all"}, "no all-to-all"),
    (CASE | {"splits": 0}, "splits"),
    (CASE | {"opt": "fast"}, "collective-optimization"),
    (CASE | {"local_mem_bw": 0}, "local-mem-bw"),
    (CASE | {"congestion_aware": "yes"}, "congestion_aware"),
    (CASE | {"group_size": 3, "stride": 1}, "do not divide"),
    (CASE | {"group_size": 2}, "'stride' is missing"),
    (P2P | {"p2p": [0, 8]}, "rank"),
    (P2P | {"p2p": [1, 1]}, "itself"),
    (P2P | {"p2p": [0]}, "p2p"),
    (P2P | {"p2p": [0, 10**15]}, "rank"),
]


@pytest.mark.parametrize(("case", "problem"), BAD, ids=range(len(BAD)))
def test_bad_cases_say_what_is_wrong_with_them(case, problem):
    record = result(case)
    assert set(record) == {"case", "error"}
    assert problem in record["error"]


def test_one_bad_line_does_not_stop_the_others():
    lines = [json.dumps(CASE), "", "{", json.dumps({"case": "x"}), json.dumps(CASE)]
    records = list(case_results(lines))
    assert [record["case"] for record in records] == ["one", "line 3", "x", "one"]
    assert "line 4" in records[2]["error"]
    assert records[0] == records[3]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["Ring", "ring"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=100)
@given(
    base=st.sampled_from([CASE, P2P]),
    changes=st.dictionaries(
        st.sampled_from([*CASE, "p2p", "npus", "congestion_aware", "group_size", "stride"]), values, max_size=3
    ),
    left_out=st.lists(st.sampled_from(sorted(CASE)), max_size=1),
)
def test_any_case_gives_a_result_or_an_error(base, changes, left_out):
    case = {key: value for key, value in (base | changes).items() if key not in left_out}
    record = result(case)
    assert set(record) == {"case", "error"} or record["time_ns_max"] >= 0
    json.dumps(record, allow_nan=False)


@settings(max_examples=100)
@given(
    text=st.text(max_size=40) | st.just(json.dumps(CASE)).flatmap(lambda t: st.integers(0, len(t)).map(lambda k: t[:k]))
)
def test_any_line_gives_a_record(text):
    for record in case_results(text.splitlines()):
        assert "case" in record


@settings(max_examples=60)
@given(
    npus=st.integers(2, 40),
    size=st.integers(1, 1 << 40),
    bandwidth=st.floats(1e-3, 1e6),
    latency=st.floats(0, 1e7),
    splits=st.integers(1, 64),
    active=st.integers(1, 9),
    delay=st.integers(0, 1000),
    aware=st.booleans(),
    algorithm=st.sampled_from(["ring", "direct", "direct3", "halvingDoubling", "doubleBinaryTree"]),
    collective=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
)
def test_sensible_cases_end(npus, size, bandwidth, latency, splits, active, delay, aware, algorithm, collective):
    case = CASE | {
        "npus_count": [npus],
        "bytes": size,
        "bandwidth_GBps": [bandwidth],
        "latency_ns": [latency],
        "splits": splits,
        "active_chunks": active,
        "endpoint_delay": delay,
        "congestion_aware": aware,
        "implementation": [algorithm],
        "collective": collective,
    }
    try:
        times = case_times(case)
    except ForerunError:
        return
    assert len(times) == npus
    assert times.min() > 0 or delay == 0
