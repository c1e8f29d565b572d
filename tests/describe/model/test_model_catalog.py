"""Presets and users' own YAML files."""

from pathlib import Path

import pytest
import yaml

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.model.catalog import layered_names, load_model, model_names, model_table
from forerun.describe.model.fields import Fields
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec_file import load_spec_file, read_spec, spec_mapping

FAMILIES_ASKED_FOR = [
    *("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.1-70b"),
    *("llama-3.1-405b", "qwen2.5-0.5b", "qwen2.5-72b", "qwen3-0.6b", "qwen3-32b", "qwen3-30b-a3b"),
    *("qwen3-235b-a22b", "mistral-7b-v0.1", "mixtral-8x7b", "mixtral-8x22b", "deepseek-v2", "deepseek-v2-lite"),
    *("deepseek-v3", "gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b", "bert-base", "bert-large"),
    *("mpt-125m", "mpt-70b", "megatron-1.7b", "megatron-1t"),
]
MINE = "n_layers: 2\nhidden: 64\nn_heads: 4\nffn_hidden: 128\nvocab: 1000\n"


@pytest.mark.parametrize("name", model_names())
def test_every_preset_reads_back_from_its_own_fields(name: str) -> None:
    spec = load_model(name)
    mapping = spec_mapping(spec)
    assert mapping.pop("name") == name
    text = yaml.safe_dump(mapping)
    assert read_spec(Fields(yaml.safe_load(text), "again"), name) == spec
    assert hash(read_spec(Fields(mapping, "again"), name)) == hash(spec)


def test_presets_asked_for_are_there() -> None:
    assert set(FAMILIES_ASKED_FOR) <= set(model_names())


def test_every_row_of_the_table_says_where_it_comes_from() -> None:
    rows = {row.name: row for row in model_table()}
    assert list(rows) == [*model_names(), *layered_names()]
    assert all(row.source for row in rows.values())
    mixtral = rows["mixtral-8x7b"]
    assert (mixtral.parameters, mixtral.layers, mixtral.hidden, mixtral.heads) == (46_702_792_704, 32, 4096, 32)
    assert mixtral.active_parameters == 12_879_925_248


def test_every_preset_carries_a_published_count() -> None:
    """Reading a preset fails where the count differs; here it is that none goes without."""
    folder = Path(__file__).parents[3] / "src" / "forerun" / "model" / "presets"
    for path in folder.glob("*.yaml"):
        for name, entry in yaml.safe_load(path.read_text())["models"].items():
            assert {"parameters", "parameters_billion"} & set(entry), name


def test_names_are_taken_in_any_case() -> None:
    assert load_model("LLaMA-3.1-8B") == load_model("llama-3.1-8b")


def test_unknown_name_offers_close_ones_first() -> None:
    with pytest.raises(UnknownName) as error:
        load_model("llama3.1-8b")
    assert str(error.value).startswith("unknown model or folder 'llama3.1-8b'; did you mean llama-3.1-8b")
    assert "forerun models lists the" in str(error.value)


@pytest.mark.parametrize(
    ("name", "offered"),
    [("gpt2", "did you mean gpt2-small"), ("zzz", "forerun models lists the")],
)
def test_part_of_a_name_offers_the_whole(name: str, offered: str) -> None:
    with pytest.raises(UnknownName, match=offered):
        load_model(name)


def test_name_of_the_hub_offers_the_preset_of_that_name() -> None:
    with pytest.raises(ForerunError, match=r"did you mean llama-3\.1-8b"):
        load_model("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("name", ["", " ", "x" * 5000, "a\0b"])
def test_what_can_be_no_name_is_unknown(name: str) -> None:
    with pytest.raises(UnknownName):
        load_model(name)


def test_a_file_of_ones_own_is_named_by_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    spec = load_model(path)
    assert (spec.name, spec.n_kv_heads, spec.head_dim, spec.mlp) == ("mine", 4, 16, "swiglu")
    path.write_text(MINE + "name: other\nsource: me\n")
    assert load_model(str(path)).name == "other"


def test_a_file_of_ones_own_may_have_experts_and_latent_attention(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    moe = "moe: {n_experts: 8, top_k: 2, expert_ffn: 32, capacity_factor: 1.25}\n"
    mla = "mla: {kv_lora_rank: 16, qk_nope_dim: 8, qk_rope_dim: 4, v_head_dim: 8}\n"
    path.write_text(MINE + moe + mla)
    spec = load_spec_file(path)
    assert spec.moe is not None
    assert spec.mla is not None
    assert (spec.moe.capacity_factor, spec.head_dim, spec.mla.q_lora_rank) == (1.25, 8, None)


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ("hiden: 3\n", ["hiden", "did you mean hidden?"]),
        ("mlp: silu\n", ["mlp", "'silu'", "swiglu"]),
        ("moe: {n_experts: 8, top_k: 2}\n", ["moe", "expert_ffn"]),
        ("moe: {n_experts: 8, top_k: 2, expert_ffn: 32, shared: 1}\n", ["in moe", "shared"]),
        ("moe: {n_experts: 8, top_k: 2, expert_ffn: 32, capacity_factor: -1}\n", ["capacity_factor", "positive"]),
        ("moe: {n_experts: 0, top_k: 2, expert_ffn: 32}\n", ["moe"]),
        ("mla: {kv_lora_rank: 0, qk_nope_dim: 8, qk_rope_dim: 4, v_head_dim: 8}\n", ["mla"]),
        ("mla: [1]\n", ["mla", "a mapping"]),
        ("n_kv_heads: 3\n", ["n_kv_heads 3"]),
        ("pooler_classes: 2\n", ["pooler"]),
        ("sliding_window: -5\n", ["sliding_window"]),
        ("qkv_bias: 1\n", ["qkv_bias", "true or false"]),
        ("parameters: 12\n", ["parameters", "12"]),
        ("parameters_billion: '1.0'\n", ["parameters_billion", "1.0"]),
        ("position: {\n", ["not valid YAML"]),
        ("when: 2020-99-99\n", ["mine.yaml"]),
    ],
)
def test_a_bad_file_of_ones_own_gives_one_line(tmp_path: Path, extra: str, parts: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE + extra)
    with pytest.raises(ForerunError) as error:
        load_model(path)
    assert "\n" not in str(error.value)
    for part in ("mine.yaml", *parts):
        assert part in str(error.value)


def test_heads_that_do_not_divide_the_width_need_their_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace("n_heads: 4", "n_heads: 5"))
    with pytest.raises(ForerunError, match="head_dim is not stated"):
        load_model(path)
    path.write_text(MINE.replace("n_heads: 4", "n_heads: 5") + "head_dim: 16\n")
    assert parameter_count(load_model(path)) > 0


@pytest.mark.parametrize("name", ["./nowhere", "nowhere.yaml", "some/folder", "nowhere.json"])
def test_a_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ForerunError, match=r"nowhere|some/folder"):
        load_model(Path(name))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"0")
    with pytest.raises(ForerunError, match=r"\.json, \.yaml, \.yml"):
        load_model(tmp_path / "weights.bin")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(ForerunError, match="must be a YAML mapping"):
        load_model(tmp_path / "mine.yaml")
