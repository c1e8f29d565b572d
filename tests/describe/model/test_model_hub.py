"""Models of the hub's cache by name, and families that are read by what transformers builds of them."""

import json
from pathlib import Path

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_any, load_model
from forerun.describe.model.fields import Fields
from forerun.describe.model.meta_device import recognised, spec_from_transformers
from forerun.describe.model.parameters import parameter_count

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama-3.1-8b" / "config.json"
KNOWN = json.loads((Path(__file__).parent / "reference_configs_v5.json").read_text())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "hub" / "models--org--Some-8B"


def put(cache: Path, commit: str, **changes: int) -> None:
    folder = cache / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(json.loads(EXAMPLE.read_text()) | changes))


def test_a_name_of_the_hub_is_read_from_its_cache(cache: Path) -> None:
    put(cache, "abc")
    assert load_model("org/Some-8B").name == "Some-8B"
    assert parameter_count(load_model("org/Some-8B")) == parameter_count(load_model("llama-3.1-8b"))
    assert load_any("org/Some-8B") == load_model("org/Some-8B")


def test_the_main_branch_goes_before_other_commits(cache: Path) -> None:
    put(cache, "main-commit", num_hidden_layers=3)
    put(cache, "other", num_hidden_layers=5)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("main-commit")
    assert load_model("org/Some-8B").n_layers == 3


def test_nothing_is_downloaded_unasked(cache: Path) -> None:
    with pytest.raises(ForerunError, match=r"not in the hub cache .* `forerun models org/other --download`"):
        load_model("org/other")


LLAMA = {"model_type": "new", "vocab_size": 100, "num_attention_heads": 4}
LAYER = {
    **{f"self_attn.{word}_proj.weight": (rows, 32) for word, rows in (("q", 32), ("k", 16), ("v", 16), ("o", 32))},
    **{f"mlp.{word}_proj.weight": shape for word, shape in (("gate", (80, 32)), ("up", (80, 32)), ("down", (32, 80)))},
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
}
SHAPES = {
    "model.embed_tokens.weight": (100, 32),
    **{f"model.layers.{number}.{name}": shape for number in range(3) for name, shape in LAYER.items()},
    "model.norm.weight": (32,),
}


def test_layers_are_recognised_by_the_shapes_of_their_parameters() -> None:
    spec = recognised(SHAPES, Fields(LLAMA, "config.json"), "new")
    assert (spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.ffn_hidden, spec.tied_embeddings) == (3, 4, 2, 80, True)


def test_parameters_that_no_part_explains_are_an_error() -> None:
    more = SHAPES | {"model.layers.1.mystery.weight": (7, 9)}
    with pytest.raises(ForerunError, match=r"layer 1 has .* parameters .*mystery\.weight"):
        recognised(more, Fields(LLAMA, "config.json"), "new")


def test_without_transformers_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ForerunError, match="'new' is not known; with torch and transformers installed") as error:
        spec_from_transformers(Fields(LLAMA, "config.json"), "new")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gemma2-9b", "gpt-oss-20b"])
def test_what_transformers_builds_is_what_the_family_reads(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    entry = KNOWN[name]
    spec = spec_from_transformers(Fields(entry["config"], name), name)
    assert parameter_count(spec) == entry["counts"]["total"]
    assert [spec.layer(layer).sliding_window for layer in (0, 1)] in ([4096, None], [128, None])
