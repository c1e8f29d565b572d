"""What the form of the page offers, by known answers."""

from __future__ import annotations

from forerun.describe.plan.fields import FOLLOWING, MEANINGS
from forerun.interfaces.serve.options import FIRST, options_record


def test_the_form_offers_every_field_once_the_main_ones_first() -> None:
    fields = options_record()["fields"]
    names = [each["name"] for each in fields]
    assert tuple(names[: len(FIRST)]) == FIRST
    assert len(names) == len(set(names))
    assert set(names) == set(MEANINGS) - set(FOLLOWING)
    assert [each["first"] for each in fields] == [True] * len(FIRST) + [False] * (len(names) - len(FIRST))
    assert all(each["help"] == MEANINGS[each["name"]] for each in fields)


def test_fields_offer_their_values() -> None:
    values = {each["name"]: each["values"] for each in options_record()["fields"]}
    assert values["compile"] == ["true", "false"]
    assert values["zero_stage"] == ["0", "1", "2", "3"]
    assert values["tp"] == []
    assert {"torchtitan", "megatron-core"} <= set(values["stack"])


def test_the_rest_of_the_form() -> None:
    found = options_record()
    assert found["limits"].keys() == {"gpus", "seq_len", "global_batch"}
    about = {each["name"]: each for each in found["clusters"]}["h100-sxm"]
    assert about["about"] == "8 GPUs a node, 79 GiB"
    assert round(about["memory_gib"]) == 79
    assert (found["example"]["model"], found["example"]["gpus"]) == ("llama-3.1-8b", 64)
    assert {"models", "tools", "experiments", "runs", "version", "cached_models"} <= found.keys()
    assert "llama-3.1-8b" in found["models"]
    assert "torchtitan" in found["tools"]
