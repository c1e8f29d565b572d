"""The page in a real browser: the answer, the state in the address, keyboard, widths, and that no request leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install 'forerun[test]'")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402
from small_question import CONFIG  # noqa: E402

BROWSER = shutil.which(os.environ.get("FORERUN_BROWSER", "chromium"))
DRIVER = shutil.which("chromedriver")
AXE = os.environ.get("FORERUN_AXE", "")
PICTURES = os.environ.get("FORERUN_SERVE_PICTURES", "")
"""a folder that gets a picture of the page in every width"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="no browser: apt-get install chromium chromium-driver"
    ),
]
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
)
SMALL = "model=gpt2-small&cluster=h100-sxm&gpus=8&seq_len=1024&global_batch=64&f.stack=torchtitan&f.pp=1"
USUAL = ((360, "dark"), (1600, "light"))
LATER = ((360, "light"), (800, "light"), (800, "dark"), (1600, "dark"), (1920, "light"), (1920, "dark"))
"""widths and schemes of the long tests"""
VIEWS = (*USUAL, *(pytest.param(*view, marks=pytest.mark.long) for view in LATER))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a running server, with its token."""
    command = [str(Path(sys.executable).with_name("forerun")), "serve", "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield re.search(r"http://\S+", process.stdout.readline()).group()  # type: ignore[union-attr]
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    """A browser that logs what its pages ask for, and whose own requests lead nowhere."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in (*OPTIONS, f"--user-data-dir={folder / 'profile'}", "--proxy-server=127.0.0.1:9"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(DRIVER))
    made.set_window_size(1600, 1000)
    yield made
    made.quit()


def until(browser: Any, script: str, seconds: float = 60) -> Any:
    return WebDriverWait(browser, seconds, 0.1).until(lambda one: one.execute_script(f"return {script}"))


def opened(browser: Any, address: str, state: str = SMALL) -> None:
    """Opens the page with a question, and waits for the whole answer and the details of the best plan."""
    browser.get("about:blank")
    browser.get(f"{address}&{state}")
    until(browser, "document.body.dataset.state === 'whole'")
    until(browser, "document.querySelectorAll('#plan canvas').length >= 2")


def text_of(browser: Any, selector: str) -> str:
    return str(browser.find_element(By.CSS_SELECTOR, selector).text)


def test_the_answer_is_shown_and_the_browser_has_nothing_to_say(browser: Any, address: str) -> None:
    opened(browser, address)
    assert "places proved" in text_of(browser, "#status")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#table tbody tr")) >= 5
    ink = "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter(v => v).length)"
    for canvas in browser.find_elements(By.CSS_SELECTOR, "canvas"):
        if canvas.is_displayed():
            assert browser.execute_script(f"return {ink}(arguments[0])", canvas) > 1000
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    assert "token" not in browser.current_url
    browser.find_element(By.ID, "command").click()
    until(browser, "document.querySelector('#search-command').textContent.startsWith('forerun plan gpt2-small')")


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_page_is_as_wide_as_its_window(browser: Any, address: str, width: int, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    opened(browser, address)
    assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
    if PICTURES:
        browser.save_screenshot(str(Path(PICTURES) / f"serve-{width}-{scheme}.png"))
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_choice_is_applied_and_keeps_the_batch(browser: Any, address: str) -> None:
    opened(browser, address)
    keep = browser.find_element(By.ID, "keep")
    listed = len(browser.find_elements(By.CSS_SELECTOR, ".choices li"))
    keep.click()
    assert len(browser.find_elements(By.CSS_SELECTOR, ".choices li")) == listed + 1
    keep.click()
    browser.find_element(By.CSS_SELECTOR, ".choices button").click()
    until(browser, "document.body.dataset.state === 'whole' && location.hash.includes('f.compile')")
    assert "global_batch=64" in browser.current_url
    assert "compile" in browser.execute_script("return document.querySelector('#q-f-compile').id")
    browser.back()
    until(browser, "!location.hash.includes('f.compile')")
    assert browser.execute_script("return document.querySelector('#q-f-compile').value") == ""


def test_the_keyboard_chooses_a_plan_and_the_address_keeps_it(browser: Any, address: str) -> None:
    opened(browser, address)
    second = browser.find_elements(By.CSS_SELECTOR, "#table tbody button")[1]
    words = second.text
    second.send_keys(Keys.ENTER)
    until(browser, "/&row=\\d+/.test(location.hash)")
    until(browser, f"document.querySelector('#plan strong').textContent === {json.dumps(words)}")
    browser.refresh()
    until(browser, f"(document.querySelector('#plan strong') || {{}}).textContent === {json.dumps(words)}")


def test_two_plans_stand_side_by_side(browser: Any, address: str) -> None:
    opened(browser, address)
    browser.find_element(By.ID, "pin").click()
    until(browser, "location.hash.includes('pin=')")
    browser.find_elements(By.CSS_SELECTOR, "#table tbody button")[2].click()
    until(browser, "document.querySelector('#plan').textContent.includes('Beside the pinned plan')")
    rows = browser.find_elements(By.CSS_SELECTOR, "[aria-label='pinned and chosen plan'] tbody tr")
    assert rows[0].text.startswith("step time")
    assert "%" in rows[0].text


def test_the_table_is_sorted_and_filtered(browser: Any, address: str) -> None:
    opened(browser, address)
    heads = browser.find_elements(By.CSS_SELECTOR, "#table th[scope=col]")
    heads[4].find_element(By.TAG_NAME, "button").click()
    assert heads[4].get_attribute("aria-sort") == "ascending"
    peaks = [float(each.text) for each in browser.find_elements(By.CSS_SELECTOR, "#table tbody td:nth-child(5)")]
    assert peaks == sorted(peaks)
    browser.find_element(By.ID, "wanted").send_keys("tp=4", Keys.ENTER)
    until(browser, "document.querySelector('#table caption').textContent.includes('match')")
    assert all("tp=4" in each.text for each in browser.find_elements(By.CSS_SELECTOR, "#table tbody th"))
    browser.find_element(By.ID, "wanted").send_keys("x", Keys.ENTER)
    until(browser, "!document.querySelector('#error').hidden")
    assert "--tp" in text_of(browser, "#error")


def test_files_are_dropped_on_the_page(browser: Any, address: str, folder: Path) -> None:
    (folder / "tiny.json").write_text(json.dumps(CONFIG))
    (folder / "mine.yaml").write_text("nodes: 2\njobs:\n  - {name: first, gpus: 8, duration_s: 7200}\n")
    opened(browser, address)
    browser.find_element(By.CSS_SELECTOR, "#question input[type=file]").send_keys(str(folder / "tiny.json"))
    until(browser, "document.querySelector('#q-model').value === 'dropped tiny.json'")
    until(browser, "document.body.dataset.state === 'whole'")
    browser.find_element(By.ID, "view-files").click()
    browser.find_element(By.ID, "files-input").send_keys(str(folder / "mine.yaml"))
    until(browser, "document.querySelectorAll('#shown-file details').length > 0")


def test_a_mistake_is_one_line_on_the_page(browser: Any, address: str) -> None:
    browser.get("about:blank")
    browser.get(f"{address}&{SMALL}&f.tp=7")
    until(browser, "document.body.dataset.state === 'failed'")
    assert "no plan" in text_of(browser, "#error")


def test_without_the_token_the_page_says_what_to_open(browser: Any, address: str) -> None:
    browser.execute_script("sessionStorage.clear()")
    browser.get("about:blank")
    browser.get(address.partition("#")[0])
    until(browser, "!document.querySelector('#error').hidden")
    assert "forerun serve printed" in text_of(browser, "#error")


@pytest.mark.skipif(not AXE, reason="FORERUN_AXE names no axe.min.js (npm pack axe-core)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, address: str, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    opened(browser, address)
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": Path(AXE).read_text(encoding="utf-8")})
    run = "axe.run().then(found => arguments[0](found.violations.map(each => [each.impact, each.id])))"
    assert browser.execute_async_script(run) == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_no_request_leaves_the_machine(browser: Any, address: str) -> None:
    """Comes last, and reads what the pages of all tests asked for."""
    opened(browser, address)
    messages = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    urls = {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}
    base = address.partition("#")[0]
    assert f"{base}api/ask" in urls, "the log shows requests"
    assert {url for url in urls if not url.startswith((base, "data:", "blob:", "chrome:", "about:"))} == set()
