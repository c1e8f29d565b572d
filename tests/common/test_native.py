"""Object code that is written once and called without numba gives what Python gives."""

import gc
import json
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import native_sample as sample
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.common.native import library as native
from forerun.common.native.build import build
from forerun.common.native.layout import layout_of
from forerun.common.native.signatures import signatures

ROOT = Path(__file__).parents[2]


def _pair(n: int = 3, width: int = 2, factor: int = 2) -> sample.Pair:
    return sample.Pair(np.arange(n), np.arange(n * width, dtype=np.float64).reshape(n, width), factor)


CALLS: dict[str, tuple[Any, ...]] = {
    "weigh": (_pair(), 0.5, True),
    "fill": (np.zeros(4, sample.RECORD), 7),
    "same": (np.arange(3),),
    "twice": (np.arange(3),),
    "divided": (7, 2),
}


def test_a_change_of_any_compiled_function_outdates_the_library() -> None:
    folders = {"/".join(name.split(":")[0].split(".")[1:-1]) for name, _ in signatures()}
    assert folders <= set(native.COMPILED_FOLDERS)


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., Any]]:
    """The functions of the sample, compiled into a folder and loaded from it."""
    folder = tmp_path_factory.mktemp("objects")
    called = []
    for name, arguments in CALLS.items():
        result = getattr(sample, name).py_func(*arguments)
        variant = {"arguments": [*map(layout_of, arguments)], "result": layout_of(result)}
        called.append((f"native_sample:{name}", json.loads(json.dumps(variant))))
    assert build(folder, called) == []
    library = native.Library(folder, json.loads((folder / "index.json").read_text()))
    return {name: next(library.variants(f"native_sample:{name}")) for name in CALLS}


Functions = dict[str, Callable[..., Any]]


@settings(max_examples=60)
@given(
    n=st.integers(0, 9),
    width=st.integers(1, 4),
    factor=st.integers(-(2**40), 2**40),
    scale=st.floats(-1e6, 1e6),
    above=st.booleans(),
)
def test_tuples_arrays_and_numbers_go_in_and_come_out(
    functions: Functions, n: int, width: int, factor: int, scale: float, above: bool
) -> None:
    pair = _pair(n, width, factor)
    found, expected = functions["weigh"](pair, scale, above), sample.weigh.py_func(pair, scale, above)
    assert type(found) is sample.Found
    assert np.array_equal(found.doubled, expected.doubled)
    assert found.doubled.shape == (n, width)
    assert found.total == pytest.approx(expected.total)
    assert (type(found.is_large), type(found.count)) == (bool, int)
    assert found.count == n


def test_records_are_written_in_place(functions: Functions) -> None:
    ours, expected = np.zeros(5, sample.RECORD), np.zeros(5, sample.RECORD)
    assert functions["fill"](ours, 3) is None
    sample.fill.py_func(expected, 3)
    assert np.array_equal(ours, expected)


def test_a_result_outlives_its_call_and_an_argument_comes_back_as_a_copy(functions: Functions) -> None:
    numbers = np.arange(100_000)
    results = [functions["same"](numbers) for _ in range(20)]
    gc.collect()
    scrap = [np.full(100_000, -1) for _ in range(20)]
    assert all(np.array_equal(fresh, numbers + 1) for _, fresh in results)
    assert all(not np.shares_memory(copy, numbers) and np.array_equal(copy, numbers) for copy, _ in results)
    del scrap


def test_memory_of_two_results_is_given_back_once(functions: Functions) -> None:
    first, second = functions["twice"](np.arange(1000))
    del first
    gc.collect()
    assert np.array_equal(second, np.arange(1, 1001))
    del second
    gc.collect()


def test_calls_leave_nothing_behind(functions: Functions) -> None:
    """Neither the memory of results nor references to dtypes, arguments and None stay after a call."""
    numbers = np.arange(1_000_000)
    functions["same"](numbers)
    before = (_resident_pages(), sys.getrefcount(numbers.dtype), sys.getrefcount(numbers))
    for _ in range(100):
        functions["same"](numbers)
        with pytest.raises(native.Mismatch):
            functions["same"](None)
    after = (_resident_pages(), sys.getrefcount(numbers.dtype), sys.getrefcount(numbers))
    assert after[0] - before[0] < 100 * numbers.nbytes / mmap.PAGESIZE / 4
    assert after[1] - before[1] < 50
    assert after[2] == before[2]


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((sample.Pair(np.arange(3, dtype=np.int32), np.ones((3, 2)), 1), 0.5, True), id="another dtype"),
        pytest.param((sample.Pair(np.arange(3), np.ones(3), 1), 0.5, True), id="fewer dimensions"),
        pytest.param((sample.Pair(np.arange(6)[::2], np.ones((3, 2)), 1), 0.5, True), id="not contiguous"),
        pytest.param((sample.Pair([1, 2, 3], np.ones((3, 2)), 1), 0.5, True), id="a list"),  # type: ignore[arg-type]
        pytest.param(((np.arange(3), np.ones((3, 2)), 1), 0.5, True), id="a plain tuple"),
        pytest.param((_pair(), 1, True), id="an int for a float"),
        pytest.param((_pair()._replace(factor=0.5), 0.5, True), id="a float for an int"),  # type: ignore[arg-type]
        pytest.param((_pair()._replace(factor=2**70), 0.5, True), id="an int of more than 64 bits"),
    ],
)
def test_other_arguments_are_refused_before_the_function_runs(functions: Functions, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((native.Mismatch, TypeError, OverflowError)):
        functions["weigh"](*arguments)


def test_an_exception_is_left_to_numba(functions: Functions) -> None:
    assert functions["divided"](-7, 2) == -4
    with pytest.raises(native.Mismatch):
        functions["divided"](1, 0)
    with pytest.raises(ZeroDivisionError):
        sample.divided(1, 0)


def test_a_library_of_other_sources_or_of_another_machine_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**changes: str) -> object:
        index = {"machine": native.machine(), "stamp": native.stamp(), "functions": {}} | changes
        (tmp_path / "index.json").write_text(json.dumps(index))
        native.library.cache_clear()
        return native.library()

    monkeypatch.setattr(native, "FOLDER", tmp_path)
    try:
        assert found() is not None
        assert found(stamp="other") is None
        assert found(machine="pdp-11") is None
        (tmp_path / "index.json").write_text("{")
        native.library.cache_clear()
        assert native.library() is None
    finally:
        native.library.cache_clear()


THREADS = """
import json, sys, threading
from forerun.common.native import library as native

sys.setswitchinterval(1e-6)
index = json.loads((native.FOLDER / "index.json").read_bytes())
variants = [variant for name in sorted(index["functions"])[:12] for variant in index["functions"][name]]
for _ in range(3):
    library, start, found = native.Library(native.FOLDER, index), threading.Barrier(8), []
    def load():
        start.wait()
        found.append(tuple(library.address(variant["object"], variant["symbol"]) for variant in variants))
    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and all(found[0]) and len(set(found[0])) == len(variants)
"""


@pytest.mark.skipif(native.library() is None, reason="the kernels are not compiled: make kernels compiles them")
def test_threads_that_load_the_same_functions_at_once_get_the_same_addresses() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


LLAMA = ["examples/llama-3.1-8b/config.json", "--cluster", "h100-sxm", "--gpus", "64"]
LLAMA += ["--seq-len", "8192", "--global-batch", "256"]


@pytest.mark.skipif(native.library() is None, reason="the kernels are not compiled: make kernels compiles them")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["predict", *LLAMA], id="predict"),
        pytest.param(["predict", *LLAMA, "--pp", "2"], id="pipeline"),
        pytest.param(["predict", *LLAMA, "--network", "switch:8@450/500ns,fat-tree:8@50/1000ns"], id="topology"),
        pytest.param(["plan", *LLAMA, "--top", "4"], id="plan"),
        pytest.param(["collective", "all_reduce", "--bytes", "64MiB", "--topology", "ring:8"], id="collective"),
        pytest.param(["experiment", "run", "resnet50-a100"], id="experiment"),
    ],
)
def test_a_first_command_needs_no_compiler(command: list[str], tmp_path: Path) -> None:
    script = (
        "import sys; from forerun.interfaces.cli.main import main\n"
        f"sys.argv = {['forerun', *command]}\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'numba' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
