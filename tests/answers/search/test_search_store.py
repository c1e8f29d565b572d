"""A search with a store goes on where it was broken off, and finds what it finds without one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from kept_search import CLUSTER, FIXED, TINY, small_search, write_results

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import DoesNotFit, Prediction
from forerun.answers.search.executor import Question, Refused
from forerun.answers.search.store import AnswerStore
from forerun.common.errors import ForerunError
from forerun.common.records import Records
from forerun.core.cost.measured_files import read_measured
from forerun.core.network.on_topology import load_network
from forerun.describe.cluster.catalog import device_kernels
from forerun.describe.plan.plan import Plan

SCRIPT = Path(__file__).parent / "kept_search.py"
N_SIMULATED = 48
PLAN = Plan(seq_len=512, dp_shard=8, n_microbatches=4)


def command(store: Path, out: Path, workers: int, pause_s: float) -> list[str]:
    return [sys.executable, str(SCRIPT), str(store), str(out), str(workers), str(pause_s)]


def results(out: Path) -> tuple[bytes, bytes]:
    return out.with_suffix(".csv").read_bytes(), out.with_suffix(".json").read_bytes()


def rows_of(store: Path) -> int:
    with closing(sqlite3.connect(store)) as base:
        (count,) = base.execute("SELECT COUNT(*) FROM plan").fetchone()
    return int(count)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    write_results(folder / "s.sqlite", folder / "out")
    assert rows_of(folder / "s.sqlite") == N_SIMULATED
    return results(folder / "out")


def children_of(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
        except (OSError, IndexError):  # ended meanwhile
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: tuple[bytes, bytes], workers: int
) -> None:
    store, enough = tmp_path / "s.sqlite", 3 * N_SIMULATED // 4  # in the last batch; processes have started by then
    victim = subprocess.Popen(command(store, tmp_path / "out", workers, 0.02), stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    for _ in range(enough):
        assert victim.stdout.readline() == "simulated\n"
    children = children_of(victim.pid)
    assert len(children) == (workers if workers > 1 else 0)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    assert not (tmp_path / "out.csv").exists()
    kept = rows_of(store)
    assert enough <= kept < N_SIMULATED

    simulated = []
    keep = AnswerStore.keep

    def counted(self: AnswerStore, plan: Plan, answer: Prediction | Refused) -> None:
        simulated.append(plan)
        keep(self, plan, answer)

    monkeypatch.setattr(AnswerStore, "keep", counted)
    write_results(store, tmp_path / "out", workers)
    assert len(simulated) == N_SIMULATED - kept
    assert results(tmp_path / "out") == uninterrupted
    assert rows_of(store) == N_SIMULATED

    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.monotonic() < deadline, "processes of the killed search still run"
        time.sleep(0.1)


def test_two_searches_share_a_store(tmp_path: Path, uninterrupted: tuple[bytes, bytes]) -> None:
    store = tmp_path / "s.sqlite"
    both = [multiprocessing.Process(target=write_results, args=(store, tmp_path / str(number))) for number in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert [each.exitcode for each in both] == [0, 0]
    assert [results(tmp_path / str(number)) for number in range(2)] == [uninterrupted] * 2
    assert rows_of(store) == N_SIMULATED


def test_a_store_changes_no_figure(tmp_path: Path) -> None:
    whole = small_search(None)
    first, again = (small_search(tmp_path / "s.sqlite") for _ in range(2))
    assert repr(first) == repr(again) == repr(whole)


def test_another_objective_uses_what_is_there(tmp_path: Path) -> None:
    store = tmp_path / "s.sqlite"
    fixed = {**FIXED, "micro_batch": [1, 4]}
    small_search(store, exhaustive=True, fixed=fixed)
    kept = rows_of(store)
    by_memory = small_search(store, objective="memory", keep=2, fixed=fixed)
    assert rows_of(store) == kept
    assert by_memory.to_rows() == small_search(None, objective="memory", keep=2, fixed=fixed).to_rows()


def picky(model, plan, cluster):
    if plan.micro_batch > 1:
        raise ForerunError("one at a time")
    return predict(model, plan, cluster)


def test_what_is_refused_is_kept_too(tmp_path: Path) -> None:
    fixed = {**FIXED, "pp": 1, "tp": 1}
    first, again = (small_search(tmp_path / "s.sqlite", predictor=picky, fixed=fixed) for _ in range(2))
    assert first.impossible_examples["refused by the simulation"] == "one at a time"
    assert again == first
    assert (
        rows_of(tmp_path / "s.sqlite")
        == first.counts["ok"] + first.counts["out_of_memory"] + first.impossible["refused by the simulation"]
    )


def test_what_does_not_fit_is_kept_too(tmp_path: Path) -> None:
    plan = Plan(512, tp=2)
    needed = DoesNotFit(plan, 80.5, 81.25, 79.2, {"activation": 60.5, "parameter": 20.0}, "stage 0")
    for answers in (lambda store: store.keep(plan, needed), lambda store: None):
        with AnswerStore(tmp_path / "s.sqlite", "basis") as store:
            answers(store)
            assert store.known([plan]) == {plan: needed}


MEASURED = "kind,dtype,m,n,k,time_us\ngemm,bf16,512,768,768,9.5\n"


def measured_in(folder: Path, text: str):
    folder.mkdir()
    (folder / "kernels.csv").write_text(text)
    return read_measured(folder / "kernels.csv", None)


def test_whatever_an_answer_depends_on_is_part_of_its_key(tmp_path: Path) -> None:
    network = load_network("switch:8@450/300ns")
    slower = replace(CLUSTER, links=(replace(CLUSTER.links[0], latency_s=1e-5), *CLUSTER.links[1:]))
    bases = [
        Question(predict, TINY, CLUSTER).basis(),
        Question(predict, replace(TINY, n_layers=5), CLUSTER).basis(),
        Question(predict, TINY, slower).basis(),
        Question(picky, TINY, CLUSTER).basis(),
        *(Question(predict, TINY, CLUSTER, each).basis() for each in (network, load_network("switch:8@450/301ns"))),
        *(
            Question(predict, TINY, CLUSTER, None, measured_in(tmp_path / name, text)).basis()
            for name, text in (("one", MEASURED), ("other", MEASURED.replace("9.5", "9.6")))
        ),
    ]
    assert len(set(bases)) == len(bases)
    assert Question(predict, TINY, CLUSTER).basis() == bases[0]
    answer = Refused("no")
    with AnswerStore(tmp_path / "s.sqlite", bases[0]) as store:
        store.keep(PLAN, answer)
        assert store.known([PLAN, replace(PLAN, n_microbatches=8)]) == {PLAN: answer}
    with AnswerStore(tmp_path / "s.sqlite", bases[1]) as store:
        assert store.known([PLAN]) == {}


def test_the_content_of_a_users_cost_profile_counts(tmp_path: Path) -> None:
    data = deepcopy(device_kernels()["h100"])
    own = replace(CLUSTER, device=replace(CLUSTER.device, cost_profile=str(tmp_path / "mine.yaml")))
    bases = []
    for share in (1.0, 0.9):
        data["gemm_roles"]["dgrad_rate"] = share
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
        bases.append(Question(predict, TINY, own).basis())
    assert bases[0] != bases[1]


@pytest.mark.parametrize("network", [None, "switch:8@450/300ns"])
def test_a_prediction_is_kept_to_the_last_bit(tmp_path: Path, network: str | None) -> None:
    topology = None if network is None else load_network(network)
    measured = measured_in(tmp_path / "own", MEASURED)
    prediction = predict(TINY, PLAN, CLUSTER, topology, measured)
    assert (prediction.network is None) == (network is None)
    with AnswerStore(tmp_path / "s.sqlite", "basis") as store:
        store.keep(PLAN, prediction)
        (known,) = store.known([PLAN]).values()
    assert repr(known) == repr(prediction)


def spoil(path: Path, how: str) -> None:
    if how == "text":
        path.write_text("rank,status,reason\n" * 500)
    elif how == "folder":
        path.mkdir()
    elif how == "other tables":
        with Records(path, "outcome"):
            pass
    elif how == "other columns":
        with closing(sqlite3.connect(path)) as base:
            base.execute("CREATE TABLE plan (name TEXT)")
    else:
        small_search(path, fixed={**FIXED, "pp": 1, "tp": 1})
        with closing(sqlite3.connect(path)) as base:
            base.execute("PRAGMA journal_mode = DELETE")
            if how == "records":
                base.execute('UPDATE plan SET record = \'{"prediction": {"model": 3}}\'')
                base.commit()
        if how == "pages":
            data = bytearray(path.read_bytes())
            data[4096:] = b"\xff" * (len(data) - 4096)
            path.write_bytes(data)


@pytest.mark.parametrize("how", ["text", "folder", "other tables", "other columns", "records", "pages"])
def test_a_damaged_or_foreign_file_is_one_line(tmp_path: Path, how: str) -> None:
    path = tmp_path / "s.sqlite"
    spoil(path, how)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(ForerunError) as caught:
        small_search(path, fixed={**FIXED, "pp": 1, "tp": 1})
    message = str(caught.value)
    if how == "folder":
        assert message == f"{path}: can't be read: it is a folder; give a regular file"
        return
    assert message.startswith(f"{path}: can't be used (")
    assert message.endswith("); choose another folder, or remove the file")
    assert "\n" not in message
    if how in {"text", "other tables"}:
        assert path.read_bytes() == before, "what is somebody else's stays as it is"


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match="unable to open database file"):
        small_search(tmp_path / "none" / "s.sqlite")
