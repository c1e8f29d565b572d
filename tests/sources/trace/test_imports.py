"""Modules are changed once a program imports them, and those that it imports are known."""

import importlib
import sys

import pytest

imports = pytest.importorskip("forerun.sources.trace.inside.imports")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages on the path; what is imported and found in a test is undone."""
    for name in ("first_of_zoo", "second_of_zoo"):
        (tmp_path / f"{name}.py").write_text("animals = 1", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in ("first_of_zoo", "second_of_zoo"):
        sys.modules.pop(name, None)


def more(module):
    module.animals += 1


def test_a_module_is_changed_when_it_is_imported_and_at_once_where_it_is(packages):
    first = importlib.import_module("first_of_zoo")
    imports.when_imported({"first_of_zoo": more, "second_of_zoo": more, "no_such_module_of_zoo": more})
    assert first.animals == 2
    assert "second_of_zoo" not in sys.modules
    assert importlib.import_module("second_of_zoo").animals == 2
    assert importlib.import_module("second_of_zoo").animals == 2, "only once"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_of_zoo")


def test_modules_that_come_later_are_listed_without_python_s_own(packages):
    importlib.import_module("first_of_zoo")
    imported = imports.Imported()
    assert imported.names() == []
    for name in ("second_of_zoo", "antigravity_of_zoo"):
        sys.modules[name] = sys.modules["first_of_zoo"]
    sys.modules["torch.of_zoo"] = sys.modules["json.of_zoo"] = sys.modules["forerun.of_zoo"] = sys.modules[
        "first_of_zoo"
    ]
    try:
        assert imported.names() == ["antigravity_of_zoo", "second_of_zoo"]
    finally:
        for name in [name for name in sys.modules if name.endswith("of_zoo") and name != "first_of_zoo"]:
            del sys.modules[name]
