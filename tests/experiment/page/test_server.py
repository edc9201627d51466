"""The page over real sockets."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest

from steelyard.errors import InputError, RunError
from steelyard.experiment.page.server import serve_page


def test_the_url_opens_the_page_and_a_run(runs: Path) -> None:
    with serve_page(runs) as page, httpx.Client(follow_redirects=True) as client:
        url = page.url("first one")
        assert url.startswith(f"{page.base_url}/?token=")
        assert url.endswith("#run=first%20one")
        response = client.get(url)
        assert response.status_code == 200
        assert str(response.url).partition("#")[0] == f"{page.base_url}/"
        assert client.get(f"{page.base_url}/api/runs").json()["folder"] == str(page.folder)
        assert page.is_local
        assert page.tunnel.startswith(f"ssh -L {httpx.URL(page.base_url).port}:localhost:")


def test_a_url_for_one_use(runs: Path) -> None:
    with serve_page(runs) as page:
        url = page.url(once=True)
        assert [httpx.get(url).status_code, httpx.get(url).status_code] == [303, 401]


def test_a_stream_gets_rows_and_ends_when_the_server_stops(runs: Path) -> None:
    client = httpx.Client(timeout=60, follow_redirects=True)
    before = set(threading.enumerate())
    ended = threading.Event()
    kinds = []

    def read(url: str) -> None:
        with client.stream("GET", url) as stream:
            for line in stream.iter_lines():
                kinds.append(line)
                if line == "event: rows":
                    got_rows.set()
        ended.set()

    got_rows = threading.Event()
    with serve_page(runs) as page:
        client.get(page.url())
        view = client.get(f"{page.base_url}/api/run?run=first").json()
        url = f"{page.base_url}/api/events?run=first&position={view['position']}"
        reader = threading.Thread(target=read, args=(url,))
        reader.start()
        with (runs / "first" / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps({'step': 99, 'loss_total': 1.0})}\n")
        assert got_rows.wait(60)
        assert not ended.is_set()
    reader.join(60)
    assert ended.is_set()
    assert "event: runs" in kinds
    client.close()
    begun = set(threading.enumerate()) - before
    assert "steelyard-page" not in {thread.name for thread in begun}


def test_a_port_in_use(runs: Path) -> None:
    with serve_page(runs) as page:
        port = httpx.URL(page.base_url).port
        assert port is not None
        with (
            pytest.raises(InputError, match=f"127.0.0.1:{port} is not"),
            serve_page(runs, port=port),
        ):
            pytest.fail("it serves")


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="must be a folder of runs"), serve_page(tmp_path / "no"):
        pytest.fail("it serves")


def test_a_page_for_other_machines_says_so(runs: Path) -> None:
    with serve_page(runs, host="0.0.0.0") as page:
        assert not page.is_local
