"""Requests of the page: their bounds, what they mean, and the records of results that are written by hand."""

from __future__ import annotations

import io
import zipfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.answers.search.outcome import Status
from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.page import Figures, Table
from forerun.interfaces.serve import exports, question, records
from forerun.interfaces.serve.question import AboutPlan, Question, asked, checked, plan_of, wanted_fields
from forerun.interfaces.serve.rows import matching

LEAST = {"model": "gpt2-small", "cluster": "h100-sxm", "gpus": 8, "seq_len": 1024, "global_batch": 64}


def asking(**changes: Any) -> question.Asked:
    return asked(checked(Question, {**LEAST, **changes}), {})


@pytest.mark.parametrize(
    ("key", "least", "below", "most", "above"),
    [
        ("gpus", 1, 0, 1 << 17, (1 << 17) + 1),
        ("seq_len", 1, 0, 1 << 24, (1 << 24) + 1),
        ("global_batch", 1, 0, 1 << 20, (1 << 20) + 1),
        ("price", 1e-9, 0.0, 1e6, 1.1e6),
        ("memory_limit", 1e-9, 0.0, 1e5, 1.1e5),
        ("model", "a", "", "a" * 200, "a" * 201),
        ("cluster", "a", "", "a" * 200, "a" * 201),
    ],
)
def test_a_value_of_a_question_has_bounds(key: str, least: Any, below: Any, most: Any, above: Any) -> None:
    for value in (least, most):
        assert getattr(checked(Question, {**LEAST, key: value}), key) == value
    for value in (below, above):
        with pytest.raises(ForerunError, match=f"{key}: "):
            checked(Question, {**LEAST, key: value})


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({**LEAST, "gpus": 8.5}, "gpus: "),
        ({**LEAST, "gpus": "8"}, "gpus: input should be a valid integer"),
        ({**LEAST, "more": 1}, "more: extra inputs are not permitted"),
        ({**LEAST, "objective": "money"}, "objective: input should be 'time' or 'memory'"),
        ({**LEAST, "fixed": {"tp": "1" * 401}}, "fixed.tp: "),
        ({**LEAST, "fixed": {"tp": 1}}, "fixed.tp: input should be a valid string"),
        (7, "the request: "),
    ],
)
def test_what_is_no_question_names_the_key(data: Any, problem: str) -> None:
    with pytest.raises(ForerunError, match=problem):
        checked(Question, data)


def test_the_number_of_a_plan_is_not_negative() -> None:
    assert checked(AboutPlan, {"question": LEAST, "row": 0}).row == 0
    with pytest.raises(ForerunError, match="row: "):
        checked(AboutPlan, {"question": LEAST, "row": -1})


def test_a_question_as_a_command() -> None:
    assert asking().command() == "forerun plan gpt2-small --cluster h100-sxm --gpus 8 --seq-len 1024 --global-batch 64"
    words = asking(
        objective="memory",
        memory_limit=70.5,
        fixed={"tp": "1,2", "compile": "true", "async_tp": "false", "activation_checkpointing": "full"},
    ).command()
    assert words.endswith(
        "--objective memory --memory-limit 70.5 --tp 1,2 --compile --no-async-tp --activation-checkpointing full"
    )


def test_a_question_states_the_inputs_of_an_encoder() -> None:
    stated = asking(model="llava-1.5-7b", images=2, encoder_seq_len=400, freeze_encoder=True)
    assert stated.command().endswith("--global-batch 64 --images 2 --encoder-seq-len 400 --freeze-encoder")
    encoder = stated.model.encoder
    assert encoder is not None
    assert (encoder.inputs, encoder.tokens, encoder.frozen) == (2, 400 + encoder.extra_tokens, True)
    assert asking(mtp=1).model.mtp_modules == 1
    assert asking(mtp=1).command().endswith("--mtp 1")
    with pytest.raises(ForerunError, match="model gpt2-small has neither a tower nor an encoder"):
        asking(images=2)
    with pytest.raises(ForerunError, match="images: "):
        asking(images=4097)


def test_a_question_has_its_price_its_memory_and_its_stacks() -> None:
    plain, changed = asking(), asking(price=1.25, memory_limit=10.0, fixed={"stack": "torchtitan"})
    assert changed.cluster.price_per_gpu_hour == 1.25
    assert changed.where.device.memory_bytes == 10 * 2**30
    assert plain.where == plain.cluster
    assert (changed.choices, changed.searched) == ((), {"stack": "torchtitan"})
    assert plain.choices
    assert set(plain.searched) == {"stack"}
    assert plain.place == (plain.model, plain.cluster, 8, 1024, 64)


def test_fields_of_a_question_have_one_value_or_some() -> None:
    assert asking(fixed={"tp": "2", "pp": "1, 2", "compile": "true"}).fixed == {"tp": 2, "pp": [1, 2], "compile": True}
    assert len(asking(fixed={"tp": ",".join(map(str, range(1, 17)))}).fixed["tp"]) == 16
    with pytest.raises(ForerunError, match="tp: 17 values; a question takes at most 16"):
        asking(fixed={"tp": ",".join(map(str, range(1, 18)))})
    with pytest.raises(UnknownName, match="field of a plan"):
        asking(fixed={"tpp": "2"})
    with pytest.raises(UnknownName, match="stack"):
        asking(fixed={"stack": "nothing"})
    with pytest.raises(UnknownName, match="cluster"):
        asking(cluster="nowhere")
    with pytest.raises(UnknownName, match="model"):
        asking(model="../etc")


def test_a_filter_names_fields_and_values() -> None:
    assert wanted_fields(" tp=2, pp = 4,,virtual-stages=2,") == {"tp": 2, "pp": 4, "virtual_stages": 2}
    assert wanted_fields("") == {}
    with pytest.raises(ForerunError, match="tp: expected a field and its value"):
        wanted_fields("tp")
    with pytest.raises(UnknownName, match="field of a plan"):
        wanted_fields("x=1")


def test_a_plan_that_comes_back_is_one_of_the_question() -> None:
    here = asking()
    fields = {"dp_shard": 8, "micro_batch": 2, "n_microbatches": 4}
    assert plan_of(fields, here) == Plan(1024, **fields)
    for change in ({"dp_shard": 4}, {"micro_batch": 1}, {"n_microbatches": 5}):
        with pytest.raises(ForerunError, match="are not those of the question"):
            plan_of({**fields, **change}, here)
    with pytest.raises(UnknownName, match="stack"):
        plan_of({**fields, "stack": "nothing"}, here)


def predicted(step_s: float, gib: float, fits: bool = True, **fields: Any) -> Any:
    plan = Plan(1024, dp_shard=8, micro_batch=8, **fields)
    figures: dict[str, Any] = dict.fromkeys(records._FIGURES, 0)
    figures |= {"step_time_s": step_s, "peak_reserved_gib": gib, "fits": fits}
    return SimpleNamespace(**figures, own_plan=lambda: plan)


class Plans:
    """Six plans: three simulated, one of them too large; two bounded; one refused for its memory."""

    def __init__(self) -> None:
        self.values = {"tp": [1, 2], "pp": [4]}
        self.codes = {"tp": np.array([0, 1, 0, 1, 0, 1])}

    def __len__(self) -> int:
        return 6

    def rows(self, _: slice) -> Plans:
        return self

    def plan(self, row: int) -> Plan:
        return Plan(1024, tp=self.values["tp"][self.codes["tp"][row]])


def found(objective: str = "time") -> Any:
    ok, large, skipped = Status.OK, Status.TOO_LARGE, Status.SKIPPED
    outcome = SimpleNamespace(
        table=Plans(),
        status=np.array([ok, ok, large, skipped, skipped, large]),
        bound=np.array([1.0, 1.5, 0.5, 3.14159, 2.5, 0.0]),
        need_gib=np.array([10.0, 10.0, 50.0, 20.0, 30.0, 99.0]),
        predictions={0: predicted(2.0, 60.0), 1: predicted(1.75, 70.0), 2: predicted(0.75, 90.0, fits=False)},
        unfit={5: SimpleNamespace(plan=Plan(1024, tp=2), peak_reserved_gib=95.0)},
        least_s=lambda: {} if objective == "memory" else {5: 0.25},
    )
    return SimpleNamespace(outcome=outcome, objective=objective, reason_of=lambda plan: f"tp {plan.tp} is too large")


def test_plans_are_listed_by_what_is_known_of_them() -> None:
    result: Any = found()
    assert matching(result, {}, "all") == [1, 0, 4, 3, 2, 5]
    assert matching(result, {"tp": 2}, "all") == [1, 3, 5]
    assert matching(result, {"pp": 4}, "fits") == [1, 0]
    assert matching(result, {"pp": 1}, "all") == []
    assert matching(result, {}, "not simulated") == [4, 3]
    assert matching(result, {}, "does not fit") == [2, 5]
    assert matching(found("memory"), {}, "all") == [0, 1, 4, 3, 2, 5]


def test_points_have_time_and_memory_or_their_bounds() -> None:
    points = records.points_record(found())
    simulated = points["simulated"]
    assert (simulated["row"], simulated["s"]) == ([0, 1, 2, 5], [2.0, 1.75, 0.75, 0.25])
    assert (simulated["gib"], simulated["fits"]) == ([60.0, 70.0, 90.0, 95.0], [True, True, False, False])
    assert points["bounded"] == {"row": [3, 4], "s": [3.142, 2.5], "gib": [20.0, 30.0]}
    assert (points["shown"], points["possible"]) == (6, 6)
    assert records.points_record(found("memory"))["bounded"]["row"] == []


def test_of_too_many_points_every_so_manieth_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_POINTS", 2)
    assert records.points_record(found())["bounded"]["row"] == [3, 4]
    monkeypatch.setattr(records, "MOST_POINTS", 1)
    assert records.points_record(found())["bounded"]["row"] == [4]


def test_a_row_tells_what_is_known() -> None:
    simulated = records.row_record(found(), 2)
    assert (simulated["status"], simulated["step_time_s"], simulated["row"]) == ("does not fit", 0.75, 2)
    assert records.row_record(found(), 0)["status"] == "fits"
    bounded = records.row_record(found(), 3)
    assert (bounded["status"], bounded["least_s"], bounded["least_gib"]) == ("not simulated", 3.14159, 20.0)
    assert bounded["reason"] == "tp 2 is too large"
    large = records.row_record(found("memory"), 5)
    assert (large["status"], large["least_s"], large["least_gib"]) == ("does not fit", None, 95.0)


def test_a_choice_tells_its_gain_and_what_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "choice_words", lambda choice: "words")
    best, instead = predicted(2.0, 60.0, compile=True, precision="fp8", fp8_recipe="rowwise"), predicted(2.5, 60.0)
    choice: Any = SimpleNamespace(field="compile", caution="", best=best, instead=instead)
    found = records.choice_record(choice)
    assert (found["gain"], found["fixed"], found["changes_numerics"]) == (0.25, {"compile": "true"}, False)
    choice.field, choice.caution = "precision", records.OTHER_NUMERICS
    found = records.choice_record(choice)
    assert (found["fixed"], found["changes_numerics"]) == ({"precision": "fp8", "fp8_recipe": "rowwise"}, True)


def test_parts_of_a_page_are_plain_data() -> None:
    rows = tuple((str(n), "x") for n in range(5))
    table, figures = records.parts_record([Table(("a", "b"), rows, numeric=frozenset((1, 0)), most=3), Figures(())])
    assert (table["type"], figures["type"]) == ("table", "figures")
    assert (table["numeric"], table["n_rows"], table["rows"]) == ([0, 1], 5, rows[:3])
    assert "most" not in table


def test_scripts_of_an_archive_can_be_run() -> None:
    plan = Plan(1024, dp_shard=8)
    made = exports.launch_archive(plan, load_model("llama-3.1-8b"), load_cluster("h100-sxm"), "megatron-lm")
    assert (made.name, made.kind) == ("megatron-lm.zip", "application/zip")
    with zipfile.ZipFile(io.BytesIO(made.content)) as archive:
        modes = {entry.filename: entry.external_attr >> 16 for entry in archive.infolist()}
    assert modes == {"launch.sh": 0o755, "notes.txt": 0o644}
    text = exports.plan_file(plan, "forerun plan").content.decode()
    assert text.startswith("# forerun plan\n")
    assert "dp_shard: 8" in text
