"""`forerun measure` on a machine that can't be measured."""

from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_without_a_gpu_it_is_one_line(forerun, tmp_path):
    done = forerun("measure", "--out", "mine", env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no GPU: torch.cuda.is_available() is false here")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "mine").exists()


def test_without_torch_it_is_one_line(forerun, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = forerun("measure", "--out", "mine", env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 2
    assert done.stderr == "error: measuring needs PyTorch: pip install torch\n"


def test_without_a_folder_it_says_what_to_give(forerun):
    done = forerun("measure")
    assert done.returncode == 2
    assert done.stderr == (
        "error: measure: give the folder for the files with --out, or a script: forerun measure step SCRIPT\n"
    )


def test_a_script_that_is_missing_is_named(forerun):
    done = forerun("measure", "step", "absent.py", "--cluster", "h100-sxm")
    assert done.returncode == 2
    assert done.stderr == "error: absent.py: no such script; give its path\n"
