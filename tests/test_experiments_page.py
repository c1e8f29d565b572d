"""What docs/experiments.md tells people to type works."""

import re
from pathlib import Path

import pytest

from forerun.answers.experiment.description.key_table import key_table
from forerun.answers.experiment.description.read import read_experiment
from forerun.common.yaml_files import parse_yaml

PAGE = (Path(__file__).parent.parent / "docs" / "experiments.md").read_text(encoding="utf-8")
KEYS = {f"{row.section}.{row.key}" for row in key_table()}


def test_the_python_of_the_page_runs(capsys):
    pytest.importorskip("pandas")
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/experiments.md", "exec"), names)
    told = capsys.readouterr().out
    assert "efficiency" in told
    assert "communication_start" in told


def test_the_files_of_the_page_are_experiments():
    whole, layers = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    sections = parse_yaml(whole, "page")
    assert read_experiment(sections).setup.n_gpus == 32
    by_hand = read_experiment({**sections, **parse_yaml(layers, "page")})
    assert [layer.layer_id for layer in by_hand.setup.model.layers] == ["conv1", "pool", "fc"]


def test_keys_that_are_set_exist():
    for key in re.findall(r"(?:--set|training\.compile=true|\{\")\s*`?((?:training|hardware|model)\.\w+)", PAGE):
        assert key in KEYS


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert link.startswith("https://") or (Path(__file__).parent.parent / "docs" / link).exists(), link
