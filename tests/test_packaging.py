"""The version stands in one place, and recipes say what pyproject.toml says."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jinja2
import pytest
import yaml

import forerun
from forerun.interfaces.cli.main import COMMANDS

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).parent.parent
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
pytestmark = pytest.mark.skipif(tomllib is None, reason="tomllib came with Python 3.11")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_that_of_pyproject(project):
    assert forerun.__version__ == project["project"]["version"] == metadata.version("forerun")
    written = re.escape(project["project"]["version"])
    places = [
        *(ROOT / "src").rglob("*.py"),
        ROOT / "setup.py",
        *(ROOT / "packaging").rglob("*.py"),
        *(ROOT / "packaging").rglob("*.yaml"),
    ]
    for path in places:
        text = path.read_text(encoding="utf-8")
        assert not re.search(rf"version[^\n]{{0,12}}[\"']{written}[\"']", text), path


def test_the_changelog_has_the_version(project):
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {project['project']['version']}\n" in text
    assert "\n## Unreleased\n" in text


def test_the_conda_recipe_takes_all_from_pyproject(project):
    text = (ROOT / "packaging" / "conda" / "meta.yaml").read_text(encoding="utf-8")
    rendered = jinja2.Template(text).render(load_file_data=lambda path, from_recipe_dir: project, PYTHON="python")
    recipe = yaml.safe_load(rendered)
    assert recipe["package"]["version"] == project["project"]["version"]
    assert recipe["requirements"]["run"][1:] == [each.lower() for each in project["project"]["dependencies"]]
    assert recipe["build"]["entry_points"] == [f"forerun = {project['project']['scripts']['forerun']}"]


def test_a_wheel_installs_the_man_pages_of_all_commands(tmp_path):
    command = [sys.executable, "setup.py", "-q", "install_data", "--install-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text() for path in (tmp_path / "share" / "man" / "man1").iterdir()}
    assert {"forerun.1", "forerun-plan.1", "forerun-profile-compare.1"} <= set(pages)
    assert {f"forerun-{name}.1" for name in COMMANDS} <= set(pages)
    assert f'"forerun {forerun.__version__}"' in pages["forerun.1"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_a_template_of_issues_has_what_its_form_needs(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    ids = [each["id"] for each in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(each["attributes"]["label"] for each in form["body"])


def _jobs(name):
    return yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_run_what_is_there(name):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for job in _jobs(name).values():
        assert ("uses" in job) != ("steps" in job)
        assert "uses" not in job or (ROOT / job["uses"]).is_file()
        for step in job.get("steps", ()):
            assert ("uses" in step) != ("run" in step)
            commands = step.get("run", "")
            assert set(re.findall(r"^make ([\w-]+)", commands, re.M)) <= targets
            assert all((ROOT / path).exists() for path in re.findall(r"^(\.ci/[\w-]+)", commands, re.M))


def test_wheels_of_linux_and_of_macos_are_built_and_installed_for_a_release():
    (wheel,) = (job for job in _jobs("wheels").values() if "strategy" in job)
    systems = wheel["strategy"]["matrix"]["system"]
    assert {system.partition("-")[0] for system in systems} == {"ubuntu", "macos"}
    assert ".ci/wheel" in [step.get("run") for step in wheel["steps"]]
    assert _jobs("release")["release"]["needs"] == "wheels"
    assert _jobs("release")["wheels"]["uses"] == _jobs("ci")["wheels"]["uses"]


@pytest.mark.parametrize(("tag", "is_right"), [(f"v{forerun.__version__}", True), ("v9.9.9", False)])
def test_a_release_has_the_tag_of_its_version(tag, is_right):
    (step,) = (each for each in _jobs("release")["release"]["steps"] if each.get("name") == "the tag is the version")
    environment = {**os.environ, "GITHUB_REF_NAME": tag}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=ROOT, env=environment)
    assert (done.returncode == 0) == is_right
