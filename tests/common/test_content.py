"""Digests of objects: what they depend on, and what not."""

import inspect
from dataclasses import dataclass
from enum import Enum
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from forerun.common import content as module
from forerun.common.admission import read_text
from forerun.common.content import content, digest_of, forerun_digest


class Color(Enum):
    RED = 1


@dataclass
class Pair:
    left: object
    right: object


class Plain:
    def __init__(self, value):
        self.value = value

    def method(self):
        return self.value


class Unpicklable(Plain):
    def __reduce_ex__(self, protocol):
        raise TypeError


def test_plain_values_are_themselves():
    assert [content(value) for value in (None, "a", True, 3)] == [None, "a", True, 3]
    assert content(0.1) == (0.1).hex()
    assert content((1, [2])) == [1, [2]]
    assert content(Color.RED) == ["Color", "RED"]


def test_order_counts_in_lists_and_not_in_mappings_and_sets():
    assert content({"b": 1, "a": 2}) == content({"a": 2, "b": 1}) == ["mapping", [["a", 2], ["b", 1]]]
    assert content({3, 1}) == ["set", [1, 3]]
    assert content([3, 1]) != content([1, 3])


def test_an_array_is_its_type_shape_and_bytes():
    kind, shape, digest = content(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert (kind, shape, len(digest)) == ("int32", [2, 3], 64)
    assert content(np.arange(6).reshape(2, 3).T) != content(np.arange(6).reshape(3, 2))


def test_what_holds_itself_ends():
    loop = [1]
    loop.append(loop)
    assert content(loop) == [1, "what holds this"]
    shared = [1]
    assert content([shared, shared]) == [[1], [1]]
    inner = {"up": None}
    outer = [[inner]]
    inner["up"] = outer
    assert content(outer) == [[["mapping", [["up", "what holds this"]]]]]


def test_objects_are_their_class_and_state():
    assert content(Plain(1))[:2] == [__name__, "Plain"]
    assert content(Plain(1)) == content(Plain(1)) != content(Plain(2))
    assert content(Pair(1, 2)) == content(Pair(1, 2)) != content(Pair(2, 1))
    assert content(Unpicklable(1)) == content(Unpicklable(1)) != content(Unpicklable(2))


class Reduced:
    """An object of which pickle keeps arguments, a state, and two iterators."""

    def __init__(self, value):
        self.value = value

    def __reduce_ex__(self, protocol):
        return (Reduced, (protocol,), self.value, iter([1]), iter([(1, 2)]))


def test_the_state_is_what_pickle_keeps_without_the_class_and_iterators():
    *_, state = content(Reduced(7))
    assert state == [[2], 7]


def test_functions_are_their_name_defaults_and_what_they_close_over():
    def made(kept):
        def function(x=1):
            return x + kept

        return function

    assert content(made(1)) == content(made(1)) != content(made(2))
    *_, own, defaults, closure = content(made(5))
    assert (own, defaults, closure) == (None, [1], [5])
    assert content(Plain(1).method) == content(Plain(1).method) != content(Plain(2).method)
    assert content(len) == ["builtins", "len", None, None, []]


def test_the_file_of_a_user_counts_and_that_of_the_standard_library_does_not(tmp_path):
    def loaded(text):
        path = tmp_path / f"users_{len(text)}.py"
        path.write_text(text)
        spec = spec_from_file_location("users", path)
        users = module_from_spec(spec)
        spec.loader.exec_module(users)
        return users.f

    one, other = (content(loaded(text))[:3] for text in ("def f(): return 1\n", "def f(): return 1  # more\n"))
    assert one[:2] == other[:2] == ["users", "f"]
    assert one[2] != other[2]
    assert len(one[2]) == 64
    assert content(inspect.getsource)[:3] == ["inspect", "getsource", None]
    assert content(read_text)[:3] == ["forerun.common.admission", "read_text", None]
    assert content(Path) == ["pathlib", "Path"]


def test_a_class_without_a_file_has_no_digest():
    made = type("Made", (), {"__module__": "nowhere"})
    assert content(made) == ["nowhere", "Made", ""]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A Forerun of a few files, of which `forerun_digest` speaks."""
    (tmp_path / "common/__pycache__").mkdir(parents=True)
    (tmp_path / "common/content.py").write_text("")
    (tmp_path / "constants.yaml").write_text("a: 1")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "common/content.py"))
    forerun_digest.cache_clear()
    yield tmp_path
    forerun_digest.cache_clear()


def digest():
    forerun_digest.cache_clear()
    return forerun_digest()


def test_the_digest_of_forerun_changes_with_any_file_and_name_but_not_with_bytecode(package):
    first = digest()
    (package / "common/__pycache__/content.pyc").write_bytes(b"bytecode")
    assert digest() == first
    (package / "constants.yaml").write_text("a: 2")
    second = digest()
    (package / "constants.yaml").rename(package / "other.yaml")
    assert len({first, second, digest()}) == 3


def test_a_digest_is_64_hexadecimal_digits_of_the_parts(package):
    assert len(digest_of(1, "a")) == 64
    assert digest_of(1, "a") == digest_of(1, "a")
    assert len({digest_of(1), digest_of(2), digest_of(1, 2), digest_of((1, 2))}) == 4
    assert int(digest_of(1), 16) > 0
