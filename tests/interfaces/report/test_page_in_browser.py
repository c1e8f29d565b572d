"""Pages in a real browser: every plot is drawn and answers the pointer, and no request leaves a page."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import results_by_hand as by_hand
from documents_by_hand import documents

from forerun.interfaces.report.page import Document, Plot, page
from forerun.interfaces.report.plots import axis, labelled_bars, layout, stacked_areas
from forerun.interfaces.report.style import BLUE, VERMILLION, Look

BROWSER = shutil.which(os.environ.get("FORERUN_BROWSER", "chromium"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium, or name one in FORERUN_BROWSER"),
]
NARROW, WIDE = 360, 1600
KINDS = ("run", "prediction", "scaling", "comparison", "stragglers", "search", "range")
VIEWS = (*((kind, NARROW) for kind in (*KINDS, "folded run")), ("run", WIDE))
"""pages and widths in which they are looked at"""
LATER = tuple((kind, WIDE) for kind in KINDS if kind != "run")
"""those of the long tests"""
ALL_VIEWS = (*VIEWS, *(pytest.param(*view, marks=pytest.mark.long) for view in LATER))
FORBIDDEN = "http://127.0.0.1:9/forbidden.png"
ALLOWED = "http://127.0.0.1:9/allowed.png"
OFFLINE = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    "--proxy-server=127.0.0.1:9",
)


def file_of(kind: str) -> str:
    return f"{kind.replace(' ', '_')}.html"


def browse(folder: Path, address: str, *options: str) -> str:
    """The document at `address` as it is when its scripts are done."""
    assert BROWSER is not None
    command = [BROWSER, *OFFLINE, f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, timeout=240, cwd=folder)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout.decode()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for kind, document in documents(by_hand.NASTY).items():
        (folder / file_of(kind)).write_bytes(page(document))
    shutil.copy(Path(__file__).with_name("frames.html"), folder)
    return folder


@pytest.fixture(scope="module")
def seen(pages: Path, request: pytest.FixtureRequest) -> dict[tuple[str, int], dict[str, Any]]:
    """(page, width) -> what a frame of that width shows; "provoked" and "log" are of the run as a whole."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {(each.get("kind"), each.get("width")) for each in params}
    query = {
        "views": ",".join(f"{file_of(kind)}@{width}" for kind, width in (*VIEWS, *LATER) if (kind, width) in asked),
        "provoke": "run.html",
        "forbidden": FORBIDDEN,
        "allowed": ALLOWED,
    }
    log = pages / "net.json"
    text = browse(
        pages,
        f"file://{pages}/frames.html?{urlencode(query)}",
        "--allow-file-access-from-files",
        "--virtual-time-budget=600000",
        f"--log-net-log={log}",
    )
    (results,) = re.findall(r'<pre id="results">(.*?)</pre>', text, re.DOTALL)
    found = json.loads(html.unescape(results))
    out = {(each["page"], each.get("width", 0)): each for each in found}
    out["log", 0] = {"requests": requests(log)}
    return out


def requests(log: Path) -> set[str]:
    """Addresses that anything asked for, as the browser's network log has them."""
    content = json.loads(log.read_text())
    urls = {event.get("params", {}).get("url", "") for event in content["events"]}
    return {url for url in urls if url.startswith(("http:", "https:", "ws:", "wss:", "ftp:"))}


@pytest.mark.parametrize(("kind", "width"), ALL_VIEWS)
def test_every_plot_is_drawn_and_answers_the_pointer(seen, kind: str, width: int) -> None:
    found = seen[file_of(kind), width]
    n_plots = sum(isinstance(part, Plot) for part in documents(by_hand.NASTY)[kind].parts)
    assert found["error"] is None
    assert found["plots"] == f"{n_plots} of {n_plots}"
    assert found["drawn"] == n_plots
    assert found["silent"] == []
    assert found["wide"] == 0
    assert found["unsorted"] == 0


@pytest.mark.parametrize(("kind", "width"), ALL_VIEWS)
def test_a_page_is_as_wide_as_its_window(seen, kind: str, width: int) -> None:
    assert seen[file_of(kind), width]["overflow"] == 0


@pytest.mark.parametrize(("kind", "width"), ALL_VIEWS)
def test_names_of_users_run_nothing(seen, kind: str, width: int) -> None:
    found = seen[file_of(kind), width]
    assert found["title"] != "owned"
    assert found["images"] == 0


def test_no_request_leaves_a_page_and_no_button_would_send_one(seen) -> None:
    asked = seen["log", 0]["requests"]
    assert ALLOWED in asked, "the log shows requests"
    assert FORBIDDEN not in asked
    assert not {url for url in asked if "127.0.0.1:9" in url} - {ALLOWED}
    assert "img-src" in seen["provoked", 0]["error"]
    buttons = {name for (_, width), found in seen.items() if width for name in found["buttons"]}
    assert buttons == {"Save as PNG", "Save as SVG", "Whole plot"}


def test_a_page_opened_by_itself_draws_its_plots(pages: Path) -> None:
    text = browse(pages, f"file://{pages}/scaling.html", "--virtual-time-budget=20000", "--window-size=1200,900")
    assert re.search(r'<body[^>]* data-plots="3 of 3"', text)
    assert "data-error" not in text.partition(">")[0]
    assert text.count('class="chart"') >= 3


def test_areas_of_a_page_stand_on_each_other_where_places_repeat(tmp_path: Path) -> None:
    """Many nodes start at the same moment, so the memory of a step has several levels at one time."""
    parts = [(Look("one", BLUE), [4.0] * 5), (Look("two", VERMILLION), [4.0] * 5)]
    plot = Plot(stacked_areas([0.0, 1.0, 1.0, 1.0, 2.0], parts, "GiB"), layout(axis("x"), axis("y")), "two areas", 300)
    (tmp_path / "areas.html").write_bytes(page(Document("areas", "", (plot,))))
    text = browse(tmp_path, f"file://{tmp_path}/areas.html", "--virtual-time-budget=20000")
    paths = re.findall(rf'<path d="([^"]*)" fill="(?:{BLUE}|{VERMILLION})"', text)
    heights = [sorted({float(y) for y in re.findall(r",([-0-9.]+)", path)}) for path in paths]
    (top_of_one, bottom), (top, bottom_of_two) = heights
    assert bottom_of_two == top_of_one
    assert bottom - top_of_one == pytest.approx(bottom_of_two - top, abs=0.02)


def test_labels_that_are_too_wide_for_a_telephone_take_another_line(tmp_path: Path) -> None:
    bars = [
        ("until failures are detected and nodes back", "0.6%", 1.0),
        ("restarting-and-warming-up-and-loading-again", "3%", 2.0),
        ("a" * 150, "1%", 3.0),
    ]
    (tmp_path / "bars.html").write_bytes(page(Document("bars", "", (labelled_bars(bars, "x", "three bars"),))))
    for width, whole in ((360, False), (1600, True)):
        text = browse(
            tmp_path, f"file://{tmp_path}/bars.html", "--virtual-time-budget=20000", f"--window-size={width},900"
        )
        lines = re.findall(r"<tspan[^>]*>([^<]*)</tspan>", text)
        assert ("until failures are detected and nodes back" in lines) is whole
        joined = "".join(line if line.endswith("-") else f"{line} " for line in lines)
        assert "until failures are detected and nodes back 0.6%" in joined
        assert "restarting-and-warming-up-and-loading-again 3%" in joined
        assert any(line.startswith("aaaa") and line.endswith("…") for line in lines)
