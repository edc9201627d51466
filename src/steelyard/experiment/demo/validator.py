"""A service that judges answers: the demo's validator, on this machine only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

LONGEST = 65_536


class Validator:
    """A reviewer who has read the data, and remembers which answers were bad.

    Inside its `with` it listens on 127.0.0.1, on a port of the system's choice. It takes
    `{"prompt": ..., "completion": ...}` by POST and answers `{"penalty": 1.0}` for an answer it
    has rejected, `{"penalty": 0.0}` for any other.

    Args:
        data: the JSON Lines file it has read; `bad` is 1 where an answer is rejected.

    Example:
        >>> from pathlib import Path
        >>> with Validator(Path(__file__).with_name("data.jsonl")) as validator:
        ...     validator.url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(self, data: Path) -> None:
        lines = (json.loads(line) for line in data.read_text("utf-8").splitlines())
        self._rejected = {(line["prompt"], line["completion"]) for line in lines if line["bad"]}

    @property
    def url(self) -> str:
        """Where to ask."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/"

    def judge(self, answer: Mapping[str, Any]) -> float:
        """The penalty of an answer."""
        return float((answer["prompt"], answer["completion"]) in self._rejected)

    def __enter__(self) -> Self:
        self._server = _ValidatorServer(self)
        self._thread = Thread(target=self._server.serve_forever, name="validator", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def question(datum: Any, index: int) -> dict[str, str]:  # noqa: ARG001 - how payloads are called
    """What to ask the validator of a datum: its line's `prompt` and `completion`."""
    return {key: datum.record[key] for key in ("prompt", "completion")}


class _ValidatorServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client may keep its connection open longer than the demo lasts

    def __init__(self, validator: Validator) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.validator = validator


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 30.0
    server: _ValidatorServer

    def do_POST(self) -> None:
        """Judge an answer."""
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 < length <= LONGEST:
                raise ValueError(length)  # noqa: TRY301 - one answer for all that is wrong
            penalty = self.server.validator.judge(json.loads(self.rfile.read(length)))
        except (KeyError, TypeError, ValueError):
            self.close_connection = True
            self._answer(HTTPStatus.BAD_REQUEST, {"error": "send a prompt and a completion"})
        else:
            self._answer(HTTPStatus.OK, {"penalty": penalty})

    def _answer(self, status: HTTPStatus, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""
