"""Who may ask the server, and what the browser lets the page do."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from forerun.interfaces.serve.app import MOST_BYTES, STATIC, application
from forerun.interfaces.serve.guard import App

OWN = "http://127.0.0.1:8765"


SERVED: dict[str, App] = {}
"""the application of each address, so that not every test starts a search process of its own"""


def stranger(base: str = OWN, host: str = "127.0.0.1") -> TestClient:
    if host not in SERVED:
        SERVED[host] = application("right", host)
    return TestClient(SERVED[host], base_url=base)


@pytest.mark.parametrize(
    "path", ["options", "ask", "plan", "details", "rows", "export", "files", "model", "scale", "preset"]
)
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic right", "right", "Bearer "])
def test_every_call_needs_the_token(path: str, header: str | None) -> None:
    answer = stranger().post(f"/api/{path}", json={}, headers={} if header is None else {"authorization": header})
    assert answer.status_code == 401
    assert "token" in answer.json()["error"]


def test_with_the_token_a_call_passes() -> None:
    assert stranger().post("/api/options", json={}, headers={"authorization": "Bearer right"}).status_code == 200


@pytest.mark.parametrize("name", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example:8765", "", "10.0.0.1"])
@pytest.mark.parametrize("path", ["/", "/main.js", "/api/options"])
def test_another_name_of_the_server_is_refused(name: str, path: str) -> None:
    """DNS rebinding: a page of another name resolves to this machine."""
    headers = {"host": name, "authorization": "Bearer right"}
    answer = stranger().request("POST" if "api" in path else "GET", path, headers=headers, json={})
    assert answer.status_code == 421


@pytest.mark.parametrize("base", [OWN, "http://localhost:8765", "http://[::1]:8765"])
def test_names_of_this_machine_pass(base: str) -> None:
    assert stranger(base).get("/").status_code == 200


def test_a_server_of_all_addresses_takes_addresses_in_digits_but_no_names() -> None:
    assert stranger("http://192.0.2.7:8765", "0.0.0.0").get("/").status_code == 200
    assert stranger("http://evil.example:8765", "0.0.0.0").get("/").status_code == 421


@pytest.mark.parametrize(
    "headers", [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}]
)
def test_a_page_of_another_site_is_refused_even_with_the_token(headers: dict[str, str]) -> None:
    answer = stranger().post("/api/options", json={}, headers={"authorization": "Bearer right", **headers})
    assert answer.status_code == 403


def test_no_other_page_may_read_an_answer() -> None:
    for method in ("OPTIONS", "GET", "POST"):
        answer = stranger().request(method, "/api/options", headers={"authorization": "Bearer right"})
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/", "/main.js", "/nothing", "/api/options"])
def test_every_answer_tells_the_browser_what_the_page_may_do(path: str) -> None:
    answer = stranger().get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"


def test_the_page_has_no_script_and_no_style_of_its_own() -> None:
    text = stranger().get("/").text
    assert "<script>" not in text
    assert "<style" not in text
    assert "style=" not in text
    assert "onclick" not in text


def test_no_file_of_the_page_names_another_server() -> None:
    for path in STATIC:
        text = stranger().get(f"/{path}").text
        addresses = {
            part.split('"')[0].split()[0]
            for part in text.split("//")[1:]
            if text.count("https:") and part[:6] == "github"
        }
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert all(address.startswith("github.com/leeoniya/uPlot") for address in addresses), "the licence of uPlot"


@pytest.mark.parametrize("path", ["/../pyproject.toml", "/web/index.html", "/%2e%2e/app.py", "/api/nothing", "/app.py"])
def test_only_the_files_of_the_page_are_there(path: str) -> None:
    answer = stranger().post(path, json={}, headers={"authorization": "Bearer right"})
    assert answer.status_code == 404
    assert "Traceback" not in answer.text


def test_a_request_that_is_too_large_is_refused() -> None:
    client = stranger()
    client.headers["authorization"] = "Bearer right"
    kind = {"content-type": "application/json"}
    answer = client.post("/api/plan", content=b" " * (MOST_BYTES + 1), headers=kind)
    assert answer.status_code == 413
    pieces = (b" " * (1 << 16) for _ in range(MOST_BYTES // (1 << 16) + 1))
    assert client.post("/api/plan", content=pieces, headers=kind).status_code == 413  # no content-length


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff", "UTF-8"),
        (b"[" * 5000, "nested"),
        (b'{"a": 1, "a": 2}', "twice"),
        (json.dumps({"gpus": 2**70}).encode(), "64 bits"),
        (b"[]", "question"),
    ],
)
def test_what_is_no_request_is_refused_in_one_line(content: bytes, words: str) -> None:
    headers = {"authorization": "Bearer right", "content-type": "application/json"}
    answer = stranger().post("/api/plan", content=content, headers=headers)
    assert answer.status_code == 400
    assert "\n" not in answer.json()["error"]
    assert words in answer.json()["error"] or words == "question"


def test_a_form_of_another_site_can_not_ask() -> None:
    """A form posts without asking the browser first, but never JSON."""
    headers = {"authorization": "Bearer right", "content-type": "text/plain"}
    answer = stranger().post("/api/options", content=b"{}", headers=headers)
    assert answer.status_code == 400
    assert "expected JSON" in answer.json()["error"]
