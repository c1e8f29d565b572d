"""A missing package is named as itself."""

from __future__ import annotations

import pytest

from forerun.sources.trace.inside.missing import absent, reason


def raised(broken):
    """The error of a program that imports a package and hides why that fails, as libraries do."""
    try:
        try:
            __import__(broken)
        except ImportError as error:
            raise RuntimeError("Could not import module 'PreTrainedModel'") from error
    except RuntimeError as error:
        return error


def test_the_package_behind_an_error_is_named():
    said = reason(raised("no_such_package.part"))
    assert said.startswith("the package no_such_package is not installed, which led to RuntimeError: Could not import")


def test_a_package_that_the_error_names_is_named_once():
    with pytest.raises(ModuleNotFoundError) as failed:
        __import__("no_such_package")
    assert reason(failed.value) == "ModuleNotFoundError: No module named 'no_such_package'"


def test_other_errors_stay_as_they_are():
    assert reason(ValueError("other")) == "ValueError: other"


def test_the_error_behind_an_error_is_named_unless_its_text_is_there():
    said = reason(raised("json.no_such_part"))
    assert said == (
        "RuntimeError: Could not import module 'PreTrainedModel', after ModuleNotFoundError: No module named"
        " 'json.no_such_part'"
    )
    outer = RuntimeError("data: a folder is missing")
    outer.__cause__ = OSError("a folder is missing")
    assert reason(outer) == "RuntimeError: data: a folder is missing"


def test_a_package_that_a_hidden_import_lacks_is_found(tmp_path, monkeypatch):
    for name, text in {"__init__": "", "whole": "", "broken": "import no_such_package_at_all"}.items():
        (tmp_path / "zoo").mkdir(exist_ok=True)
        (tmp_path / "zoo" / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert absent(["zoo.none", "zoo.broken"], "zoo").name == "no_such_package_at_all"
    assert absent(["zoo.none", "zoo.whole"], "zoo") is None


def test_an_error_without_a_message_shows_its_line():
    versions = iter(())
    with pytest.raises(StopIteration) as failed:
        next(versions)
    assert reason(failed.value) == "StopIteration: next(versions)"


def test_the_error_that_another_one_hides_is_named():
    class Trainer:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            raise TypeError("finish() got an unexpected keyword argument 'quiet'")

    with pytest.raises(TypeError) as failed, Trainer():
        raise FileNotFoundError("step0/model.pt not found\nand much more")
    said = reason(failed.value)
    assert said.startswith("TypeError: finish() got an unexpected keyword argument 'quiet', after FileNotFoundError: ")
    assert said.endswith("step0/model.pt not found")


def test_an_error_that_says_what_came_before_says_it_once():
    def wrapped(text):
        try:
            try:
                raise OSError("no route to host")
            except OSError as first:
                raise ConnectionError(text.format(first=first))  # noqa: B904
        except ConnectionError as error:
            return reason(error)

    assert wrapped("download failed: {first}") == "ConnectionError: download failed: no route to host"
    assert wrapped("download failed") == "ConnectionError: download failed, after OSError: no route to host"
