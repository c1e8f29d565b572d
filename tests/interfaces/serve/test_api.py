"""The API answers what the commands answer."""

from __future__ import annotations

import io
import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from command_here import run_here
from small_question import CONFIG, QUESTION, events
from starlette.testclient import TestClient

from forerun.interfaces.serve import app, planner
from forerun.interfaces.serve.question import Question
from forerun.interfaces.serve.worker import PATIENCE_S

COMMAND = ("plan", "gpt2-small", "--cluster", "h100-sxm", "--gpus", 8, "--seq-len", 1024, "--global-batch", 64)
FIXED = ("--stack", "torchtitan", "--pp", "1,2")


def test_the_places_are_those_of_the_command(answered: list[dict[str, Any]]) -> None:
    told = json.loads(run_here(None, *COMMAND, *FIXED, "--json", "--top", 10).stdout)
    found = [event for event in answered if event["kind"] == "answer"]
    assert [event["whole"] for event in found] == [False, True]
    for event in found:
        for field in ("plan", "step_time_s"):
            assert [place[field] for place in event["top"][:10]] == [place[field] for place in told["top"]]
    assert found[0]["proof"].partition(" places")[2] == told["proof"].partition(" places")[2]
    assert found[0]["counts"] == told["counts"]


def test_first_plans_come_before_the_proof(answered: list[dict[str, Any]]) -> None:
    kinds = [event["kind"] for event in answered]
    assert kinds[0] == "space"
    assert kinds[1] == "places"
    assert kinds.index("answer") > kinds.index("places")
    assert answered[0]["plans"] == answered[-1]["points"]["possible"]


def test_every_plan_is_a_point_and_bounds_are_below_what_is_simulated(
    client: TestClient, answered: list[dict[str, Any]]
) -> None:
    points = answered[-1]["points"]
    rows = points["simulated"]["row"] + points["bounded"]["row"]
    assert len(set(rows)) == len(rows) == points["shown"] <= points["possible"]
    for place in range(0, len(points["bounded"]["row"]), max(1, len(points["bounded"]["row"]) // 5)):
        found = client.post("/api/plan", json={"question": QUESTION, "row": points["bounded"]["row"][place]}).json()
        assert found["step_time_s"] >= points["bounded"]["s"][place] * 0.999
        assert not found["fits"] or points["bounded"]["gib"][place] <= found["memory_limit_gib"]


def test_an_answer_that_is_kept_comes_at_once(client: TestClient, answered: list[dict[str, Any]]) -> None:
    again = events(client, "ask", QUESTION)
    assert again == answered[-1:]


def test_a_plan_has_the_figures_of_predict(client: TestClient, answered: list[dict[str, Any]]) -> None:
    place = answered[-1]["top"][1]
    found = client.post("/api/plan", json={"question": QUESTION, "row": place["row"]}).json()
    assert found["step_time_s"] == place["step_time_s"]
    assert sum(found["breakdown"].values()) == pytest.approx(found["step_time_s"])
    told = json.loads(run_here(None, *found["command"].split()[1:], "--json").stdout)
    assert told["step_time_s"] == found["step_time_s"]
    assert "place 2 of" in found["standing"]
    by_fields = client.post("/api/plan", json={"question": QUESTION, "plan": place["plan"]}).json()
    assert by_fields["step_time_s"] == found["step_time_s"]


def test_details_are_the_sections_of_a_page(client: TestClient, answered: list[dict[str, Any]]) -> None:
    about = {"question": QUESTION, "row": answered[-1]["top"][0]["row"]}
    found = client.post("/api/details", json=about).json()
    headings = [part["text"] for part in found["parts"] if part["type"] == "heading"]
    assert {"Timeline of a step", "Memory", "Critical path", "What a better machine would gain"} <= set(headings)
    for part in found["parts"]:
        assert part["type"] in {"heading", "text", "listing", "figures", "table", "plot", "code"}


def test_neighbours_differ_in_the_choice_that_they_are_named_for(
    client: TestClient, answered: list[dict[str, Any]]
) -> None:
    best = answered[-1]["top"][0]
    found = client.post("/api/neighbours", json={"question": QUESTION, "row": best["row"]}).json()["neighbours"]
    assert found
    for each in found:
        assert each["place"]["plan"][each["field"]] != best["plan"][each["field"]]
        assert each["change"] == pytest.approx(each["place"]["step_time_s"] / best["step_time_s"] - 1)
        assert each["change"] >= 0 or not each["place"]["fits"], "nothing that fits is faster than the best"


def test_a_filter_lists_the_plans_with_these_values_the_best_first(
    client: TestClient, answered: list[dict[str, Any]]
) -> None:
    found = client.post("/api/rows", json={"question": QUESTION, "wanted": "pp=2, tp=2"}).json()
    assert found["n"] >= len(found["rows"]) > 0
    assert {(row["plan"]["pp"], row["plan"]["tp"]) for row in found["rows"]} == {(2, 2)}
    statuses = [row["status"] for row in found["rows"]]
    assert statuses == sorted(statuses, key=["fits", "not simulated", "does not fit"].index)
    only = client.post("/api/rows", json={"question": QUESTION, "status": "fits"}).json()
    assert [row["row"] for row in only["rows"]] == [place["row"] for place in answered[-1]["top"]][: len(only["rows"])]


def test_choices_can_be_applied_and_say_what_changes_the_numerics(client: TestClient) -> None:
    question = {**QUESTION, "fixed": {"pp": "1", "stack": "torchtitan"}}
    choices = events(client, "ask", question)[-1]["choices"]
    assert {each["field"] for each in choices} >= {"compile", "precision"}
    for each in choices:
        assert each["changes_numerics"] == (each["field"] == "precision")
        if each["field"] == "precision":
            applied = events(client, "ask", {**question, "fixed": {**question["fixed"], **each["fixed"]}})
            assert applied[-1]["top"][0]["step_time_s"] == pytest.approx(each["best"]["step_time_s"], rel=0.2)


def test_exports_are_what_the_commands_write(client: TestClient, answered: list[dict[str, Any]], tmp_path) -> None:
    about = {"question": QUESTION, "row": answered[-1]["top"][0]["row"]}
    text = client.post("/api/export", json={"kind": "yaml", "about": about}).text
    (tmp_path / "plan.yaml").write_text(text)
    told = run_here(tmp_path, "predict", "gpt2-small", "--cluster", "h100-sxm", "--plan-file", "plan.yaml", "--json")
    assert json.loads(told.stdout)["step_time_s"] == answered[-1]["top"][0]["step_time_s"]
    table = client.post("/api/export", json={"kind": "csv", "about": about}).text
    assert table.splitlines()[0].startswith("rank,status,reason,step_time_s")
    assert len(table.splitlines()) >= answered[-1]["points"]["possible"]
    llama = {**about["question"], "model": "llama-3.1-8b", "fixed": {"pp": "1", "tp": "1", "stack": "torchtitan"}}
    refused = client.post("/api/export", json={"kind": "launch", "tool": "torchtitan", "about": about})
    assert "gelu" in refused.json()["error"]
    best = events(client, "ask", llama)[-1]["top"][0]
    about = {"question": llama, "row": best["row"]}
    archive = client.post("/api/export", json={"kind": "launch", "tool": "torchtitan", "about": about})
    assert archive.status_code == 200, archive.text
    with zipfile.ZipFile(io.BytesIO(archive.content)) as files:
        assert "notes.txt" in files.namelist()


def test_the_command_of_a_question_asks_the_same(client: TestClient) -> None:
    told = client.post("/api/command", json={**QUESTION, "fixed": {"tp": "1,2", "compile": "true"}}).json()["command"]
    assert told.startswith("forerun plan gpt2-small --cluster h100-sxm --gpus 8 --seq-len 1024 --global-batch 64")
    assert told.endswith("--tp 1,2 --compile")


def test_scaling_is_the_best_plan_of_each_size_for_the_same_batch(client: TestClient) -> None:
    told = events(
        client, "scale", {**QUESTION, "fixed": {"stack": "torchtitan", "pp": "1", "tp": "1", "compile": "true"}}
    )
    points = told[-1]["points"]
    assert told[-1]["done"]
    assert [point["n_gpus"] for point in points] == [2, 4, 8, 16, 32]
    assert {point["global_batch"] for point in points} == {64}
    assert points[0]["efficiency"] == 1
    assert all(0 < point["efficiency"] <= 1.001 for point in points if point["best"])


def test_a_dropped_config_is_a_model(client: TestClient) -> None:
    answer = client.post("/api/model", json={"name": "tiny.json", "text": json.dumps(CONFIG)})
    assert answer.status_code == 200, answer.text
    question = {**QUESTION, "model": answer.json()["model"], "fixed": {"pp": "1", "stack": "torchtitan"}}
    assert events(client, "ask", question)[-1]["top"]


def test_a_model_of_the_hubs_cache_is_offered_and_asked(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert client.post("/api/options", json={}).json()["cached_models"] == []
    for name, config in (("tiny", CONFIG), ("odd", {**CONFIG, "model_type": "unheard-of"})):
        folder = tmp_path / f"models--org--{name}" / "snapshots" / "0"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    assert client.post("/api/options", json={}).json()["cached_models"] == ["org/odd", "org/tiny"]
    asked = {**QUESTION, "model": "org/tiny", "fixed": {}}
    assert "forerun plan org/tiny" in client.post("/api/command", json=asked).json()["command"]
    refused = client.post("/api/ask", json={**asked, "model": "org/odd"})
    assert refused.status_code == 400
    assert "forerun plan" in refused.json()["error"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 0}, "gpus"),
        ({"gpus": "8"}, "gpus"),
        ({"gpus": 1 << 30}, "gpus"),
        ({"more": 1}, "more"),
        ({"model": "/etc/passwd"}, "unknown model"),
        ({"model": "./config.json"}, "unknown model"),
        ({"model": "org/model"}, "unknown model"),
        ({"cluster": "../cluster.yaml"}, "unknown cluster"),
        ({"fixed": {"stack": "/tmp/stack.yaml"}}, "unknown stack"),
        ({"fixed": {"tp": "x"}}, "--tp"),
        ({"fixed": {"nothing": "1"}}, "unknown field"),
        ({"fixed": {"tp": ",".join(map(str, range(1, 40)))}}, "at most 16"),
        ({"memory_limit": 1e4}, "memory limit"),
        ({"price": -1.0}, "price"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(client: TestClient, changes: dict[str, Any], words: str) -> None:
    answer = client.post("/api/ask", json={**QUESTION, **changes})
    assert answer.status_code == 400
    assert words in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    "about", [{"row": 10**6}, {}, {"row": -1}, {"plan": {"tp": 3}}, {"plan": {"stack": "/tmp/x.yaml"}}, {"path": "x"}]
)
def test_a_wrong_plan_is_refused(client: TestClient, answered: list[dict[str, Any]], about: dict[str, Any]) -> None:
    answer = client.post("/api/plan", json={"question": QUESTION, **about})
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_question_without_a_plan_says_why(client: TestClient) -> None:
    told = events(client, "ask", {**QUESTION, "fixed": {"tp": "7"}})
    assert told[-1]["kind"] == "error"
    assert "no plan" in told[-1]["message"]


def test_too_much_work_is_refused_before_it_begins(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MOST_PLANS", 10)
    told = events(client, "ask", {**QUESTION, "gpus": 16})
    assert told[-1]["kind"] == "error"
    assert "at most 10" in told[-1]["message"]


def question(**changes: Any) -> Question:
    return Question(**{**QUESTION, **changes})


def test_a_newer_question_of_a_page_takes_the_place_of_the_one_before_and_of_no_other_pages() -> None:
    own = planner.Planner()
    first = own.ask(question(gpus=32), "this page")
    other = own.ask(question(gpus=4), "another page")
    second = own.ask(question(fixed={"pp": "1", "tp": "1", "stack": "torchtitan"}), "this page")
    assert list(iter(first.next, None))[-1] == {"kind": "superseded"}
    told = list(iter(other.next, None))
    assert told[-1]["whole"]
    told = list(iter(second.next, None))
    assert told[0] == {"kind": "waiting"}
    assert [each["whole"] for each in told if each["kind"] == "answer"] == [False, True]


def test_a_search_ends_where_nobody_waits_for_it_and_the_next_one_runs() -> None:
    own = planner.Planner()
    large = own.ask(question(model="llama-3.1-8b", gpus=64, seq_len=8192, global_batch=256, fixed={}))
    assert large.next()["kind"] == "space"
    start = time.monotonic()
    large.cancel()
    assert list(iter(large.next, None))[-1] == {"kind": "superseded"}
    assert time.monotonic() - start < 10 * PATIENCE_S, "the time of a screening is longer"
    assert list(iter(own.ask(question()).next, None))[-1]["whole"]


def test_an_error_that_nobody_expects_is_one_line(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret /home/path")

    monkeypatch.setattr(app, "preset_document", broken)
    answer = client.post("/api/preset", json={"kind": "run", "name": "x"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "a bug of Forerun: RuntimeError" in answer.json()["error"]
