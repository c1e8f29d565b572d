"""What each key of a file may hold at least and at most, and what it is when nothing is said."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from forerun.answers.experiment.description import sections
from forerun.answers.experiment.description.text import read_mapping, refuse_unknown, refuse_wild
from forerun.common.errors import ForerunError


def accepts(kind, value):
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "least", "below", "most", "above"),
    [
        (sections.Rate, 1e-3, 0.99e-3, 1e9, 1.01e9),
        (sections.Bandwidth, 1e-3, 0.99e-3, 1e9, 1.01e9),
        (sections.Microseconds, 0, -1e-9, 1e6, 1.01e6),
        (sections.Count, 1, 0, 10**6, 10**6 + 1),
        (sections.Width, 1, 0, 10**7, 10**7 + 1),
        (sections.Layers, 1, 0, 10_000, 10_001),
        (sections.Tokens, 1, 0, 10**18, 10**18 + 1),
        (sections.Iterations, 1, 0, 10**9, 10**9 + 1),
        (sections.Start, 0, -1, 10**9, 10**9 + 1),
        (sections.Factor, 0.01, 0.0099, 1000, 1000.1),
        (sections.Slowdown, 1, 0.99, 1000, 1000.1),
        (sections.Share, 0, -0.01, 1, 1.01),
        (sections.Spread, 0, -0.01, 2, 2.01),
        (sections.Text, "a", "", "a" * 4096, "a" * 4097),
        (sections.Name, "a", "", "a" * 100, "a" * 101),
    ],
)
def test_a_value_has_bounds(kind, least, below, most, above):
    assert [accepts(kind, value) for value in (below, least, most, above)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("section", "key", "least", "below", "most", "above"),
    [
        ("HardwareSection", "memory_gb", 0.1, 0.09, 1e6, 1.01e6),
        ("HardwareSection", "num_gpus_per_node", 1, 0, 1024, 1025),
        ("TrainingSection", "gradient_accumulation_steps", 1, 0, 10_000, 10_001),
        ("TrainingSection", "warmup_iterations", 0, -1, 10**5, 10**5 + 1),
        ("TrainingSection", "seed", 0, -1, 2**63 - 1, 2**63),
    ],
)
def test_a_key_has_bounds_of_its_own(section, key, least, below, most, above):
    kind = getattr(sections, section)
    assert [accepts(kind, {key: value}) for value in (below, least, most, above)] == [False, True, True, False]


def test_what_a_file_leaves_out():
    hardware, training = sections.HardwareSection(), sections.TrainingSection()
    assert (hardware.slow_links, hardware.slow_gpus, hardware.mixed) == (1.0, {}, [])
    assert (training.mixed_precision, training.warmup_iterations, training.seed) == (True, 0, 0)
    assert (training.jitter.compute, training.jitter.network) == (0, 0)
    assert (training.batch_schedule, training.sequence_length_schedule, training.overlap) == ([], [], None)
    assert sections.MixedEntry(gpu_model="a", num_gpus=1).slowdown == 1.0


@pytest.mark.parametrize("name", ["run 1", "a+b.c_d-e", "9"])
def test_names_of_files_are_plain(name):
    assert accepts(sections.Name, name)
    assert not any(accepts(sections.Name, name + bad) for bad in ("/", "\n", ":", "é"))
    assert not accepts(sections.Name, "." + name)


def test_numbers_may_be_text_whole_or_with_an_exponent():
    adapter = TypeAdapter(sections.Count)
    assert [adapter.validate_python(value) for value in ("1e3", 5.0, 7)] == [1000, 5, 7]
    assert not any(accepts(sections.Count, value) for value in (5.5, "five"))
    rate = TypeAdapter(sections.Bandwidth)
    assert [rate.validate_python(value) for value in (25, "200 GB/s ", "1e2")] == [25.0, "200 GB/s", 100.0]
    assert not any(accepts(sections.Bandwidth, value) for value in ("fast", True, "2e9 Gbit/s", None))
    assert not any(accepts(sections.StatedBandwidth, value) for value in (25, "25"))
    assert accepts(sections.StatedBandwidth, "25 GB/s")


def test_schedules_are_pairs_or_a_mapping():
    adapter = TypeAdapter(sections.Schedule)
    assert adapter.validate_python({"0": 4, 10: 8}) == adapter.validate_python([[0, 4], [10, 8]]) == [[0, 4], [10, 8]]
    assert not any(accepts(sections.Schedule, [pair]) for pair in ([1], [1, 2, 3], [-1, 2]))
    assert accepts(sections.Schedule, [[1, 1]] * 1000)
    assert not accepts(sections.Schedule, [[1, 1]] * 1001)


@pytest.mark.parametrize(
    "value",
    [None, True, 10**18, -(10**18), 1e18, "a" * 4096, {"description": "two\nlines"}, [[[1]]], {"a": {"b": [None, ""]}}],
)
def test_what_a_key_can_have_is_let_through(value):
    assert refuse_wild(value, "file") is None


def nested(depth):
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "file: expected a number between -1e\\+18 and 1e\\+18, got nan"),
        (-float("inf"), "got -inf"),
        (10**18 + 1, "got one of 60 bits"),
        ("a" * 4097, "is text of 4,097 characters; at most 4,096"),
        ("two\nlines", "expected text in one line"),
        ({"model": {"description": "two\nlines"}}, "file: model.description: expected text in one line"),
        ({"description": ["two\nlines"]}, "file: description.0: expected text"),
        ({"a\nb": 1}, "file: a key of it: expected text"),
        ({"a": [1, float("inf")]}, "file: a.1: expected a number"),
        (nested(21), "is nested more than 20 deep"),
    ],
)
def test_what_no_key_can_have_is_refused(value, problem):
    with pytest.raises(ForerunError, match=problem):
        refuse_wild(value, "file")


def test_nesting_of_twenty_and_circles_are_read():
    assert refuse_wild(nested(20), "file") is None
    circle = {}
    circle["again"] = circle
    assert refuse_wild(circle, "file") is None


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("num_node", "did you mean num_nodes"),
        ("gpu_model", "it belongs in section hardware; docs/experiments.md explains the keys$"),
        ("name", "it belongs in section hardware or model"),
        ("gpu_modl", "did you mean hardware.gpu_model"),
        ("zzz", "known: num_nodes, seed; docs/experiments.md explains the keys$"),
    ],
)
def test_an_unknown_key_is_told_where_it_belongs_or_what_is_near(key, hint):
    with pytest.raises(ForerunError, match=f"file: unknown key '{key}'; {hint}"):
        refuse_unknown([key], ["num_nodes", "seed"], {"hardware": ["gpu_model", "name"], "model": ["name"]}, "file")
    refuse_unknown(["seed"], ["num_nodes", "seed"], {}, "file")


def test_of_many_known_keys_some_are_listed():
    with pytest.raises(ForerunError, match=r"known: k0, k1, .*, k24, \.\.\.; docs/"):
        refuse_unknown(["zzz"], [f"k{i}" for i in range(26)], {}, "file")
    with pytest.raises(ForerunError, match=r"k24; docs"):
        refuse_unknown(["zzz"], [f"k{i}" for i in range(25)], {}, "file")


def test_a_file_is_a_mapping_in_yaml_or_json(tmp_path):
    for name, text in (("a.yaml", "a: 1\n"), ("a.json", '{"a": 1}'), ("b.JSON", '{"a": 1}')):
        (tmp_path / name).write_text(text)
        assert read_mapping(tmp_path / name) == {"a": 1}
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ForerunError, match="expected keys and values, got list"):
        read_mapping(tmp_path / "list.json")
