"""Whether a model is on the Hugging Face Hub, for which a server on loopback stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from steelyard.engine.model_sources import check_hub_model, find_model
from steelyard.errors import ModelError


@contextmanager
def hub_that_answers(status: int, code: str | None) -> Iterator[tuple[str, list[str]]]:
    """URL of a server that gives one answer to everything, and the requests that it gets."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            requests.append(self.path)
            self.send_response(status)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


def let_hub_be_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_a_name_that_the_hub_does_not_have_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_that_answers(404, "RepoNotFound") as (url, requests):
        let_hub_be_at(url, monkeypatch)
        with pytest.raises(ModelError) as caught:
            find_model("steelyard-tests/none").tokenizer()
    assert str(caught.value) == (
        "base_model must be a folder or a model on the Hugging Face Hub, got "
        "'steelyard-tests/none', and the Hub has none of that name: correct it, or, if the model "
        "is private, log in with 'hf auth login'."
    )
    assert requests == ["/steelyard-tests/none/resolve/main/config.json"]


@pytest.mark.parametrize(
    ("status", "code"), [(200, None), (403, "GatedRepo"), (404, "EntryNotFound"), (503, None)]
)
def test_what_transformers_explains_or_repeats_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str | None
) -> None:
    with hub_that_answers(status, code) as (url, requests):
        let_hub_be_at(url, monkeypatch)
        check_hub_model("steelyard-tests/none")
    assert len(requests) == 1


def test_a_hub_that_cannot_be_reached_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hub_that_answers(200, None) as (url, _):
        pass  # nobody listens at its port any more
    let_hub_be_at(url, monkeypatch)
    rule = r"got 'a/b', which is neither a folder nor in the cache, and the Hub cannot be reached: "
    with pytest.raises(ModelError, match=rf"{rule}.*Connection refused\.$"):
        find_model("a/b").tokenizer()
    assert "Retry" not in caplog.text


def test_an_impossible_name_is_refused_without_a_request() -> None:
    with pytest.raises(ModelError, match=r"got 'a b/c': Repo id must [^\n]+$"):
        check_hub_model("a b/c")


def test_a_model_in_the_cache_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    let_hub_be_at("http://127.0.0.1:9", monkeypatch)
    repository = tmp_path / "models--steelyard-tests--kept"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    check_hub_model("steelyard-tests/kept")
