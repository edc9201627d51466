from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from steelyard._version import __version__

from .conftest import STEPS, Served


def test_the_list_and_a_run(client: TestClient) -> None:
    assert [run["name"] for run in client.get("/api/runs").json()["runs"]] == ["first"]
    view = client.get("/api/run", params={"run": "first", "smoothing": "0.6"}).json()
    assert view["steps"] == STEPS
    assert "smooth" in view["curves"]["loss_total"]
    log = client.get("/api/records/log", params={"run": "first"}).json()
    assert "loading tiny-random" in log["text"]


def test_an_empty_folder_has_no_runs(tmp_path: Path) -> None:
    response = Served(tmp_path).client().get("/api/runs")
    empty = {"folder": str(tmp_path), "version": __version__, "runs": [], "groups": []}
    assert response.json() == empty


@pytest.mark.parametrize("run", ["", "..", "../..", "/etc", "first/../first", "%2e%2e", "nothing"])
@pytest.mark.parametrize("path", ["/api/run", "/api/summary", "/api/compare", "/api/records/log"])
def test_an_unknown_run_is_not_found(client: TestClient, path: str, run: str) -> None:
    response = client.get(path, params={"run": run})
    assert response.status_code == 404
    assert response.json()["detail"].startswith("run must be one of the list")


@pytest.mark.parametrize("smoothing", ["1", "-0.1", "nan", "x", "inf"])
def test_smoothing_must_be_a_factor(client: TestClient, smoothing: str) -> None:
    response = client.get("/api/run", params={"run": "first", "smoothing": smoothing})
    assert response.status_code == 400
    assert "smoothing must be a number from 0 to below 1" in response.json()["detail"]


def test_unknown_records_are_not_found(client: TestClient) -> None:
    response = client.get("/api/records/checkpoints", params={"run": "first"})
    assert response.status_code == 404


@pytest.mark.parametrize(
    "query",
    [
        "run=first",
        "run=first&position=x",
        "position=0-0-a",
        # No file is that long: going there overflowed.
        f"run=first&position={2**63 - 1}-0-a",
        f"run=first&position={2**63 - 1}-{2**63 - 1}-a",
        f"run=first&position={'9' * 5000}-0-a",
        f"run=first&position={2**61}-{2**61}-a",
        "run=first&position=-1--1-a",
    ],
)
def test_a_followed_run_must_have_a_position(client: TestClient, query: str) -> None:
    assert client.get(f"/api/events?{query}").status_code == 400


@pytest.mark.parametrize(
    "path", ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "vendor/../../app.py"]
)
def test_files_outside_static_are_not_served(client: TestClient, path: str) -> None:
    assert client.get(f"/static/{path}").status_code == 404


def test_the_summary_is_the_run_without_its_curves(client: TestClient) -> None:
    run = client.get("/api/run", params={"run": "first"}).json()
    summary = client.get("/api/summary", params={"run": "first"}).json()
    assert {key: run[key] for key in summary} == summary
    assert {"curves", "charts", "cosines", "position"} & summary.keys() == set()


def test_runs_are_compared(client: TestClient) -> None:
    document = client.get("/api/compare", params={"run": "first", "smoothing": "0.5"}).json()
    assert [run["name"] for run in document["runs"]] == ["first"]
    assert "smooth" in document["views"]["first"]["curves"]["loss_total"]
    for query, status in ((({}), 404), ({"group": "first"}, 404), ({"group": "../.."}, 404)):
        assert client.get("/api/compare", params=query).status_code == status
