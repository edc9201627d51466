"""Changes from the page: settings, pause, continue; and whom the server refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from steelyard.experiment import RunFolder
from steelyard.experiment.run.changes import describe_settings

from .conftest import Served

ORIGIN = {"origin": "http://localhost:7007"}


@pytest.fixture
def going(runs: Path) -> Iterator[Path]:
    """The trained run as if it were going on: without a result, and locked."""
    run = RunFolder(runs / "first")
    (run.path / "result.json").unlink()
    with run.locked():
        yield run.path


def post(client: TestClient, action: str, **body: Any) -> Any:
    return client.post(f"/api/{action}", json={"run": "first", **body}, headers=ORIGIN)


def test_settings_are_shown_and_changed(client: TestClient, going: Path) -> None:
    shown = client.get("/api/settings", params={"run": "first"}).json()["settings"]
    assert shown["kl.weight"] == 0.1
    assert shown["entropy.at_least"] == 2.0
    answer = post(client, "set", settings={"kl.weight": 0.3, "l2.enabled": False})
    assert answer.status_code == 200
    assert answer.json()["settings"] == describe_settings(going)
    assert describe_settings(going)["kl.weight"] == 0.3


def test_a_run_is_paused_and_continued(client: TestClient, going: Path) -> None:
    def state() -> str:
        (run,) = client.get("/api/runs").json()["runs"]
        return str(run["state"])

    assert state() == "running"
    assert post(client, "pause").status_code == 200
    assert (going / "paused").exists()
    assert state() == "paused"
    assert post(client, "continue").status_code == 200
    assert state() == "running"


def test_a_bad_value_and_a_finished_run_are_refused(client: TestClient, runs: Path) -> None:
    ended = post(client, "set", settings={"kl.weight": 1})
    assert (ended.status_code, "it is done" in ended.json()["detail"]) == (409, True)
    (runs / "first" / "result.json").unlink()
    bad = post(client, "set", settings={"kl.wait": 1})
    assert (bad.status_code, "did you mean" in bad.json()["detail"]) == (409, True)
    assert post(client, "pause").status_code == 409  # no process trains it
    assert not (runs / "first" / "requests.jsonl").exists()


@pytest.mark.parametrize(
    ("action", "body", "status"),
    [
        ("set", b"{", 400),
        ("set", b"[1]", 400),
        ("set", b'{"run": "first", "settings": 3}', 400),
        ("delete", b'{"run": "first"}', 404),
        ("set", b'{"run": "../first", "settings": {}}', 404),
        ("pause", b'{"run": "nothing"}', 404),
        ("set", b" " * 70_000, 413),
    ],
)
def test_bad_requests(client: TestClient, action: str, body: bytes, status: int) -> None:
    response = client.post(f"/api/{action}", content=body, headers=ORIGIN)
    assert response.status_code == status
    assert response.json()["detail"]


@pytest.mark.parametrize("action", ["set", "pause", "continue"])
def test_other_pages_strangers_and_reading_methods_change_nothing(
    served: Served, going: Path, action: str
) -> None:
    client = served.client()
    path, body = f"/api/{action}", {"run": "first", "settings": {"kl.weight": 9}}
    for origin in ({}, {"origin": "http://evil.example"}, {"origin": "null"}):
        assert client.post(path, json=body, headers=origin).status_code == 403
    assert served.stranger().post(path, json=body, headers=ORIGIN).status_code == 401
    assert client.get(path, headers=ORIGIN).status_code == 405
    assert not (going / "requests.jsonl").exists()
    assert not (going / "paused").exists()


def test_a_damaged_config_has_no_settings(client: TestClient, runs: Path) -> None:
    (runs / "first" / "config.json").write_text("{")
    answer = client.get("/api/settings", params={"run": "first"})
    assert answer.json() == {"settings": {}}
