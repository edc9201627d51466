"""Validator of the demo: an HTTP service on the loopback interface that judges answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

from steelyard.experiment.run_dir import read_json_lines

MAX_BODY_BYTES = 65_536


class Validator:
    """HTTP service that penalizes the answers marked as bad in a data file.

    Inside its `with` block it listens on 127.0.0.1, on a free port. It takes
    `{"prompt": ..., "completion": ...}` by POST and responds with `{"penalty": 1.0}` for an answer
    that the file marks as bad, and with `{"penalty": 0.0}` for any other.

    Args:
        data: a JSON Lines file with `prompt`, `completion` and `bad` (1 for a bad answer).

    Example:
        >>> from pathlib import Path
        >>> with Validator(Path(__file__).with_name("data.jsonl")) as validator:
        ...     validator.url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(self, data: Path) -> None:
        lines = read_json_lines(data)
        self._rejected = {(line["prompt"], line["completion"]) for line in lines if line["bad"]}

    @property
    def url(self) -> str:
        """Address of the service."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/"

    def judge(self, answer: Mapping[str, Any]) -> float:
        """Penalty of an answer: 1.0 if it is bad, else 0.0."""
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


def question(datum: Any, index: int) -> dict[str, str]:  # noqa: ARG001 - signature of `payload`
    """Request body for a datum: `prompt` and `completion` of its line."""
    return {key: datum.record[key] for key in ("prompt", "completion")}


class _ValidatorServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # clients may keep connections open after the demo

    def __init__(self, validator: Validator) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.validator = validator


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 30.0
    server: _ValidatorServer

    def do_POST(self) -> None:
        """Respond with the penalty of the answer in the body."""
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 < length <= MAX_BODY_BYTES:
                raise ValueError(length)  # noqa: TRY301 - one response for every invalid request
            penalty = self.server.validator.judge(json.loads(self.rfile.read(length)))
        except (KeyError, TypeError, ValueError):
            self.close_connection = True
            self._respond(HTTPStatus.BAD_REQUEST, {"error": "send a prompt and a completion"})
        else:
            self._respond(HTTPStatus.OK, {"penalty": penalty})

    def _respond(self, status: HTTPStatus, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Suppress the log on stderr."""
