"""How tests drive the page in a real browser: where the browser is, how long to wait, widths and colour schemes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which(os.environ.get("FORERUN_BROWSER", "chromium"))
DRIVER = shutil.which("chromedriver")
NEEDS_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="no browser: apt-get install chromium chromium-driver"
    ),
]
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--hide-scrollbars", "--proxy-server=127.0.0.1:9"),
)
"""options of a browser whose own requests lead nowhere"""
SMALL = "model=gpt2-small&cluster=h100-sxm&gpus=8&seq_len=1024&global_batch=64&f.stack=torchtitan&f.pp=1"
"""a question that is answered at once"""
PATIENCE_S = 300.0
"""the longest wait for anything in the browser, much longer than a machine needs that has other work"""


def until(browser: Any, script: str, seconds: float = PATIENCE_S) -> Any:
    """Waits until a script says something true, and returns it."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, 0.1).until(lambda one: one.execute_script(f"return {script}"))


def opened(browser: Any, address: str, state: str = SMALL) -> None:
    """Opens the page with a question, and waits for the whole answer and the details of the best plan."""
    browser.get("about:blank")
    browser.get(f"{address}&{state}")
    until(browser, "document.body.dataset.state === 'whole'")
    until(browser, "document.querySelectorAll('#plan .plot').length >= 2")


def find(browser: Any, selector: str) -> Any:
    """Returns the first element that a CSS selector names."""
    return browser.find_element("css selector", selector)


def find_all(browser: Any, selector: str) -> list[Any]:
    """Returns the elements that a CSS selector names."""
    return list(browser.find_elements("css selector", selector))


def text_of(browser: Any, selector: str) -> str:
    """Returns the text that an element shows."""
    return str(find(browser, selector).text)


def look(browser: Any, width: int, scheme: str = "light", height: int = 1000) -> None:
    """Gives the window a size and a colour scheme; `plain` undoes it."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def plain(browser: Any) -> None:
    """Gives the window its own size and colours again."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def downloaded(folder: Path, name: str) -> Path:
    """Waits for a file that the browser saves."""
    end = time.monotonic() + PATIENCE_S
    while not (folder / name).is_file():
        assert time.monotonic() < end, f"{name} was not saved: {list(folder.iterdir())}"
        time.sleep(0.1)
    return folder / name


def picture(browser: Any, path: Path) -> None:
    """Writes what the window shows as a PNG file of few colours, so that documentation stays small."""
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
