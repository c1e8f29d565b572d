"""The page that lists what the five works do says what its own tables hold."""

import re
import shlex
from collections import Counter
from pathlib import Path

from forerun.interfaces.cli.main import COMMANDS

PAGE = (Path(__file__).parents[2] / "docs" / "origins.md").read_text(encoding="utf-8")
LISTS = PAGE.partition("## All 120")[2].split("\n### ")[1:]


def verdicts(section):
    """The last cell of each row below the table's head."""
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [row.rstrip("| ").rpartition(" | ")[2] for row in rows]


def test_every_list_is_as_long_as_its_title_says():
    sizes = [int(re.search(r"\((\d+)\)", section.splitlines()[0])[1]) for section in LISTS]
    assert [len(verdicts(section)) for section in LISTS] == sizes
    assert sum(sizes) == 120


def test_the_counts_of_the_first_paragraph_are_those_of_the_lists():
    found = Counter(verdict.partition(":")[0] for section in LISTS for verdict in verdicts(section))
    said = re.search(r"(\d+) work, (\d+) are weaker, (\d+) are missing", " ".join(PAGE.split()))
    assert found == {"works": int(said[1]), "weaker": int(said[2]), "missing": int(said[3])}


def test_what_does_not_work_says_why():
    others = [verdict for section in LISTS for verdict in verdicts(section) if verdict != "works"]
    assert all(verdict.partition(": ")[2] for verdict in others)


def test_the_commands_exist():
    for command in re.findall(r"`forerun ([a-z][^`]*)`", PAGE):
        assert shlex.split(command)[0] in COMMANDS, command
