"""What each of the five users does in the browser, from the question to what they take with them.

make pictures writes the pictures of the documentation. The walks that take long are long tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_browser import NEEDS_BROWSER, downloaded, find, find_all, look, opened, picture, plain, text_of, until

pytestmark = NEEDS_BROWSER
ROOT = Path(__file__).parents[3]
PICTURES = os.environ.get("FORERUN_WALK_PICTURES", "")
LLAMA = "model=llama-3.1-8b&cluster=h100-sxm&seq_len=8192&f.stack=torchtitan"
ENTER = "\ue007"
SHOWN = "document.querySelectorAll('#shown-file details').length > 0"


@pytest.fixture
def window(browser: Any, address: str) -> Iterator[Any]:
    """A browser with a window of the width that the documentation shows."""
    look(browser, 1440, height=1000)
    yield browser
    plain(browser)


def shot(browser: Any, name: str, top: str = "body", height: int = 1000) -> None:
    """Writes a picture of the window with `top` at its upper edge, where pictures are asked for."""
    if not PICTURES:
        return
    look(browser, 1440, height=height)
    browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", find(browser, top))
    time.sleep(0.4)
    picture(browser, Path(PICTURES) / f"{name}.png")
    look(browser, 1440, height=1000)


def command(*words: str, cwd: Path) -> None:
    """Runs a command of Forerun as its users do."""
    forerun = str(Path(sys.executable).with_name("forerun"))
    done = subprocess.run([forerun, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def dropped(browser: Any, address: str, *paths: Path) -> str:
    """Drops files on the page, and returns the headings of what it shows of them."""
    if not browser.current_url.startswith(address.partition("#")[0]):
        browser.get(f"{address}")
    until(browser, "document.querySelector('#view-files') && document.querySelector('#files-input')")
    find(browser, "#view-files").click()
    browser.execute_script("document.querySelector('#shown-file').replaceChildren()")
    find(browser, "#files-input").send_keys("\n".join(map(str, paths)))
    until(browser, f"{SHOWN} || !document.querySelector('#error').hidden")
    assert not text_of(browser, "#error")
    return " ".join(each.text for each in find_all(browser, "#shown-file summary"))


@pytest.mark.long
def test_a_planner_finds_the_fastest_plan_and_asks_why_another_is_not(window: Any, address: str) -> None:
    opened(window, address, f"{LLAMA}&gpus=16&global_batch=64&f.tp=1,2")
    assert "places proved" in text_of(window, "#status")
    shot(window, "planner")
    find(window, "#pin").click()
    find(window, "#wanted").send_keys("tp=2,activation_checkpointing=full", ENTER)
    until(window, "document.querySelector('#table caption').textContent.includes('match')")
    find(window, "#table tbody button").click()
    until(window, "document.querySelector('#plan').textContent.includes('Beside the pinned plan')")
    until(window, "document.querySelectorAll('#plan .plot').length >= 2")
    assert "tp=2" in text_of(window, "#plan strong")
    step = next(
        each for each in find_all(window, "[aria-label='pinned and chosen plan'] tr") if "step time" in each.text
    )
    assert "+" in step.text, "the best plan is faster"
    shot(window, "planner-why", "#chosen")
    find(window, ".choices button").click()
    until(window, "/f.compile=/.test(location.hash)")
    find(window, "#stop").click()
    assert "Stopped" in text_of(window, "#status")


@pytest.mark.long
def test_an_engineer_looks_into_a_recorded_step(window: Any, address: str, folder: Path) -> None:
    pytest.importorskip("torch", reason="no torch: pip install 'forerun[trace]'")
    script = str(ROOT / "examples" / "simple_fsdp" / "train.py")
    own = ("--", "--mode", "fully_shard", "--device", "cuda")
    command("trace", script, "--world-size", "8", "-o", "step.program", *own, cwd=folder)
    headings = dropped(window, address, folder / "step.program")
    assert "Timeline of a step" in headings
    assert "Memory" in headings
    h100 = text_of(window, "#shown-file dl")
    shot(window, "engineer")
    window.execute_script(
        "const list = document.querySelector('#files-cluster');"
        "list.value = 'b200-sxm'; list.dispatchEvent(new Event('change'));"
    )
    until(window, f"{SHOWN} && document.querySelector('#shown-file').textContent.includes('b200')")
    assert text_of(window, "#shown-file dl") != h100


def test_an_architect_sees_what_limits_a_cluster(window: Any, address: str, folder: Path) -> None:
    answers = ("--goal", "study", "--model", "llama-3.2-1b", "--cluster", "a100-80gb-sxm", "--gpus", "16")
    command("init", "study.yaml", *answers, cwd=folder)
    headings = dropped(window, address, folder / "study.yaml")
    assert "Bottlenecks" in headings
    assert "What" in headings
    shot(window, "architect", "#shown-file")


@pytest.mark.long
def test_a_capacity_planner_looks_at_a_run_of_weeks_and_at_the_queue(window: Any, address: str, folder: Path) -> None:
    page = (ROOT / "docs" / "start" / "capacity.md").read_text(encoding="utf-8")
    (jobs,) = re.findall(r'```yaml title="jobs.yaml"\n(.*?)```', page, re.S)
    (folder / "jobs.yaml").write_text(jobs, encoding="utf-8")
    headings = dropped(window, address, folder / "jobs.yaml")
    assert "easy" in text_of(window, "#shown-file")
    shot(window, "capacity-jobs", "#shown-file")
    window.execute_script("document.querySelector('#preset-run').value = 'llama-3-405b'")
    window.execute_script("document.querySelector('#shown-file').replaceChildren()")
    find(window, "#preset-run + button").click()
    until(window, SHOWN)
    assert "goodput" in text_of(window, "#shown-file")
    assert " ".join(each.text for each in find_all(window, "#shown-file summary")) != headings
    shot(window, "capacity", "#shown-file")


def test_a_trainer_sees_what_to_change_and_takes_the_files(window: Any, address: str, folder: Path) -> None:
    opened(window, address, f"{LLAMA}&gpus=8&global_batch=16&f.tp=1&f.cp=1&f.pp=1")
    find(window, "#wanted").send_keys(
        "dp_shard=8,activation_checkpointing=selective,compile=false,micro_batch=1", ENTER
    )
    until(window, "document.querySelector('#table caption').textContent.includes('match')")
    find(window, "#table tbody button").click()
    until(window, "document.querySelector('#plan strong').textContent.includes('AC=selective')")
    until(window, "document.querySelectorAll('#plan .plot').length >= 2")
    assert "80 %" in text_of(window, "#plan dl")
    texts = [each.text for each in find_all(window, "#plan summary")]
    assert "Communication" in texts
    parts = next(each for each in find_all(window, "#plan details") if each.text.startswith("Communication"))
    assert all(word in parts.text for word in ("wire", "latency", "protocol", "waiting"))
    neighbours = find_all(window, "[aria-label=neighbours] tbody tr")
    assert any("compile = True" in each.text and "-" in each.text for each in neighbours), "compiling gains time"
    shot(window, "trainer", "#chosen", 1200)
    window.execute_script("document.querySelector('#tool').value = 'torchtitan'")
    next(each for each in find_all(window, "#plan button") if each.text == "Launch files").click()
    with zipfile.ZipFile(downloaded(folder, "torchtitan.zip")) as archive:
        assert archive.namelist()
        assert "FSDP" in text_of(window, "#plan strong")
