"""What the build of the package parses ahead is what the files say."""

import json
from datetime import date
from pathlib import Path

import pytest

from forerun.common import parsed_yaml
from forerun.common.build_ahead import parsed_files
from forerun.common.native.library import ROOT
from forerun.common.yaml_files import parse_any_yaml


def test_a_text_of_the_package_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: {b: [1, 2.5, x]}\n"
    monkeypatch.setattr(parsed_yaml, "FILE", tmp_path / "yaml.json")
    (tmp_path / "yaml.json").write_text(json.dumps({parsed_yaml.digest(text): json.dumps({"a": "parsed ahead"})}))
    parsed_yaml._known.cache_clear()
    try:
        first = parse_any_yaml(text, "here")
        assert first == {"a": "parsed ahead"}
        first["a"] = "changed by its reader"
        assert parse_any_yaml(text, "here") == {"a": "parsed ahead"}
        assert parse_any_yaml(text + "c: 1\n", "here") == {"a": {"b": [1, 2.5, "x"]}, "c": 1}
        (tmp_path / "yaml.json").write_text("{")
        parsed_yaml._known.cache_clear()
        assert parse_any_yaml(text, "here") == {"a": {"b": [1, 2.5, "x"]}}
    finally:
        parsed_yaml._known.cache_clear()


def test_only_what_json_holds_exactly_is_kept(tmp_path: Path) -> None:
    texts = {"plain": "a: [1, 2.5, true, null]\n", "numbers": "1: one\n", "dates": "day: 2026-01-02\n", "empty": ""}
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    assert parse_any_yaml(texts["dates"], "here") == {"day": date(2026, 1, 2)}
    assert parsed_files(tmp_path) == {parsed_yaml.digest(texts["plain"]): '{"a": [1, 2.5, true, null]}'}


def test_nearly_all_files_of_the_package_are_parsed_ahead() -> None:
    assert len(parsed_files(ROOT)) > 0.9 * len(list(ROOT.rglob("*.yaml")))
