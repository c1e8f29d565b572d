"""Experiment files that are wrong, made from a right one: (what is wrong, text of the file, what its message names)."""

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from forerun.answers.experiment.description.key_table import KeyRow, key_table
from forerun.describe.plan.fields import FIELD_TYPES, choices

RIGHT: dict[str, Any] = {
    "name": "right",
    "hardware": {"gpu_model": "A100", "num_gpus_per_node": 8},
    "model": {"model_type": "gpt2", "sequence_length": 256},
    "training": {"batch_size_per_gpu": 8, "num_iterations": 10, "num_nodes": 2},
}
LAYER = {"layer_id": "first", "layer_type": "linear", "input_shape": [16], "output_shape": [4]}
ONE_NODE = {
    "device": {
        "architecture": "ampere",
        "peak_tflops": {"bf16": 100},
        "memory_gib": 40,
        "memory_gb_s": 1000,
        "multiprocessors": 100,
        "power_w": 300,
    },
    "gpus_per_node": 8,
    "intra_node": {"kind": "nvlink", "gb_s": 100},
    "host_gb_s": 30,
}
"""a cluster without a link between nodes"""
ENTRIES = {
    "hardware.mixed": {"gpu_model": "V100", "num_nodes": 1},
    "training.stragglers": {"probability": 0.1, "slowdown": 2},
    "training.jitter": {"compute": 0.1},
}
"""keys that hold keys of their own, with a right value"""


class Malformed(NamedTuple):
    """One wrong file."""

    what: str
    text: str
    names: str
    """what the message has to contain"""
    suffix: str = ".yaml"


def _yaml(data: object) -> str:
    """`data` as YAML, in a tenth of the time that `yaml.safe_dump` takes: every worker writes all cases."""
    return yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False)


def malformed() -> list[Malformed]:
    """All of them, in an order that doesn't change."""
    rows = [row for row in key_table() if row.key not in ("description",)]
    return [
        *(case for row in rows for case in _misspelt(row)),
        *(case for row in rows for case in _of_wrong_type(row)),
        *(case for row in rows for case in _out_of_range(row)),
        *_missing(),
        *_misplaced(),
        *_contradictions(),
        *_unknown_names(),
        *_layers(),
        *_other_shapes(),
        *_broken_texts(),
    ]


def _changed(section: str, key: str, value: object) -> str:
    """The right file with one key more or another value of it."""
    data = copy.deepcopy(RIGHT)
    name, _, inner = key.replace("[]", "").partition(".")
    if inner:
        entry = {**ENTRIES[f"{section}.{name}"], inner: value}
        value = [entry] if "[]" in key else entry
    if section:
        data.setdefault(section, {})[name] = value
    else:
        data[name] = value
    return _yaml(data)


def _misspelt(row: KeyRow) -> Iterator[Malformed]:
    """A key with its middle letter left out."""
    parent, dot, name = row.key.rpartition(".")
    if len(name) < 4:
        return
    wrong = name[: len(name) // 2] + name[len(name) // 2 + 1 :]
    yield Malformed(f"{row.section}.{row.key} misspelt", _changed(row.section, parent + dot + wrong, 1), wrong)


def _of_wrong_type(row: KeyRow) -> Iterator[Malformed]:
    name = row.key.rpartition(".")[2]
    for value in ([[["deep"]]], {"colour": "red"}):
        yield Malformed(f"{row.section}.{row.key} is {value}", _changed(row.section, row.key, value), name)


_NO_NUMBERS = {"name", "handlers", "preset", "gpu_model", "cluster", "model_type", "config", "spec", "layers", "sample"}


def _out_of_range(row: KeyRow) -> Iterator[Malformed]:
    """Values that no number of an experiment can have."""
    name = row.key.rpartition(".")[2]
    if name in _NO_NUMBERS or (row.section == "training" and name in FIELD_TYPES and choices(name)):
        return
    for value in (float("nan"), float("inf"), -7, 10**30):
        yield Malformed(f"{row.section}.{row.key} is {value:g}", _changed(row.section, row.key, value), name)


def _missing() -> Iterator[Malformed]:
    for section in ("hardware", "model", "training"):
        data = {name: keys for name, keys in RIGHT.items() if name != section}
        yield Malformed(f"no {section}", _yaml(data), section)
    for section, key in (("hardware", "gpu_model"), ("model", "model_type"), ("training", "batch_size_per_gpu")):
        data = copy.deepcopy(RIGHT)
        del data[section][key]
        yield Malformed(f"no {section}.{key}", _yaml(data), key)
        data[section] = None
        yield Malformed(f"{section} is empty", _yaml(data), key)
    for path, entry in ENTRIES.items():
        section, _, key = path.partition(".")
        for inner in entry:
            if key != "jitter":
                rest = {name: value for name, value in entry.items() if name != inner}
                text = _changed(section, key, [rest] if key == "mixed" else rest)
                yield Malformed(f"no {path}.{inner}", text, inner)


def _misplaced() -> Iterator[Malformed]:
    """Keys in another section than their own."""
    for key, section, own in (
        ("num_nodes", "hardware", "training"),
        ("gpu_model", "training", "hardware"),
        ("batch_size_per_gpu", "model", "training"),
        ("hidden_size", "training", "model"),
        ("base_latency_us", "hardware", "network"),
        ("network_bandwidth_gbps", "network", "hardware"),
        ("dollars_per_kwh", "hardware", "prices"),
        ("zero_stage", "model", "training"),
        ("seed", "", "training"),
        ("topology_type", "", "network"),
    ):
        text = _changed(section, key, 1)
        yield Malformed(
            f"{key} in {section or 'no section'}", text, f"unknown key '{key}'; it belongs in section {own}"
        )


def _with(**sections: object) -> str:
    data = copy.deepcopy(RIGHT)
    for name, keys in sections.items():
        if isinstance(keys, dict):
            data[name] = {key: value for key, value in {**data.get(name, {}), **keys}.items() if value is not None}
        else:
            data[name] = keys
    return _yaml(data)


def _contradictions() -> Iterator[Malformed]:
    network = {"topology": "Ring", "npus_count": 16, "bandwidth": 50, "latency": 500}
    for sections, names in (
        ({"training": {"micro_batch": 4}}, "micro_batch"),
        ({"training": {"gradient_accumulation_steps": 2, "n_microbatches": 4}}, "n_microbatches"),
        ({"training": {"bucket_size_mb": 25, "ddp_bucket_mib": 50}}, "ddp_bucket_mib"),
        ({"training": {"overlap": True, "overlap_grad_reduce": False}}, "overlap_grad_reduce"),
        ({"training": {"mixed_precision": "fp16", "precision": "bf16"}}, "mixed_precision"),
        ({"training": {"seq_len": 128}}, "seq_len"),
        ({"training": {"total_samples": 10**6}}, "total_samples"),
        ({"training": {"total_tokens": 10**9}}, "total_tokens"),
        ({"training": {"num_iterations": None, "total_tokens": 10**9, "total_samples": 10**3}}, "total_samples"),
        ({"training": {"warmup_slowdown": 2}}, "warmup_slowdown"),
        ({"training": {"dp_replicate": 3}}, "dp_replicate"),
        ({"training": {"tp": 5}}, "tp"),
        ({"training": {"dp_shard": 16, "tp": 2}}, "dp_shard"),
        ({"training": {"pp": 2, "pp_schedule": "ZBV"}}, "virtual_stages"),
        ({"training": {"ep": 2}}, "ep"),
        ({"training": {"fp8_recipe": "rowwise"}}, "fp8_recipe"),
        ({"training": {"mixed_precision": "fp8"}}, "mixed_precision"),
        ({"training": {"zero_stage": 3, "communication_pattern": "ring_allreduce"}}, "communication_pattern"),
        ({"training": {"communication_pattern": {"efficiency": 0.5}}}, "communication_pattern"),
        ({"training": {"communication_pattern": {"name": "ring_allreduce", "servers": 2}}}, "servers"),
        ({"training": {"communication_pattern": {"name": "ring_allreduce", "efficiency": 2}}}, "efficiency"),
        ({"training": {"batch_schedule": [[5, 8], [5, 16]]}}, "batch_schedule"),
        ({"training": {"batch_schedule": [[5, 0]]}}, "batch_schedule"),
        ({"training": {"batch_schedule": [[5, 10**7]]}}, "batch_schedule"),
        ({"training": {"sequence_length_schedule": {5: 10**4}}}, "sequence_length_schedule"),
        ({"training": {"bucket_size_mb": 1e-9}}, "bucket_size_mb"),
        ({"hardware": {"cluster": "h100-sxm"}}, "gpu_model"),
        ({"hardware": {"mixed": [{"gpu_model": "V100", "num_nodes": 1, "num_gpus": 8}]}}, "num_gpus"),
        ({"hardware": {"mixed": [{"gpu_model": "V100", "num_nodes": 3}]}}, "mixed"),
        ({"hardware": {"mixed": [{"gpu_model": "V100", "num_gpus": 3}]}, "training": {"tp": 2}}, "mixed"),
        ({"hardware": {"slow_gpus": {16: 1.1}}}, "slow_gpus"),
        ({"hardware": {"gpu_model": "V100"}, "training": {"mixed_precision": "bf16"}}, "mixed_precision"),
        ({"hardware": {"gpu_model": None, "cluster": ONE_NODE}}, "network_bandwidth_gbps"),
        ({"hardware": {"num_gpus_per_node": 1024}, "training": {"num_nodes": 10**6}}, "num_nodes"),
        ({"model": {"preset": "gpt2-small"}}, "preset"),
        ({"model": {"layers": [LAYER]}}, "layers"),
        ({"model": {"model_type": "gpt2-small", "sequence_length": 2048}}, "sequence_length"),
        ({"model": {"max_position_embeddings": 16}}, "max_position_embeddings"),
        ({"model": {"hidden_size": 1000}}, "num_attention_heads"),
        ({"model": {"num_attention_heads": 7}}, "num_attention_heads"),
        ({"model": {"num_key_value_heads": 5}}, "num_key_value_heads"),
        ({"model": {"model_type": "transformer", "position": "learned"}}, "max_position_embeddings"),
        ({"model": {"model_type": "resnet50"}}, "sequence_length"),
        ({"model": {"model_type": "resnet50", "sequence_length": None, "num_layers": 3}}, "num_layers"),
        ({"model": {"sample": "image"}}, "sample"),
        ({"network": {"oversubscription": 2}}, "oversubscription"),
        ({"network": {"topology_type": "ring", "oversubscription": 2}}, "oversubscription"),
        ({"network": {"topology_type": "ring", "file": network}}, "topology_type"),
        ({"network": {"base_latency_us": 1, "file": network}}, "base_latency_us"),
        ({"network": {"file": {**network, "npus_count": 4}}}, "file"),
        ({"prices": {"dollars_per_gpu_hour": {"a100": 1, "a100-80gb": 2}}}, "dollars_per_gpu_hour"),
    ):
        yield Malformed(f"contradiction {sections}", _with(**sections), names)


def _unknown_names() -> Iterator[Malformed]:
    for section, key, value in (
        ("hardware", "gpu_model", "A101"),
        ("hardware", "gpu_model", "mine.yaml"),
        ("hardware", "preset", "huge"),
        ("hardware", "mixed", [{"gpu_model": "V101", "num_nodes": 1}]),
        ("model", "model_type", "gpt5"),
        ("model", "model_type", "resnet51"),
        ("model", "activation", "swish"),
        ("training", "communication_pattern", "ring_allredcue"),
        ("training", "communication_pattern", "nowhere.py:mine"),
        ("training", "mixed_precision", "bf17"),
        ("training", "stack", "tensorflow"),
        ("training", "optimizer", "lion"),
        ("training", "attention", "flash9"),
        ("training", "pp_schedule", "2F2B"),
        ("network", "topology_type", "hypercube"),
        ("prices", "dollars_per_gpu_hour", {"a101": 1}),
    ):
        yield Malformed(f"{section}.{key} {value}", _with(**{section: {key: value}}), key)
    for section, key in (("hardware", "cluster"), ("model", "config"), ("network", "file"), ("prices", "file")):
        sections = {section: {key: "nowhere/at_all.yaml"}}
        if section in ("hardware", "model"):
            sections[section][{"hardware": "gpu_model", "model": "model_type"}[section]] = None
        yield Malformed(f"{section}.{key} without a file", _with(**sections), key)
    yield Malformed("no such handler", _with(handlers=["nowhere.py:Mine"]), "handlers")


def _layers() -> Iterator[Malformed]:
    for change, names in (
        ({"layer_type": "conv3d"}, "layer_type"),
        ({"layer_typ": "linear"}, "layer_typ"),
        ({"layer_id": ""}, "layer_id"),
        ({"layer_id": 3.5}, "layer_id"),
        ({"input_shape": [0]}, "input_shape"),
        ({"input_shape": "16"}, "input_shape"),
        ({"input_shape": [16.5]}, "input_shape"),
        ({"output_shape": [-4]}, "output_shape"),
        ({"output_shape": [[4]]}, "output_shape"),
        ({"output_shape": []}, "output_shape"),
        ({"num_parameters": -1}, "num_parameters"),
        ({"forward_flops": "many"}, "forward_flops"),
        ({"backward_flops": -2}, "backward_flops"),
        ({"activation_memory_mb": "1 GB"}, "activation_memory_mb"),
        ({"reads": ["elsewhere"]}, "reads"),
        ({"layer_type": "conv2d"}, "input_shape"),
        ({"layer_type": "add"}, "reads"),
        ({"layer_type": "embedding"}, "num_parameters"),
    ):
        layers = [{**LAYER, **change}]
        model = {"model_type": None, "sequence_length": None, "layers": layers}
        yield Malformed(f"layer {change}", _with(model=model), names)
    for layers in ([], [3], [LAYER, LAYER], [LAYER, {**LAYER, "layer_id": "next"}], "layers.yaml", 7):
        model = {"model_type": None, "sequence_length": None, "layers": layers}
        yield Malformed(f"layers {str(layers)[:40]}", _with(model=model), "layers")


def _other_shapes() -> Iterator[Malformed]:
    for section in ("hardware", "model", "training", "network", "prices", "thresholds"):
        for value in ([], "all", 3, [{"gpu_model": "A100"}]):
            yield Malformed(f"{section} is {value}", _with(**{section: value}), section)
    yield Malformed("name with a slash", _with(name="a/b"), "name")
    yield Malformed("name of several lines", _with(name="a\nb"), "name")
    yield Malformed("long name", _with(name="a" * 101), "name")
    yield Malformed("text without end", _with(name="a" * 5000), "name")
    yield Malformed("a section that nobody knows", _with(hardwear={}), "hardwear")
    yield Malformed("deep", _with(thresholds={"memory": json.loads("[" * 30 + "]" * 30)}), "memory")


def _broken_texts() -> Iterator[Malformed]:
    right = _yaml(RIGHT)
    for what, text, names in (
        ("empty", "", "expected keys and values"),
        ("a comment", "# nothing\n", "expected keys and values"),
        ("a list at the top", "- hardware\n- model\n", "expected keys and values"),
        ("a number at the top", "42\n", "expected keys and values"),
        ("text at the top", "resnet50 on a100\n", "expected keys and values"),
        ("an open bracket", right + "network: {topology_type: ring\n", "line"),
        ("an open quote", right + 'name: "never closed\n', "line"),
        ("tabs", "hardware:\n\tgpu_model: A100\n", "line 2"),
        ("indents that don't fit", "hardware:\n    gpu_model: A100\n  preset: small\n", "line"),
        ("a section twice", right + right, "is given twice"),
        (
            "a key twice",
            right + "network: {base_latency_us: 1, base_latency_us: 2}\n",
            "'base_latency_us' is given twice",
        ),
        ("two documents", right + "---\n" + right, "line"),
        ("an unknown tag", right + "network: !!python/object:os.system {}\n", "not valid YAML"),
        ("an unknown anchor", right + "network: *nowhere\n", "nowhere"),
        ("an anchor in itself", right + "thresholds: &a {memory: *a}\n", "contains itself"),
        ("a key that is a list", right + "network: {[1]: 2}\n", "not valid YAML"),
        ("a date", right + "thresholds: {memory: 2026-01-01}\n", "memory"),
        ("a huge number", right + "thresholds: {memory: " + "9" * 5000 + "}\n", "not valid YAML"),
        ("a huge hexadecimal number", right + "thresholds: {memory: 0x" + "f" * 9000 + "}\n", "memory"),
        ("a null byte", right + "network: {topology_type: 'ring\0'}\n", "not valid YAML"),
    ):
        yield Malformed(what, text, names)
    for what, text, names in (
        ("empty JSON", "", "line 1"),
        ("JSON cut short", json.dumps(RIGHT)[:-5], "line 1"),
        ("JSON with a comment", "// mine\n" + json.dumps(RIGHT), "line 1"),
        ("JSON with a list at the top", "[1, 2]", "expected keys and values"),
        (
            "JSON with a key twice",
            '{"hardware": {"gpu_model": "A100", "gpu_model": "V100"}}',
            "'gpu_model' is given twice",
        ),
        ("JSON with NaN", json.dumps({**RIGHT, "thresholds": {"memory": float("nan")}}), "memory"),
        ("JSON nested without end", "[" * 100_000, "not JSON"),
    ):
        yield Malformed(what, text, names, ".json")
