"""`forerun predict --chakra`: a step as Chakra traces."""

import json

QUESTION = ("qwen3-0.6b", "--cluster", "h100-sxm", "--gpus", 4, "--seq-len", 512, "--global-batch", 4)


def test_predict_writes_traces_of_every_rank_that_are_valid(forerun, tmp_path):
    done = forerun("predict", *QUESTION, "--pp", 2, "--chakra", "run", "--json")
    assert done.returncode == 0, done.stderr
    step_us = json.loads(done.stdout)["step_time_s"] * 1e6
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert written == {"comm_group.json", *(f"trace.{rank}.et" for rank in range(4))}
    checked = forerun("chakra", "validate", "run", "--comm-groups", "run/comm_group.json")
    assert checked.returncode == 0, checked.stdout
    info = forerun("chakra", "info", "run", "--json")
    assert info.returncode == 0, info.stderr
    assert step_us > 0
    assert json.loads(info.stdout)


def test_a_folder_that_can_not_be_made_is_an_error(forerun, tmp_path):
    (tmp_path / "run").write_text("")
    done = forerun("predict", *QUESTION, "--chakra", "run/traces")
    assert done.returncode == 2
    assert "run/traces" in done.stderr
