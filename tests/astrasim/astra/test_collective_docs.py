"""What docs/collectives.md shows works."""

import json
import re
from pathlib import Path

from forerun.astrasim.astra.collective_cases import case_results
from forerun.interfaces.cli.main import run

TEXT = (Path(__file__).parents[3] / "docs" / "collectives.md").read_text()


def test_its_cases_run():
    lines = re.search(r"```json\n(.*?)```", TEXT, re.S)[1].splitlines()
    assert [record["time_ns_max"] for record in case_results(lines)] == [64440, 2595]


def test_its_algorithm_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pipeline.py").write_text(re.search(r"```python\n(.*?)```", TEXT, re.S)[1])
    command = re.search(r"`forerun (collective broadcast [^`]*pipeline.py:Pipeline)`", TEXT)[1].split()
    assert run([*command, "--json", "--splits", "1", "--latency", "0"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["time_ns"] == 8 * 10 + 7 * int((1 << 20) / 50)


def test_its_commands_run(capsys):
    commands = [line.split()[1:] for line in re.search(r"```bash\n(.*?)```", TEXT, re.S)[1].splitlines()]
    for command in commands:
        if not {"network.yml", "cases.jsonl"} & set(command):
            assert run(command) == 0
            assert "busbw" in capsys.readouterr().out
