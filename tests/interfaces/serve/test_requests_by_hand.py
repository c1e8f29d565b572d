"""Files that are dropped, downloads, requests of the page, the address of the server, and its limits, by hand."""

from __future__ import annotations

import io
import socket
import zipfile
from pathlib import Path
from types import SimpleNamespace as Hand
from typing import Any

import pytest
from small_question import CONFIG
from starlette.testclient import TestClient

from forerun.common.errors import ForerunError
from forerun.interfaces.report.page import Document, Text
from forerun.interfaces.serve import app, dropped, dropped_traces, exports, planner, records, server
from forerun.interfaces.serve.dropped import Where
from forerun.interfaces.serve.question import MOST_GPUS, MOST_SEQUENCES, MOST_TOKENS, MOST_VALUES, config_model

OWN = "http://127.0.0.1:8765"
Patch = pytest.MonkeyPatch


# -- dropped files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("a.et", "a.et"), ("../../etc/passwd", "passwd"), ("C:\\x\\b c.json", "b-c.json"), (".hidden", "hidden"),
        ("...", "file"), ("", "file"), ("a" * 150 + ".et", "a" * 97 + ".et"), ("\u00e4\u00f6.csv", "csv"), ("-x-", "x"),
    ],
)  # fmt: skip
def test_files_have_harmless_names(name: str, safe: str, tmp_path: Path) -> None:
    (path,) = dropped._written(tmp_path, {name: b"content"})
    assert (path.name, path.parent, path.read_bytes()) == (safe, tmp_path, b"content")
    with pytest.raises(ForerunError, match="dropped twice"):
        dropped._written(tmp_path, {f"x/{name}": b""})


def test_the_number_of_files_has_bounds(monkeypatch: Patch) -> None:
    monkeypatch.setattr(dropped, "_document", lambda paths, where: len(paths))
    where = Where("h100-sxm", 1)
    assert dropped.dropped_document({f"{n}": b"" for n in range(dropped.MOST_FILES)}, where) == dropped.MOST_FILES
    for number in (0, dropped.MOST_FILES + 1):
        with pytest.raises(ForerunError, match=f"{number} files; drop at least one and at most 256"):
            dropped.dropped_document({f"{n}": b"" for n in range(number)}, where)


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({"a.0.et": ""}, "traces"), ({"a.0.et.gz": "", "a.1.et": ""}, "traces"),
        ({"a.0.et": "", "system.json": ""}, "case"),
        ({"p.json": '{"traceEvents": 1}'}, "profile"), ({"p.json": '{"schemaVersion": 1}'}, "profile"),
        ({"p.json.gz": "x"}, "profile"), ({"a.json": "{}", "b.json": "{}"}, "profile"), ({"r.json": "{}"}, "described"),
        ({"a.program": ""}, "program h100"), ({"j.csv": ""}, "jobs of 3 nodes"), ({"r.yaml": ""}, "described"),
        ({"r.yml": ""}, "described"),
    ],
)  # fmt: skip
def test_names_tell_the_kinds_of_files(files: dict[str, str], shown: str, tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("traces", "case"):
        monkeypatch.setattr(dropped, f"{name}_document", lambda paths, name=name: name)
    monkeypatch.setattr(dropped, "_profile", lambda paths: "profile")
    monkeypatch.setattr(dropped, "_described", lambda path: "described")
    monkeypatch.setattr(dropped, "_program", lambda path, cluster: f"program {cluster}")
    monkeypatch.setattr(dropped, "of_trace", lambda path, shape: shape)
    monkeypatch.setattr(dropped, "compare", lambda request, workers: None)
    monkeypatch.setattr(
        dropped, "schedules_document", lambda request, outcomes, command: f"jobs of {request.nodes} nodes"
    )
    paths = []
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        paths.append(tmp_path / name)
    assert dropped._document(paths, Where("h100", 3)) == shown


def test_files_of_no_kind_are_refused(tmp_path: Path) -> None:
    for names, words in (
        (["a.txt"], "expected a .program"),
        (["a.yaml", "b.yaml"], "2 files; several go together only"),
    ):
        with pytest.raises(ForerunError, match=words):
            dropped._document([tmp_path / name for name in names], Where("h100", 1))


@pytest.mark.parametrize(
    ("text", "shown"), [("nodes: 3", "jobs"), ("gpu_kinds: 3", "jobs"), ("gpus: 3", "run"), ("model: 3", "experiment")]
)
def test_keys_tell_what_a_yaml_file_describes(text: str, shown: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(dropped, "read_cluster", lambda path: "request")
    monkeypatch.setattr(dropped, "compare", lambda request, workers: None)
    monkeypatch.setattr(dropped, "schedules_document", lambda *_: "jobs")
    monkeypatch.setattr(dropped, "_whole_run", lambda path, command: "run")
    monkeypatch.setattr(dropped, "_experiment", lambda path, command: "experiment")
    (tmp_path / "a.yaml").write_text(text)
    assert dropped._described(tmp_path / "a.yaml") == shown


def test_a_case_needs_a_system_and_one_network(tmp_path: Path) -> None:
    for names, words in (
        (["a.0.et", "system.json"], "a replay needs system.json and one network in YAML"),
        (["a.0.et", "system.json", "n.yml", "m.yaml"], "a replay needs system.json and one network in YAML"),
        (["a.0.et", "n.yml"], "a replay needs system.json and one network in YAML"),
        (["a.0.et", "system.json", "n.yml", "x.txt"], "x.txt: beside traces expected system.json"),
    ):
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        for name in names:
            (folder / name).write_text("")
        with pytest.raises(ForerunError, match=words):
            dropped_traces.case_document([folder / name for name in names])
    assert [dropped_traces.is_trace(Path(name)) for name in ("a.0.et", "a.et.zst", "a.json", "et")] == [
        True, True, False, False,
    ]  # fmt: skip


# -- downloads and the application -------------------------------------------------------------------------------------


def test_an_archive_of_the_same_files_is_the_same_bytes() -> None:
    files = {"run.sh": "#!/bin/sh\n", "notes.txt": "x" * 1000}
    content = exports._zipped(files)
    assert exports._zipped(files) == content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {name: archive.read(name).decode() for name in archive.namelist()} == files
        assert all(entry.compress_type == zipfile.ZIP_DEFLATED for entry in archive.infolist())
        assert archive.getinfo("notes.txt").compress_size < 100


@pytest.fixture(scope="module")
def client() -> TestClient:
    headers = {"authorization": "Bearer right"}
    return TestClient(app.application("right"), base_url=OWN, headers=headers)


@pytest.mark.parametrize(
    ("query", "content", "status"),
    [
        ("name=a&size=2&name=b&size=1", b"abc", 200),
        ("name=a&size=3&nodes=16384", b"abc", 200),
        ("name=a&size=3&nodes=16385", b"abc", 400),
        ("name=a&size=3&nodes=0", b"abc", 400),
        ("name=a&size=3&nodes=-1", b"abc", 400),
        ("name=a&size=4", b"abc", 400),
        ("name=a&size=1&name=a&size=2", b"abc", 400),
        ("name=a&name=b&size=3", b"abc", 400),
        ("name=a&size=3x", b"abc", 400),
        ("name=a&size=000000000003", b"abc", 400),
        ("name=a&size=00000000003", b"abc", 200),
    ],
)
def test_dropped_bytes_are_those_of_their_names(
    query: str, content: bytes, status: int, client: TestClient, monkeypatch: Patch
) -> None:
    seen: list[Any] = []

    def document(files: dict[str, bytes], where: Where) -> Document:
        seen.append((files, where))
        return Document("title", "", (Text("x"),))

    monkeypatch.setattr(app, "dropped_document", document)
    answer = client.post(f"/api/files?{query}&cluster=h100", content=content)
    assert answer.status_code == status
    if status == 200:
        ((files, where),) = seen
        assert (b"".join(files.values()), where.cluster) == (b"abc", "h100")
        assert list(files) == (["a", "b"] if "name=b" in query else ["a"])
        assert where.nodes == (16_384 if "nodes" in query else 1)
    else:
        assert "\n" not in answer.json()["error"]


def test_what_goes_wrong_is_one_line_with_its_status(client: TestClient, monkeypatch: Patch) -> None:
    def raising(error: Exception) -> Any:
        def document(*_: Any) -> None:
            raise error

        monkeypatch.setattr(app, "preset_document", document)
        return client.post("/api/preset", json={"kind": "run", "name": "x"})

    assert raising(ForerunError("a\n b")).json() == {"error": "a b"}
    assert raising(ForerunError("a")).status_code == 400
    found = raising(MemoryError())
    assert (found.status_code, found.json()["error"][:25]) == (400, "the request needs more me")
    found = raising(KeyError("x"))
    assert (found.status_code, found.json()["error"]) == (
        500,
        "a bug of Forerun: KeyError; please report what you asked",
    )
    assert client.get("/nothing").status_code == client.get("/api/preset").status_code == 404


def test_a_request_may_be_as_large_as_its_limit(client: TestClient, monkeypatch: Patch) -> None:
    monkeypatch.setattr(app, "MOST_BYTES", 100)
    kind = {"content-type": "application/json; charset=utf-8"}
    body = b'{"kind": "run", "name": "nothing"}'
    exact = client.post("/api/preset", content=body + b" " * (100 - len(body)), headers=kind)
    assert (exact.status_code, "nothing" in exact.json()["error"]) == (400, True)
    assert client.post("/api/preset", content=body + b" " * (101 - len(body)), headers=kind).status_code == 413


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "demo", "shown", "warned"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:8123/#token=secret", False),
        ("localhost", True, "http://localhost:8123/#token=secret&demo=1", False),
        ("::1", False, "http://[::1]:8123/#token=secret", False),
        ("0.0.0.0", False, "http://0.0.0.0:8123/#token=secret", True),
    ],
)
def test_the_address_is_printed_and_opened(
    host: str, demo: bool, shown: str, warned: bool, monkeypatch: Patch, capsys: Any
) -> None:
    opened: list[Any] = []
    closed: list[bool] = []
    bound = Hand(getsockname=lambda: (host, 8123), close=lambda: closed.append(True))
    monkeypatch.setattr(server, "_bound", lambda host, port: bound)
    monkeypatch.setattr(server.secrets, "token_urlsafe", lambda n_bytes: "secret" if n_bytes == 24 else "short")
    monkeypatch.setattr(server, "application", lambda token, host: (token, host))
    timer = lambda after_s, call, words: Hand(start=lambda: opened.append(words))  # noqa: E731
    monkeypatch.setattr(server.threading, "Timer", timer)
    ran: list[Any] = []

    class Server:
        def __init__(self, config: Any) -> None:
            ran.append(config)

        def run(self, sockets: Any) -> None:
            ran.append(sockets)
            raise KeyboardInterrupt

    def config(application: Any, **options: Any) -> Hand:
        return Hand(of=(application, options), load=lambda: ran.append("loaded"))

    monkeypatch.setattr(server.uvicorn, "Config", config)
    monkeypatch.setattr(server.uvicorn, "Server", Server)
    server.serve(host, 8123, with_browser=demo, demo=demo)
    out, error = capsys.readouterr()
    assert out.splitlines()[0] == f"Forerun serves {shown}"
    assert out.splitlines()[-1] == "stopped"
    assert bool(error) == warned
    assert opened == ([[shown]] if demo else [])
    loaded, made, sockets = ran
    application, options = made.of
    assert loaded == "loaded"
    assert (application, sockets, closed) == (("secret", host), [bound], [True])
    assert (options["access_log"], options["server_header"], options["ws"]) == (False, False, "none")
    assert (options["limit_concurrency"], options["timeout_graceful_shutdown"]) == (64, 1)


def test_an_address_that_is_taken_is_one_line() -> None:
    with server._bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        words = rf"--host 127.0.0.1 --port {port}: can't be served: .*; give another port"
        with pytest.raises(ForerunError, match=words):
            server._bound("127.0.0.1", port)
    with pytest.raises(ForerunError, match="can't be served"):
        server._bound("127.0.0.1", 1 << 70)


# -- limits and models -------------------------------------------------------------------------------------------------


def test_the_server_has_limits() -> None:
    """A question is small, files have at most 256 MiB in all, and a space has at most 200,000 plans."""
    assert (app.MOST_BYTES, app.MOST_DROPPED_BYTES, exports._MOST_CSV_BYTES) == (2**20, 2**28, 2**28)
    assert (dropped.MOST_FILES, app.MOST_NODES, planner.MOST_PLANS) == (256, 16_384, 200_000)
    assert (MOST_GPUS, MOST_TOKENS, MOST_SEQUENCES, MOST_VALUES) == (131_072, 16_777_216, 1_048_576, 16)
    assert (records.LISTED, records.MOST_POINTS, dropped._RUNS, dropped._GPUS_OF_A_NODE) == (40, 20_000, 20, 8)


def test_a_config_is_of_a_family_that_forerun_reads_itself() -> None:
    llama = {**CONFIG, "model_type": "llama"}
    assert config_model(llama, "config.json", "mine").name == "mine"
    for config, says in (
        ({**llama, "model_type": "unknown"}, "needs transformers; use forerun plan"),
        ({}, "is missing"),
    ):
        with pytest.raises(ForerunError, match=rf"config\.json: model_type .*{says}"):
            config_model(config, "config.json", "mine")
    for config in ([], "text", None):
        with pytest.raises(ForerunError, match="not a JSON object"):
            config_model(config, "config.json", "mine")
