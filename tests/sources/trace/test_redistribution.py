"""The host's time of DTensor's redistributions is recorded where Python runs them, and nowhere else."""

import json
import os
from pathlib import Path

import pytest
from warm_process import fork, run_file, wait

pytest.importorskip("torch", reason="tracing needs torch")
PROGRAM = Path(__file__).parent / "redistributions.py"


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("redistributed") / "steps.json"

    def run():
        os.chdir(out.parent)
        run_file(PROGRAM, out)

    with out.with_suffix(".txt").open("wb") as sink:
        code = wait(fork(run, sink.fileno(), {}), 300)
    assert code == 0, out.with_suffix(".txt").read_text()[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))


def test_a_redistribution_and_its_gradient_take_the_host_as_long_as_many_launches(steps):
    host = steps["explicit"]["host"]
    assert {name: times for name, (_, times) in host.items()} == {"Redistribute.forward": 1, "Redistribute.backward": 1}
    assert all(launches > 10 for launches, _ in host.values())


def test_the_host_prepares_a_collective_before_it_launches_it(steps):
    names = steps["explicit"]["names"]
    gather, scatter = ([i for i, name in enumerate(names) if kind in name] for kind in ("all_gather", "reduce_scatter"))
    assert names.index("Redistribute.forward") < gather[0] < names.index("Redistribute.backward") < scatter[0]


def test_an_operand_of_other_placements_takes_less_than_an_explicit_redistribution(steps):
    host = steps["operand"]["host"]
    assert list(host) == ["redistribute_local_tensor"]
    assert 0 < host["redistribute_local_tensor"][0] < steps["explicit"]["host"]["Redistribute.forward"][0]


def test_compiled_code_redistributes_without_the_host(steps):
    assert steps["compiled"]["host"] == {}
    assert steps["compiled"]["collectives"] == steps["explicit"]["collectives"] == 2


def test_fsdp2_redistributes_no_parameter(steps):
    assert steps["fsdp2"]["host"] == {}
    assert steps["fsdp2"]["collectives"] > 0
