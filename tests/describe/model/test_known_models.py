"""config.json files of both generations of Hugging Face transformers give exactly the parameters that it builds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference_counts import counted

from forerun.describe.model.catalog import load_model, model_names
from forerun.describe.model.families import FAMILIES
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.parameters import active_parameter_count, encoder_parameter_count, parameter_count
from forerun.describe.model.spec import ModelSpec

HERE = Path(__file__).parent
KNOWN = {
    f"{name}, transformers {generation}": entry
    for generation in (4, 5)
    for name, entry in json.loads((HERE / f"reference_configs_v{generation}.json").read_text()).items()
}
_OF_OTHER_TESTS = {"bert", "camembert", "kimi_k2", "modernbert", "roberta", "xlm-roberta"}
"""families beside those of test_hub_code_models.py that other tests read"""


def spec_of(entry: dict[str, Any]) -> ModelSpec:
    return spec_from_config(Fields(entry["config"], "config.json"), "known")


def test_all_and_active_parameters_of_every_known_model() -> None:
    found, expected = {}, {}
    for name, entry in KNOWN.items():
        spec, counts = spec_of(entry), entry["counts"]
        found[name] = parameter_count(spec), active_parameter_count(spec)
        tower = 0 if spec.runs else counts.get("tower", 0)  # of most towers samples have no images
        expected[name] = tuple(counts[which] - tower for which in ("total", "active"))
        if spec.encoder is not None and tower:
            found[name] = *found[name], encoder_parameter_count(spec.encoder)
            expected[name] = *expected[name], tower
    assert len({name.split(",")[0] for name in KNOWN}) >= 70
    assert found == expected


def test_both_generations_of_keys_make_the_same_model() -> None:
    both = [name for name in KNOWN if name.endswith(" 4") and name[:-1] + "5" in KNOWN]
    assert len(both) > 70
    for name in both:
        assert spec_of(KNOWN[name]) == spec_of(KNOWN[name[:-1] + "5"]), name


def test_every_family_has_a_known_model() -> None:
    configs = [entry["config"] for entry in KNOWN.values()]
    texts = [config.get("text_config", {}) for config in configs]
    seen = {config.get("model_type") for config in (*configs, *texts)}
    of_the_hub = {name for name, known in FAMILIES.items() if known.read.__module__.endswith("huggingface_hub_code")}
    assert set(FAMILIES) - seen - of_the_hub <= _OF_OTHER_TESTS


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-next-80b-a3b", "falcon-h1-1.5b", "gemma3-1b", "olmo2-7b"])
def test_counts_are_those_of_the_installed_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    entry = KNOWN[f"{name}, transformers {transformers.__version__.split('.')[0]}"]
    assert counted(entry["config"]) == entry["counts"]


PRESETS = {
    "command-r-35b": "cohere-command-r",
    "command-r-7b": "cohere2-command-r7b",
    "dots.llm1": "dots1",
    "ernie-4.5-21b-a3b": "ernie4_5-21b-a3b",
    "mistral-small-24b": "mistral3-small-24b",
    "nemotron-h-8b": "nemotron_h-8b",
    "phi-3.5-moe": "phimoe-3.5",
}
"""presets whose known model has another name"""


def test_presets_are_the_known_models_of_their_names() -> None:
    known = {name.split(",")[0]: entry for name, entry in KNOWN.items()}
    checked = 0
    for name in model_names():
        entry = known.get(PRESETS.get(name, name))
        if entry is not None and name != "mpt-30b":  # the preset is llm-foundry's, with positions and biases
            own = load_model(name)  # some presets are the language models alone of files with a tower
            assert replace(spec_of(entry), name=name, encoder=own.encoder) == own
            checked += 1
    assert checked > 45
