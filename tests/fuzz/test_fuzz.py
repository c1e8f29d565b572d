"""Mutated inputs end in an answer or in one line; so do those that once broke something."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the fuzzer is a program, whose modules lie beside it

from run import Fuzzer, TooSlow, watched
from seeds import COMMANDS, FORMATS

CORPUS = sorted(Path(__file__).with_name("corpus").glob("*.command"))


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return Fuzzer(tmp_path_factory.mktemp("fuzz"), seed=1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_seed_is_a_sound_input(fuzzer, name):
    """Else a mutation would test nothing but the first check."""
    form = FORMATS[name]
    for command in form.commands:
        before = fuzzer.outcomes["exit 0"]
        assert fuzzer.tried(command, form.name, (fuzzer.folder / form.name).read_bytes()) is None
        assert fuzzer.outcomes["exit 0"] == before + 1, command


@pytest.mark.parametrize("name", COMMANDS)
def test_what_forerun_writes_is_a_sound_input(fuzzer, name):
    file, sound, mutate = fuzzer.files[name]
    for command in COMMANDS[name]:
        before = fuzzer.outcomes["exit 0"]
        assert fuzzer.tried(command, f"sound-{file}", sound) is None
        assert fuzzer.outcomes["exit 0"] == before + 1
    assert any(mutate(sound, fuzzer.random) != sound for _ in range(5))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_once_broke_something_does_so_no_more(fuzzer, path):
    found = fuzzer.tried(path.read_text().strip(), path.stem, path.with_suffix("").read_bytes())
    assert found is None, found.what


def test_mutated_inputs_end_in_an_answer_or_in_one_line(fuzzer):
    broken = [found for found in (fuzzer.one() for _ in range(150)) if found is not None]
    assert [(found.command, found.what) for found in broken] == []


def test_the_watchdog_and_the_checks_would_notice(fuzzer, monkeypatch):
    def never():
        with watched(0.05):
            while True:
                pass

    with pytest.raises(TooSlow):
        never()
    ends = {
        "raised": lambda words: 1 / 0,
        "code": lambda words: 70,
        "nonsense": lambda words: print('{"a": "nan", "b": NaN}') or 0,
        "message": lambda words: 2,
    }
    for kind, end in ends.items():
        monkeypatch.setattr("run.run", end)
        found = fuzzer.tried("plan", "a.yaml", b"")
        assert found is not None
        assert found.kind.startswith(kind)
