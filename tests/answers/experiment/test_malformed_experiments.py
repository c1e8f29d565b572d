"""Whatever is wrong with an experiment file becomes one line that names the file and the key."""

import random

import pytest
import yaml
from malformed_experiments import RIGHT, Malformed, malformed

from forerun.answers.experiment.description.key_table import key_table
from forerun.answers.experiment.description.read import read_experiment
from forerun.common.errors import ForerunError

CASES = malformed()


def test_there_are_at_least_two_hundred_of_all_kinds():
    assert len(CASES) >= 200
    assert len({case.text for case in CASES}) >= 200


def test_the_file_that_they_are_made_from_is_right(tmp_path):
    (tmp_path / "right.yaml").write_text(yaml.safe_dump(RIGHT))
    assert read_experiment(tmp_path / "right.yaml").setup.n_gpus == 16


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what.replace("\n", " ")[:60])
def test_the_message_is_one_line_that_names_file_and_key(case: Malformed, tmp_path):
    path = tmp_path / f"wrong{case.suffix}"
    path.write_text(case.text, encoding="utf-8")
    with pytest.raises(ForerunError) as error:
        read_experiment(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert case.names in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 1500


def test_files_that_are_no_text(tmp_path):
    for name, content in (
        ("latin.yaml", b"name: caf\xe9"),
        ("binary.yaml", bytes(range(256))),
        ("utf.json", b"\xff\xfe{}"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ForerunError, match=name):
            read_experiment(path)
    with pytest.raises(ForerunError, match="can't be read"):
        read_experiment(tmp_path)


ODD = (
    *(None, True, False, 0, 1, 2, 3, 7, 64, 10**5, 10**8, 10**18, -1, 0.5, 1.5, -0.5, 1e-30, 1e300, 2**70),
    *("", " ", "x", "1e9", "bf16", "ring", "a100", "/", "x.py:y", "a: b"),
    *([], [1], [[0, 1], [5, 2]], [None], {}, {"a": 1}, {0: 1.5}, {0: 0}, {"name": "x"}, [{}], {"device": "a100"}),
)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_a_key_says_a_file_is_read_or_refused_in_one_line(seed):
    draw = random.Random(seed)
    rows = [row for row in key_table() if "." not in row.key]
    for _ in range(60):
        data = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in RIGHT.items()}
        for row in draw.sample(rows, draw.randint(1, 3)):
            value = draw.choice(ODD)
            if row.section:
                data.setdefault(row.section, {})[row.key] = value
            else:
                data[row.key] = value
        try:
            request = read_experiment(data)
        except ForerunError as error:
            assert "\n" not in str(error)  # noqa: PT017 - either way is right
        else:
            assert read_experiment(request.config) == request
