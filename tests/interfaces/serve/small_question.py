"""A small question, and how its answer is read."""

from __future__ import annotations

import json
from typing import Any

from starlette.testclient import TestClient

TOKEN = "a token"
BASE = "http://127.0.0.1:8765"
QUESTION: dict[str, Any] = {
    "model": "gpt2-small",
    "cluster": "h100-sxm",
    "gpus": 8,
    "seq_len": 1024,
    "global_batch": 64,
    "fixed": {"stack": "torchtitan", "pp": "1,2"},
}


def events(client: TestClient, call: str, question: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines that a stream answers."""
    with client.stream("POST", f"/api/{call}", json=question) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line) for line in answer.iter_lines()]
