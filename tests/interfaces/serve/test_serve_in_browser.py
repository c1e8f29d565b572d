"""The page in a real browser: the answer, the state in the address, keyboard, widths, and that no request leaves."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from in_browser import NEEDS_BROWSER, SMALL, downloaded, find, find_all, look, opened, plain, text_of, until
from small_question import CONFIG

PICTURES = os.environ.get("FORERUN_SERVE_PICTURES", "")
"""a folder that gets a picture of the page in every width"""
AXE = find_spec("axe_core_python")
pytestmark = NEEDS_BROWSER
ENTER = "\ue007"
SVG = "{http://www.w3.org/2000/svg}"
USUAL = ((360, "dark"), (1600, "light"))
LATER = (
    *((360, "light"), (800, "light"), (800, "dark"), (1280, "light"), (1280, "dark")),
    *((1600, "dark"), (1920, "light"), (1920, "dark")),
)
"""widths and schemes of the long tests"""
VIEWS = (*USUAL, *(pytest.param(*view, marks=pytest.mark.long) for view in LATER))


def test_the_answer_is_shown_and_the_browser_has_nothing_to_say(browser: Any, address: str) -> None:
    opened(browser, address)
    assert "places proved" in text_of(browser, "#status")
    assert len(find_all(browser, "#table tbody tr")) >= 5
    ink = "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter(v => v).length)"
    for canvas in find_all(browser, "canvas"):
        if canvas.is_displayed():
            assert browser.execute_script(f"return {ink}(arguments[0])", canvas) > 1000
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    assert "token" not in browser.current_url
    find(browser, "#command").click()
    until(browser, "document.querySelector('#search-command').textContent.startsWith('forerun plan gpt2-small')")


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_page_is_as_wide_as_its_window(browser: Any, address: str, width: int, scheme: str) -> None:
    look(browser, width, scheme)
    opened(browser, address)
    assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
    if PICTURES:
        browser.save_screenshot(str(Path(PICTURES) / f"serve-{width}-{scheme}.png"))
    plain(browser)


def test_a_choice_is_applied_and_keeps_the_batch(browser: Any, address: str) -> None:
    opened(browser, address)
    keep = find(browser, "#keep")
    listed = len(find_all(browser, ".choices li"))
    keep.click()
    assert len(find_all(browser, ".choices li")) == listed + 1
    keep.click()
    find(browser, ".choices button").click()
    until(browser, "document.body.dataset.state === 'whole' && location.hash.includes('f.compile')")
    assert "global_batch=64" in browser.current_url
    assert "compile" in browser.execute_script("return document.querySelector('#q-f-compile').id")
    browser.back()
    until(browser, "!location.hash.includes('f.compile')")
    assert browser.execute_script("return document.querySelector('#q-f-compile').value") == ""


def test_the_keyboard_chooses_a_plan_and_the_address_keeps_it(browser: Any, address: str) -> None:
    opened(browser, address)
    second = find_all(browser, "#table tbody button")[1]
    words = second.text
    second.send_keys(ENTER)
    until(browser, "/&row=\\d+/.test(location.hash)")
    until(browser, f"document.querySelector('#plan strong').textContent === {json.dumps(words)}")
    browser.refresh()
    until(browser, f"(document.querySelector('#plan strong') || {{}}).textContent === {json.dumps(words)}")


def test_a_model_with_a_tower_is_asked_for_with_its_images(browser: Any, address: str) -> None:
    tower = SMALL.replace("gpt2-small", "llava-1.5-7b").replace("seq_len=1024", "seq_len=2048")
    opened(browser, address, f"{tower}&f.tp=1&images=1&freeze_encoder=true")
    find(browser, "#command").click()
    until(browser, "document.querySelector('#search-command').textContent.includes('--images 1 --freeze-encoder')")
    assert browser.execute_script("return document.querySelector('#q-freeze_encoder').checked")
    if PICTURES:
        find(browser, "#q-images").click()
        browser.save_screenshot(str(Path(PICTURES) / "serve-images.png"))


def test_two_plans_stand_side_by_side(browser: Any, address: str) -> None:
    opened(browser, address)
    find(browser, "#pin").click()
    until(browser, "location.hash.includes('pin=')")
    find_all(browser, "#table tbody button")[2].click()
    until(browser, "document.querySelector('#plan').textContent.includes('Beside the pinned plan')")
    rows = find_all(browser, "[aria-label='pinned and chosen plan'] tbody tr")
    assert rows[0].text.startswith("step time")
    assert "%" in rows[0].text
    find(browser, "#unpin").click()
    until(browser, "!location.hash.includes('pin=') && !document.querySelector('#unpin')")


def test_an_address_gives_both_plans_to_a_server_that_has_not_answered_it(browser: Any, address: str) -> None:
    opened(browser, address, SMALL.replace("global_batch=64", "global_batch=128") + "&row=5&pin=3")
    until(browser, "document.querySelector('#plan').textContent.includes('Beside the pinned plan')")
    assert "&row=5&pin=3" in browser.current_url
    assert {"chosen", "pinned"} <= {each.text for each in find_all(browser, "#scatter-legend li")}
    pinned = re.search(r"Pinned: (.*), torchtitan", text_of(browser, "#plan"))
    assert pinned is not None
    find(browser, "#unpin").find_element("xpath", "preceding-sibling::button").click()
    until(browser, f"document.querySelector('#plan strong').textContent === {json.dumps(pinned[1])}")
    assert "&row=3" in browser.current_url


def test_a_plan_that_was_not_simulated_is_marked_at_its_bounds(browser: Any, address: str) -> None:
    opened(browser, address)
    marks = "[...document.querySelectorAll('#scatter-legend li')].map(each => each.textContent)"
    find(browser, "#state").send_keys("not simulated")
    until(browser, "document.querySelector('#table caption').textContent.includes('match')")
    words = text_of(browser, "#table tbody button")
    find(browser, "#table tbody button").click()
    until(browser, f"document.querySelector('#plan strong').textContent === {json.dumps(words)}")
    assert "chosen" in browser.execute_script(f"return {marks}")


def test_a_neighbour_is_chosen_and_the_address_keeps_it(browser: Any, address: str) -> None:
    opened(browser, address)
    until(browser, "document.querySelector('[aria-label=neighbours] tbody button')")
    best = text_of(browser, "#plan strong")
    find(browser, "[aria-label=neighbours] tbody button").click()
    until(browser, f"document.querySelector('#plan strong').textContent !== {json.dumps(best)}")
    words = text_of(browser, "#plan strong")
    assert "&row=" in browser.current_url
    browser.refresh()
    until(browser, f"(document.querySelector('#plan strong') || {{}}).textContent === {json.dumps(words)}")


def test_the_table_is_sorted_and_filtered(browser: Any, address: str) -> None:
    opened(browser, address)
    heads = find_all(browser, "#table th[scope=col]")
    find(heads[4], "button").click()
    assert heads[4].get_attribute("aria-sort") == "ascending"
    peaks = [float(each.text) for each in find_all(browser, "#table tbody td:nth-child(5)")]
    assert peaks == sorted(peaks)
    find(browser, "#wanted").send_keys("tp=4", ENTER)
    until(browser, "document.querySelector('#table caption').textContent.includes('match')")
    assert all("tp=4" in each.text for each in find_all(browser, "#table tbody th"))
    find(browser, "#wanted").send_keys("x", ENTER)
    until(browser, "!document.querySelector('#error').hidden")
    assert "--tp" in text_of(browser, "#error")


def test_plots_are_saved_as_pictures(browser: Any, address: str, folder: Path) -> None:
    opened(browser, address)
    for ending in ("PNG", "SVG"):
        buttons = find_all(browser, "#plan .tools button")
        next(each for each in buttons if each.text == f"Save as {ending}").click()
    assert downloaded(folder, "Where the time goes.png").read_bytes().startswith(b"\x89PNG")
    drawing = downloaded(folder, "Where the time goes.svg").read_text(encoding="utf-8")
    texts = ["".join(each.itertext()) for each in ElementTree.fromstring(drawing).iter(f"{SVG}text")]
    assert any("matrix products" in text for text in texts)
    assert "var(--" not in drawing


def test_rows_of_tables_show_figures_on_a_telephone(browser: Any, address: str) -> None:
    """The name of a row leaves room for the first figures beside it."""
    look(browser, 360)
    opened(browser, address)
    hidden = browser.execute_script("""
        const end = one => one.getBoundingClientRect().right;
        const tables = [...document.querySelectorAll("#found table, #plan table")];
        return tables.filter(one => one.offsetWidth && end(one.querySelector("tbody td")) > end(one.parentElement))
            .map(one => one.textContent.slice(0, 80))""")
    plain(browser)
    assert hidden == []


def test_files_are_dropped_on_the_page(browser: Any, address: str, folder: Path) -> None:
    (folder / "tiny.json").write_text(json.dumps(CONFIG))
    (folder / "mine.yaml").write_text("nodes: 2\njobs:\n  - {name: first, gpus: 8, duration_s: 7200}\n")
    opened(browser, address)
    find(browser, "#question input[type=file]").send_keys(str(folder / "tiny.json"))
    until(browser, "document.querySelector('#q-model').value === 'dropped tiny.json'")
    until(browser, "document.body.dataset.state === 'whole'")
    find(browser, "#view-files").click()
    find(browser, "#files-input").send_keys(str(folder / "mine.yaml"))
    until(browser, "document.querySelectorAll('#shown-file details').length > 0")


def test_a_mistake_is_one_line_on_the_page(browser: Any, address: str) -> None:
    browser.get("about:blank")
    browser.get(f"{address}&{SMALL}&f.tp=7")
    until(browser, "document.body.dataset.state === 'failed'")
    assert "no plan" in text_of(browser, "#error")
    browser.get("about:blank")
    browser.get(f"{address}&{SMALL.replace('h100-sxm', 'h100-smx')}")
    until(browser, "document.body.dataset.state === 'failed'")
    assert "'h100-smx'" in text_of(browser, "#error")
    assert "h100-sxm" in text_of(browser, "#error")


def test_a_question_without_an_answer_shows_no_plans_of_another_one(browser: Any, address: str) -> None:
    opened(browser, address)
    for text, state in (("7", "failed"), ("2", "whole")):
        box = find(browser, "#q-f-tp")
        box.clear()
        box.send_keys(text, ENTER)
        until(browser, f"document.body.dataset.state === '{state}' && location.hash.includes('f.tp={text}')")
        shown = state == "whole"
        assert [find(browser, f"#{name}").is_displayed() for name in ("found", "plan")] == [shown, shown]
        assert find(browser, "#error").is_displayed() != shown


def test_search_asks_again_what_had_no_answer(browser: Any, address: str) -> None:
    browser.get("about:blank")
    browser.get(f"{address}&{SMALL}&f.tp=7")
    until(browser, "document.body.dataset.state === 'failed'")
    browser.execute_script(
        "window.states = []; new MutationObserver(() => window.states.push(document.body.dataset.state))"
        ".observe(document.body, {attributes: true})"
    )
    find(browser, "#question button[type=submit]").click()
    until(browser, "window.states.includes('searching') && document.body.dataset.state === 'failed'")


def test_without_the_token_the_page_says_what_to_open(browser: Any, address: str) -> None:
    browser.execute_script("sessionStorage.clear()")
    browser.get("about:blank")
    browser.get(address.partition("#")[0])
    until(browser, "!document.querySelector('#error').hidden")
    assert "forerun serve printed" in text_of(browser, "#error")


def _axe() -> str:
    assert AXE is not None
    assert AXE.origin is not None
    return (Path(AXE.origin).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.skipif(AXE is None, reason="axe-core-python, of the requirements of the tests, is not installed")
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1600, "light"), (1600, "dark")])
def test_axe_finds_nothing(browser: Any, address: str, width: int, scheme: str) -> None:
    look(browser, width, scheme)
    opened(browser, address)
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": _axe()})
    run = "axe.run().then(found => arguments[0](found.violations.map(each => [each.impact, each.id])))"
    for view in ("planner", "files"):
        find(browser, f"#view-{view}").click()
        assert browser.execute_async_script(run) == []
    plain(browser)


def test_no_request_leaves_the_machine(browser: Any, address: str) -> None:
    """Comes last, and reads what the pages of all tests asked for."""
    opened(browser, address)
    messages = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    urls = {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}
    base = address.partition("#")[0]
    assert f"{base}api/ask" in urls, "the log shows requests"
    assert {url for url in urls if not url.startswith((base, "data:", "blob:", "chrome", "about:"))} == set()
