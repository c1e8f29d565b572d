"""The application: addresses of the page and of its API. Every answer is JSON, lines of JSON, or a file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forerun.common.admission import admit, decoded, parse_json
from forerun.common.errors import ForerunError
from forerun.common.shipped import shipped_text
from forerun.interfaces.serve.dropped import Where, dropped_document, preset_document
from forerun.interfaces.serve.exports import Download, launch_archive, plan_file, plans_table
from forerun.interfaces.serve.guard import App, Guard
from forerun.interfaces.serve.options import options_record
from forerun.interfaces.serve.planner import Planner
from forerun.interfaces.serve.question import (
    AboutExport,
    AboutPlan,
    AboutPreset,
    AboutRows,
    DroppedModel,
    Question,
    checked,
)
from forerun.interfaces.serve.records import document_record
from forerun.interfaces.serve.worker import Job, bug_line

MOST_BYTES = 1 << 20
"""of a request"""
MOST_DROPPED_BYTES = 1 << 28
"""of the files that are dropped at once"""
_WEB, _REPORT = "forerun.interfaces.serve.web", "forerun.interfaces.report"
_MODULES = ("main", "api", "form", "answer", "chosen", "scatter", "figures", "parts", "files", "format", "uplot")
MOST_NODES = 16_384
"""of the cluster of a trace of jobs"""
STATIC = {
    "": (_WEB, "index.html", "text/html"),
    **{name: (_WEB, name, "text/css") for name in ("style.css", "uplot.css")},
    **{f"{name}.js": (_WEB, f"{name}.js", "text/javascript") for name in _MODULES},
    "chart.js": (_REPORT, "chart.js", "text/javascript"),
}
"""path -> package and file of the page, and its media type; figures are drawn as on the pages of reports"""


class TooLarge(ForerunError):
    """A request with too many bytes."""


def application(token: str, host: str = "127.0.0.1") -> App:
    """Returns the ASGI application. `token` opens the API; `host` is the address that the server is bound to."""
    planner = Planner()
    calls: dict[str, Callable[[Planner, Any], Any]] = {
        "plan": lambda own, data: own.plan(checked(AboutPlan, data)),
        "details": lambda own, data: own.details(checked(AboutPlan, data)),
        "neighbours": lambda own, data: {"neighbours": own.neighbours(checked(AboutPlan, data))},
        "rows": lambda own, data: own.rows(checked(AboutRows, data)),
        "command": lambda own, data: {"command": own.command(checked(Question, data))},
        "model": _drop_model,
        "preset": lambda own, data: document_record(_preset(checked(AboutPreset, data))),
    }
    routes = [Route(f"/{path}", partial(_static, path)) for path in STATIC]
    routes += [Route(f"/api/{name}", partial(_call, planner, call), methods=["POST"]) for name, call in calls.items()]
    routes += [
        Route("/api/options", partial(_call, planner, lambda own, data: options_record()), methods=["POST"]),
        Route("/api/ask", partial(_stream, planner.ask), methods=["POST"]),
        Route("/api/scale", partial(_stream, planner.scale), methods=["POST"]),
        Route("/api/export", partial(_export, planner), methods=["POST"]),
        Route("/api/files", _files, methods=["POST"]),
    ]
    handlers: Any = {404: _not_found, 405: _not_found}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), token, host)


# -- the page ----------------------------------------------------------------------------------------------------------


async def _static(path: str, request: Request) -> Response:
    package, name, kind = STATIC[path]
    return Response(_text(package, name), media_type=kind)


@cache
def _text(package: str, name: str) -> str:
    return shipped_text(package, name)


async def _not_found(request: Request, error: Exception) -> Response:
    return _refused("there is no such address", 404)


# -- the API -----------------------------------------------------------------------------------------------------------


async def _call(planner: Planner, call: Callable[[Planner, Any], Any], request: Request) -> Response:
    """Answers a request with one JSON object."""

    async def answer() -> Response:
        data = await _data(request)
        return Response(await run_in_threadpool(lambda: _json(call(planner, data))), media_type="application/json")

    return await _safely(answer)


async def _stream(start: Callable[[Question, str], Job], request: Request) -> Response:
    """Answers a request with lines of JSON, each as soon as it is known; the header names the page that asks."""

    async def answer() -> Response:
        question = checked(Question, await _data(request))
        job = await run_in_threadpool(start, question, request.headers.get("x-forerun-page", "")[:64])
        return StreamingResponse(_lines(job), media_type="application/x-ndjson")

    return await _safely(answer)


async def _lines(job: Job) -> AsyncIterator[str]:
    try:
        while (event := await run_in_threadpool(job.next)) is not None:
            yield _json(event) + "\n"
    finally:
        job.cancel()


async def _export(planner: Planner, request: Request) -> Response:
    async def answer() -> Response:
        about = checked(AboutExport, await _data(request))
        made = await run_in_threadpool(_download, planner, about)
        headers = {"content-disposition": f'attachment; filename="{made.name}"'}
        return Response(made.content, media_type=made.kind, headers=headers)

    return await _safely(answer)


def _download(planner: Planner, about: AboutExport) -> Download:
    if about.kind == "csv":
        return plans_table(planner.kept(about.about.question).result)
    made, plan, _ = planner.found(about.about)
    if about.kind == "yaml":
        return plan_file(plan, made.command())
    if about.tool is None:
        raise ForerunError("tool: give the tool that is to run the plan")
    return launch_archive(plan, made.model, made.where, about.tool)


async def _files(request: Request) -> Response:
    """Answers with the page of dropped files: their names and sizes are in the query, their bytes in the body."""

    async def answer() -> Response:
        names, sizes = request.query_params.getlist("name"), request.query_params.getlist("size")
        content = await _body(request, MOST_DROPPED_BYTES)
        if len(names) != len(sizes) or not all(size.isdecimal() and len(size) < 12 for size in sizes):
            raise ForerunError("each file needs a name and a size in bytes")
        if len(set(names)) < len(names) or sum(map(int, sizes)) != len(content):
            raise ForerunError("the names of the files are not different, or their sizes are not those of the body")
        files, start = {}, 0
        for name, size in zip(names, map(int, sizes), strict=True):
            files[name] = content[start : start + size]
            start += size
        nodes = request.query_params.get("nodes", "1")
        if not (nodes.isdecimal() and 0 < int(nodes[:9]) <= MOST_NODES):
            raise ForerunError(f"nodes: expected a number from 1 to {MOST_NODES:,}")
        where = Where(request.query_params.get("cluster", ""), int(nodes))
        return Response(
            await run_in_threadpool(lambda: _json(document_record(dropped_document(files, where)))),
            media_type="application/json",
        )

    return await _safely(answer)


def _drop_model(planner: Planner, data: Any) -> dict[str, str]:
    given = checked(DroppedModel, data)
    return {"model": planner.drop_model(given.name, parse_json(given.text, given.name))}


def _preset(about: AboutPreset) -> Any:
    return preset_document(about.kind, about.name)


async def _safely(answer: Callable[[], Awaitable[Response]]) -> Response:
    """Returns the answer, or the error in one line. It never returns a traceback."""
    try:
        return await answer()
    except TooLarge as error:
        return _refused(str(error), 413)
    except ForerunError as error:
        return _refused(" ".join(str(error).split()), 400)
    except MemoryError:
        return _refused(
            "the request needs more memory than this machine has; reduce the number of plans, ranks or runs", 400
        )
    except ClientDisconnect:
        return _refused("the page has gone", 400)
    except Exception as error:
        return _refused(bug_line(error), 500)


def _refused(message: str, status: int) -> Response:
    return JSONResponse({"error": message}, status)


async def _data(request: Request) -> Any:
    """Returns the JSON of a request. Raises ForerunError."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ForerunError("the request: expected JSON (content-type: application/json)")
    data = parse_json(decoded(await _body(request, MOST_BYTES), "the request"), "the request")
    admit(data, "the request")
    return data


async def _body(request: Request, most_bytes: int) -> bytes:
    """Returns the bytes of a request. Raises TooLarge for more than `most_bytes`."""
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated) > most_bytes:
        raise TooLarge(f"the request has {int(stated):,} bytes; at most {most_bytes:,} are read")
    parts, n_bytes = [], 0
    async for part in request.stream():
        n_bytes += len(part)
        if n_bytes > most_bytes:
            raise TooLarge(f"the request has more than {most_bytes:,} bytes; at most so many are read")
        parts.append(part)
    return b"".join(parts)


def _json(record: Any) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":"))
