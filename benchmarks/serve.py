"""The planner in the browser: weights of its files and of reports, times of its answers, what axe finds on the page.

python benchmarks/serve.py [--axe axe.min.js] [--gpus 64]

axe-core is that of axe-core-python, which the tests require, unless --axe names a newer one (npm pack axe-core).
It looks at the page in chromium, with chromium's driver. Times are wall-clock, of this machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait
from starlette.testclient import TestClient

from forerun.common.shipped import shipped_text
from forerun.interfaces.serve.app import STATIC, application
from forerun.interfaces.serve.options import EXAMPLE

TOKEN = "benchmark"
FORERUN = str(Path(sys.executable).with_name("forerun"))
WHOLE = "return document.body.dataset.state === 'whole' && document.querySelector('#plan svg.chart')"


def weights() -> None:
    """Prints the bytes of each file of the page."""
    total = packed = 0
    for path, (package, name, _) in STATIC.items():
        content = shipped_text(package, name).encode()
        total, packed = total + len(content), packed + len(gzip.compress(content))
        print(f"  {path or 'index.html':14} {len(content) / 1e3:8.1f} kB")
    print(f"  in all         {total / 1e3:8.1f} kB, {packed / 1e3:.1f} kB if packed by gzip")


def events(client: TestClient, question: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields each event with the seconds since the question."""
    start = time.perf_counter()
    with client.stream("POST", "/api/ask", json=question) as answer:
        for line in answer.iter_lines():
            yield time.perf_counter() - start, json.loads(line)


def answers(gpus: int) -> None:
    """Prints when parts of an answer come, for a first question and for one after it, and the time of one plan."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    client = TestClient(application(TOKEN), base_url="http://127.0.0.1:8765", headers=headers)
    question = {**EXAMPLE.model_dump(), "gpus": gpus}
    for words, asked in (("first question", question), ("next question", {**question, "gpus": gpus // 2})):
        told: dict[str, float] = {}
        for at_s, event in events(client, asked):
            name = f"{event['kind']}{' with front and choices' if event.get('whole') else ''}"
            told.setdefault(name, at_s)
            if event["kind"] == "space":
                words += f" ({event['plans']:,} possible plans)"
            last = event
        print(f"  {words}:", ", ".join(f"{name} {at_s:.2f} s" for name, at_s in told.items()))
    (kept_s, last), *_ = events(client, asked)
    print(f"  an answer that is kept: {kept_s * 1e3:.0f} ms")
    rows = {
        "simulated": last["points"]["simulated"]["row"][:20],
        "not simulated yet": last["points"]["bounded"]["row"][:: max(1, len(last["points"]["bounded"]["row"]) // 20)],
    }
    for words, some in rows.items():
        for call in ("plan", "details"):
            times = []
            for row in some:
                start = time.perf_counter()
                client.post(f"/api/{call}", json={"question": asked, "row": row}).raise_for_status()
                times.append(time.perf_counter() - start)
            usual_ms, most_ms = 1e3 * statistics.median(times), 1e3 * max(times)
            print(f"  {call} of a plan {words}: {usual_ms:.0f} ms, at most {most_ms:.0f} ms")


def reports() -> None:
    """Prints the bytes of pages that commands write."""
    plan = ["--cluster", "h100-sxm", "--seq-len", "8192"]
    commands = {
        "predict": ["predict", "llama-3.1-8b", *plan, "--dp-shard", "16", "--tp", "2"],
        "plan": ["plan", "llama-3.1-8b", *plan, "--gpus", "16", "--global-batch", "64", "--tp", "1,2"],
        "run": ["run", "llama-3-405b", "--runs", "5"],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, command in commands.items():
            path = Path(folder) / f"{name}.html"
            subprocess.run([FORERUN, *command, "--report", str(path)], check=True, stdout=subprocess.DEVNULL)
            print(f"  {name:14} {path.stat().st_size / 1e3:8.1f} kB")
        experiment = [FORERUN, "experiment", "run", "--preset", "bert-base-a6000", "--out", folder]
        subprocess.run(experiment, check=True, stdout=subprocess.DEVNULL)
        print(f"  {'experiment run':14} {(Path(folder) / 'report.html').stat().st_size / 1e3:8.1f} kB")


def axe_of_tests() -> Path | None:
    """Returns axe-core's script where the requirements of the tests are installed."""
    found = find_spec("axe_core_python")
    return None if found is None or found.origin is None else Path(found.origin).parent / "axe.min.js"


def accessibility(axe: Path) -> None:
    """Prints what axe finds on both views, light and dark, on a telephone and on a wide screen."""
    command = [FORERUN, "serve", "--no-browser", "--port", "0", "--demo"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[-1]
    options = webdriver.ChromeOptions()
    with tempfile.TemporaryDirectory() as folder:
        for option in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder}",
            "--no-first-run",
        ):
            options.add_argument(option)
        options.add_argument("--proxy-server=127.0.0.1:9")
        browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        browser.set_script_timeout(300)
        try:
            for width, scheme in ((360, "light"), (360, "dark"), (1600, "light"), (1600, "dark")):
                media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
                size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
                browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                browser.get("about:blank")
                browser.get(address)
                WebDriverWait(browser, 120).until(lambda one: one.execute_script(WHOLE))
                for view in ("planner", "files"):
                    browser.execute_script(f"document.getElementById('view-{view}').click()")
                    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe.read_text(encoding="utf-8")})
                    run = "axe.run().then(one => arguments[0](one.violations.map(v => `${v.impact}: ${v.id}`)))"
                    print(f"  {width} px, {scheme}, {view}:", "; ".join(browser.execute_async_script(run)) or "nothing")
        finally:
            browser.quit()
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axe", type=Path, help="axe.min.js of another axe-core", default=axe_of_tests())
    parser.add_argument("--gpus", type=int, default=64)
    given = parser.parse_args()
    print("files of the page")
    weights()
    print("times of answers")
    answers(given.gpus)
    print("weights of pages that --report writes")
    reports()
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if given.axe is None or missing:
        print(f"axe was not run: it needs {' and '.join(missing) or 'axe-core-python'}")
    else:
        print("what axe finds")
        accessibility(given.axe)


if __name__ == "__main__":
    main()
