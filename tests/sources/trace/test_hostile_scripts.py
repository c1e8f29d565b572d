"""Scripts that fail, hang, eat or break what is around them: each ends as one clear error."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from warm_process import warm

from forerun.common.errors import ForerunError
from forerun.common.units import GIB
from forerun.interfaces.cli.main import run
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script
from forerun.sources.trace.remains import last_words, place, resident_bytes

pytest.importorskip("torch")
pytestmark = pytest.mark.long
_LIMITS = Limits(time_s=90, memory_gib=8)
_SHORT = Limits(time_s=8, memory_gib=8)
_SMALL = Limits(time_s=90, memory_gib=0)
"""stands for half a GiB more than the tests' process holds, of which traced processes are forks (warm_process)"""
_OF_TRACE = "glob.glob(tempfile.gettempdir() + '/forerun-trace-*/rank0.job.json')"
_SCRIPTS: dict[str, tuple[str, Limits, tuple[str, ...]]] = {
    "raises": (
        """
        import torch
        def product(a):
            return a @ torch.ones(3, 3, device="cuda")
        product(torch.ones(4, 4, device="cuda"))
        """,
        _LIMITS,
        ("raises.py: RuntimeError: a and b must have same reduction dim", "(in aten.mm.default)", "at {path}:3"),
    ),
    "exits": ("import sys\nsys.exit(3)", _LIMITS, ("exited with 3 before its step was recorded", "{path}:2")),
    "vanishes": ("import os\nos._exit(0)", _LIMITS, ("ended with exit code 0 before its step was recorded",)),
    "aborts": ("import os\nprint('bye')\nos.abort()", _LIMITS, ("SIGABRT at {path}:3", "last line of its output: bye")),
    "crashes": ("import ctypes\nctypes.string_at(0)", _LIMITS, ("SIGSEGV at {path}:2",)),
    "hangs": (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    pass",
        _SHORT,
        ("the step was not recorded within 8 s; raise --time-limit", "(at {path}:"),
    ),
    "eats": (
        "held = []\nwhile True:\n    held.append(bytearray(b'x' * 20_000_000))",
        _SMALL,
        ("GiB of host memory; the limit is", "GiB (--host-memory-limit) (at {path}:3)"),
    ),
    "misspelt": ("x = 1\ndef f(:", _LIMITS, ("SyntaxError: invalid syntax", "at {path}:2")),
    "incomplete": ("import no_such_module", _LIMITS, ("No module named 'no_such_module' at {path}:1",)),
    "never_steps": (
        """
        import torch
        layer = torch.nn.Linear(4, 4).cuda()
        for _ in range(3):
            layer(torch.ones(4, 4, device="cuda")).sum().backward()
        """,
        _LIMITS,
        ("ended after 0 optimizer steps; step 2 was to be recorded (--steps)", "mark_step()"),
    ),
    "leaves_children": (
        """
        import os, subprocess, time
        if os.fork() == 0:
            time.sleep(3600)
        subprocess.Popen(["sleep", "{marker}"], start_new_session=True)
        raise RuntimeError("with children")
        """,
        _LIMITS,
        ("RuntimeError: with children at {path}:5",),
    ),
    "talks": (
        "for _ in range(50_000):\n    print('x' * 100)\nraise ValueError('after much talk')",
        _LIMITS,
        ("ValueError: after much talk at {path}:3",),
    ),
    "forges": (
        f"""
        import glob, os, sys, tempfile
        for job in {_OF_TRACE}:
            if "{{path}}" in open(job).read():
                open(job.replace("job.json", "npz"), "wb").write(b"no recording")
        """,
        _LIMITS,
        ("forges.py: the traced process left a damaged recording",),
    ),
    "many_lines": ("raise ValueError('one\\ntwo\\nthree')", _LIMITS, ("ValueError: one two three at {path}:1",)),
}
_MARKER = 86_453
"""seconds that the forgotten child would sleep: how it is told from others"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """What each script ended as, two at a time."""
    warm()
    folder = tmp_path_factory.mktemp("hostile")

    def end(name):
        text, limits, _ = _SCRIPTS[name]
        path = folder / f"{name}.py"
        path.write_text(textwrap.dedent(text).strip().replace("{path}", str(path)).replace("{marker}", str(_MARKER)))
        if limits is _SMALL:
            limits = replace(_SMALL, memory_gib=resident_bytes(os.getpid()) / GIB + 0.5)
        try:
            record_script(Job("", str(path)), limits)
        except ForerunError as error:
            return path, str(error)
        return path, "no error"

    with ThreadPoolExecutor(2) as pool:
        tasks: dict[str, Future] = {name: pool.submit(end, name) for name in _SCRIPTS}
        return {name: task.result() for name, task in tasks.items()}


@pytest.mark.parametrize("name", list(_SCRIPTS))
def test_ends_as_one_line_that_names_the_place(errors, name):
    path, message = errors[name]
    assert "\n" not in message
    assert message.startswith(str(path))
    for part in _SCRIPTS[name][2]:
        assert part.replace("{path}", str(path)) in message


def test_what_a_script_started_ends_with_it(errors):
    assert errors["leaves_children"]
    time.sleep(0.2)
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not [c for c in commands if c == b"sleep\0%d\0" % _MARKER]


def test_the_command_exits_with_2_and_writes_nothing(tmp_path, capsys):
    script = tmp_path / "fails.py"
    script.write_text("import torch\nprint('noise')\nraise KeyError('loss')")
    code = run(["trace", "-o", str(tmp_path / "step.program"), str(script)])
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err == f"error: {script}: KeyError: 'loss' at {script}:3\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fails.py"]


def test_a_script_that_is_not_there():
    with pytest.raises(ForerunError, match=r"^nowhere/train\.py: no such script; give its path"):
        record_script(Job("", "nowhere/train.py"), _LIMITS)


def test_the_place_is_the_users_innermost_frame(tmp_path):
    fault = tmp_path / "fault.txt"
    library = sys.modules["json"].__file__
    fault.write_text(f'Fatal error\n  File "{library}", line 5 in load\n  File "/home/me/train.py", line 7 in step\n')
    assert place(fault) == "/home/me/train.py:7"
    assert place(tmp_path / "none.txt") == ""
    fault.write_bytes(b"first\n" * 5000 + b"last one\n\n")
    assert last_words(fault) == "last one"
