"""Models of the hub's cache by name, and families that are read by what transformers builds of them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path

import pytest
from reference_counts import counted

from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_any, load_model
from forerun.describe.model.fields import Fields
from forerun.describe.model.hub import download_config
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.meta_device import recognised, spec_from_transformers
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import MLASpec, ModelSpec

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


class Hub(BaseHTTPRequestHandler):
    """A hub that has one model for everybody, and one for people who logged in."""

    def do_GET(self) -> None:  # the name that the base class asks for
        public = self.path == "/org/Some-8B/resolve/main/config.json"
        self.send_response(200 if public else 401 if "gated" in self.path else 404)
        self.send_header("X-Repo-Commit", "abc123")
        self.end_headers()
        if public:
            self.wfile.write(EXAMPLE.read_bytes())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield cache
        server.shutdown()


def test_a_config_is_downloaded_to_the_cache(hub: Path) -> None:
    assert download_config("org/Some-8B") == hub / "snapshots" / "abc123" / "config.json"
    assert parameter_count(load_model("org/Some-8B")) == parameter_count(load_model("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/gated", "HTTP 401 .*needs a login: run `hf auth login` and `hf download org/gated config.json`"),
        ("org/none", "HTTP 404"),
        ("gpt5", "gpt5: can't be downloaded: a model of the Hugging Face hub is written org/model"),
        ("a/b/c", "is written org/model"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(hub: Path, name: str, says: str) -> None:
    with pytest.raises(ForerunError, match=says) as error:
        download_config(name)
    assert "\n" not in str(error.value)


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
    more = SHAPES | {"model.layers.1.mystery.weight": (70, 90)}
    with pytest.raises(ForerunError, match=r"layer 1 has .* parameters .*mystery\.weight"):
        recognised(more, Fields(LLAMA, "config.json"), "new")


def with_layers(**changed: tuple[int, ...] | None) -> dict[str, tuple[int, ...]]:
    """SHAPES with parameters of every layer added or, for None, taken away; `__` stands for a dot."""
    layer = {
        name: shape for name, shape in (LAYER | {k.replace("__", "."): v for k, v in changed.items()}).items() if shape
    }
    outer = {name: shape for name, shape in SHAPES.items() if ".layers." not in name}
    return outer | {f"model.layers.{number}.{name}": shape for number in range(3) for name, shape in layer.items()}


def read(shapes: dict[str, tuple[int, ...]], **more: object) -> ModelSpec:
    spec = recognised(shapes, Fields(LLAMA | more, "config.json"), "new")
    assert parameter_count(spec) == sum(map(prod, shapes.values()))
    return spec


def test_a_few_parameters_of_no_known_part_are_counted_and_said() -> None:
    spec = read(with_layers(mlp__act__alpha=(1,), self_attn__scale=(32,)))
    assert spec.other_parameters == 33
    assert "33 parameters of a layer are of no known part; they take no time" in spec.notes[0]
    assert read(with_layers()).notes == ()


def test_a_matrix_of_no_known_part_is_too_much() -> None:
    with pytest.raises(ForerunError, match="layers that are not recognised"):
        read(with_layers(mlp__own__weight=(32, 32)))


def test_latent_attention_is_recognised_by_its_projections() -> None:
    latent = {
        "self_attn__q_a_proj__weight": (24, 32),
        "self_attn__q_a_layernorm__weight": (24,),
        "self_attn__q_b_proj__weight": (4 * 12, 24),
        "self_attn__kv_a_proj_with_mqa__weight": (16 + 4, 32),
        "self_attn__kv_a_layernorm__weight": (16,),
        "self_attn__kv_b_proj__weight": (4 * (8 + 8), 16),
    }
    gone = {f"self_attn__{word}_proj__weight": None for word in "qkv"}
    spec = read(with_layers(**latent, **gone), v_head_dim=8)
    assert spec.mla == MLASpec(16, qk_nope_dim=8, qk_rope_dim=4, v_head_dim=8, q_lora_rank=24)


def test_gates_and_norms_without_weights_are_recognised() -> None:
    assert read(with_layers(self_attn__gate_proj__weight=(32, 32))).attention_gate
    bare = with_layers(input_layernorm__weight=None, post_attention_layernorm__weight=None)
    del bare["model.norm.weight"]
    assert not read(bare).norm_weight


def test_layer_types_of_other_layers_than_are_built_are_one_line() -> None:
    with pytest.raises(ForerunError, match="layer_types has 5 entries, but transformers builds 3 layers"):
        read(SHAPES, layer_types=["full_attention"] * 5)


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["apertus", "sarvam_mla", "stablelm", "nanochat"])
def test_models_read_with_transformers_alone_have_the_parameters_that_transformers_builds(model_type: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {model_type}")
    content = transformers.AutoConfig.for_model(model_type).to_diff_dict()
    plain = {"model_type": model_type} | json.loads(json.dumps(content, default=str))
    spec = spec_from_transformers(Fields(plain, "config.json"), model_type)
    assert parameter_count(spec) == counted(plain)["total"]


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


@pytest.mark.parametrize(
    ("parameter", "why"), [("linear_attn.A_log", "recurrence"), ("self_attn.lambda_q1", "differential attention")]
)
def test_layers_with_other_mixers_are_not_taken_for_attention(parameter: str, why: str) -> None:
    more = SHAPES | {f"model.layers.0.{parameter}": (16,)}
    with pytest.raises(ForerunError, match=why):
        recognised(more, Fields(LLAMA, "config.json"), "new")


def test_a_tower_before_a_known_family_needs_no_transformers() -> None:
    text = json.loads(EXAMPLE.read_text())
    whole = {"model_type": "unheard_of", "vision_config": {}, "text_config": text}
    spec = spec_from_config(Fields(whole, "config.json"), "x")
    assert spec == spec_from_config(Fields(text, "config.json"), "x")
    assert "the language model of unheard_of alone; left out: vision_config" in spec.notes[0]
