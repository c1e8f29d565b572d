"""What the form of the page offers, and what it says of other plans, by known answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from forerun.describe.plan.fields import FOLLOWING, MEANINGS
from forerun.interfaces.report.style import WORK_LOOKS
from forerun.interfaces.serve import planner
from forerun.interfaces.serve.options import FIRST, options_record


def test_the_form_offers_every_field_once_the_main_ones_first() -> None:
    fields = options_record()["fields"]
    names = [each["name"] for each in fields]
    assert tuple(names[: len(FIRST)]) == FIRST
    assert len(names) == len(set(names))
    assert set(names) == set(MEANINGS) - set(FOLLOWING)
    assert [each["first"] for each in fields] == [True] * len(FIRST) + [False] * (len(names) - len(FIRST))
    help_of = {each["name"]: each["help"] for each in fields}
    assert help_of.pop("stack") == "training framework"  # the page opens no file of a user
    assert all(text == MEANINGS[name] for name, text in help_of.items())


def test_fields_offer_their_values() -> None:
    values = {each["name"]: each["values"] for each in options_record()["fields"]}
    assert values["compile"] == ["true", "false"]
    assert values["zero_stage"] == ["0", "1", "2", "3"]
    assert values["tp"] == []
    assert {"torchtitan", "megatron-core"} <= set(values["stack"])


def test_the_rest_of_the_form() -> None:
    found = options_record()
    assert found["limits"].keys() == {"gpus", "seq_len", "global_batch", "images", "encoder_seq_len", "mtp"}
    about = {each["name"]: each for each in found["clusters"]}["h100-sxm"]
    assert about["about"] == "8 GPUs a node, 79 GiB"
    assert round(about["memory_gib"]) == 79
    assert (found["example"]["model"], found["example"]["gpus"]) == ("llama-3.1-8b", 64)
    assert {"models", "tools", "experiments", "runs", "version", "cached_models"} <= found.keys()
    assert "llama-3.1-8b" in found["models"]
    assert "torchtitan" in found["tools"]


def prediction(step_s: float, parts: dict[str, float] | None = None, fits: bool = True, plan: Any = None) -> Any:
    return SimpleNamespace(
        step_time_s=step_s, fits=fits, breakdown=parts or {}, plan=plan, peak_reserved_gib=90.0, memory_limit_gib=79.2,
        own_plan=lambda: plan,
    )  # fmt: skip


def test_why_another_plan_is_slower_or_faster() -> None:
    first, second, third = list(WORK_LOOKS)[:3]
    names = [WORK_LOOKS[name].label for name in (first, second, third)]
    own = prediction(2.0, {first: 1.0, second: 0.5, third: 0.5})
    slower = prediction(3.0, {first: 1.5, second: 0.8, third: 0.7})
    assert planner._why(own, slower) == f"{names[0]} +500 ms, {names[1]} +300 ms"
    assert planner._why(slower, own) == f"{names[0]} -500 ms, {names[1]} -300 ms"
    mostly = prediction(3.0, {first: 1.0, second: 1.45, third: 0.55})
    assert planner._why(own, mostly) == f"{names[1]} +950 ms"
    assert planner._why(mostly, own) == f"{names[1]} -950 ms"
    assert planner._why(own, prediction(3.0, {first: 2.0, third: 0.5})) == f"{names[0]} +1.00 s"
    assert planner._why(own, own) == "no large change"
    large = prediction(1.0, fits=False)
    assert planner._why(own, large) == "does not fit: needs 90.0 of 79.2 GiB"
    large.peak_reserved_gib = 78.4
    assert planner._why(own, large) == "does not fit: needs 78.4 of 79.2 GiB beside CUDA and NCCL"


def test_the_place_of_a_plan() -> None:
    ranked = [prediction(2.0, plan="a"), prediction(2.5, plan="b")]
    result: Any = SimpleNamespace(ranked=ranked, reason_of=lambda plan: f"{plan} does not fit")
    assert planner._standing(result, ranked[0]) == "place 1 of 2 that were simulated and fit"
    assert planner._standing(result, ranked[1]) == (
        "place 2 of 2 that were simulated and fit, 25.0% slower than the best"
    )
    assert planner._standing(result, prediction(1.0, plan="c")) == "c does not fit"
