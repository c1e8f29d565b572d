"""A server in this process, and its answer to a small question."""

from __future__ import annotations

from typing import Any

import pytest
from small_question import BASE, QUESTION, TOKEN, events
from starlette.testclient import TestClient

from forerun.interfaces.serve.app import application


@pytest.fixture(scope="package")
def client() -> TestClient:
    return TestClient(application(TOKEN), base_url=BASE, headers={"authorization": f"Bearer {TOKEN}"})


@pytest.fixture(scope="package")
def answered(client: TestClient) -> list[dict[str, Any]]:
    return events(client, "ask", QUESTION)
