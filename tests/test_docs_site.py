"""The documentation: links and anchors exist, every page is in the site, the commands of the first pages run."""

import html
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from command_here import run_here

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
RUN = [*sorted((DOCS / "start").glob("*.md")), DOCS / "index.md", DOCS / "notebooks.md", DOCS / "integrations.md"]
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.S | re.M)


def name_of(page):
    return str(page.relative_to(ROOT))


def text_of(page):
    """The page without its blocks of code."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """The anchors of a page's headings, as sites of Markdown make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text_of(page), re.M):
        plain = html.unescape(re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading))
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_anchors_exist(page):
    for link in LINK.findall(text_of(page)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name_of(page)}: {link}"


def test_a_link_that_leads_nowhere_would_be_noticed(tmp_path):
    (tmp_path / "a.md").write_text("# One `thing`, and more\n[x](#one-thing-and-more)\n", encoding="utf-8")
    assert anchors(tmp_path / "a.md") == {"one-thing-and-more"}
    assert LINK.findall("see [a](b.md#c) and [d](e.md)") == ["b.md#c", "e.md"]


def test_every_page_is_in_the_site():
    def paths(part):
        if isinstance(part, str):
            return [part]
        return [path for each in (part.values() if isinstance(part, dict) else part) for path in paths(each)]

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(paths(site["nav"])) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def ended(command, folder):
    """How a command of a page ends in `folder`. The command `forerun` runs in this process, all else in a shell."""
    if command.startswith("forerun ") and not set(command) & set("|&;<>$`\"'\\"):
        return run_here(folder, *command.split()[1:])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(["bash", "-c", command], check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_commands_of_a_page_run(page, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    ran = 0
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if named := re.fullmatch(r'yaml title="([\w.]+)"', kind):
            (tmp_path / named[1]).write_text(text, encoding="utf-8")
        commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, re.M) if kind == "console" else []
        commands += [f'"{sys.executable}" - <<"END"\n{text}\nEND'] if kind == "python" else []
        for command in commands:
            done = ended(command, tmp_path)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            ran += 1
    assert ran


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="pip install 'forerun[docs]' brings mkdocs")
def test_the_site_is_built_without_a_warning_and_asks_no_other_machine(tmp_path):
    options = ["build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    home = {**os.environ, "HOME": str(tmp_path), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *options], cwd=ROOT, env=home, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"(https?:[^\"]+)\"", text)
        loaded += re.findall(r"<link[^>]*rel=\"(?:stylesheet|preconnect|preload)\"[^>]*href=\"(https?:[^\"]+)\"", text)
        assert not loaded, page
    assert "Prediction" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
