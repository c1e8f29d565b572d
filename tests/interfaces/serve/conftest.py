"""A server in this process and its answer to a small question; a server of its own, and a browser that looks at it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_browser import BROWSER, DRIVER, OPTIONS, PATIENCE_S
from small_question import BASE, QUESTION, TOKEN, events
from starlette.testclient import TestClient

from forerun.interfaces.serve.app import application


@pytest.fixture(scope="package")
def client() -> TestClient:
    return TestClient(application(TOKEN), base_url=BASE, headers={"authorization": f"Bearer {TOKEN}"})


@pytest.fixture(scope="package")
def answered(client: TestClient) -> list[dict[str, Any]]:
    return events(client, "ask", QUESTION)


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    """The address of a running server, with its token."""
    command = [str(Path(sys.executable).with_name("forerun")), "serve", "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield re.search(r"http://\S+", process.stdout.readline()).group()  # type: ignore[union-attr]
    process.kill()
    process.wait()


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the browser and for what it downloads."""
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="package")
def browser(folder: Path) -> Iterator[Any]:
    """A browser that logs what its pages ask for, and whose own requests lead nowhere."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install 'forerun[test]'")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in (*OPTIONS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(option)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(DRIVER))
    made.set_window_size(1600, 1000)
    made.set_script_timeout(PATIENCE_S)
    made.set_page_load_timeout(PATIENCE_S)
    made.command_executor.client_config.timeout = 2 * PATIENCE_S
    yield made
    made.quit()
