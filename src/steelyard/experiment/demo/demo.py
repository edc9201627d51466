"""The demo: its judges, a constraint for Z3 and an HTTP service; and how it is run.

`run_demo` starts the service, trains, and writes the report.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

from steelyard.experiment.config.reading import read_config
from steelyard.experiment.page.frozen import summary, write_report
from steelyard.experiment.run.log import Watcher
from steelyard.experiment.training.loop import Outcome, train
from steelyard.output.run_files import read_json_lines

_FOLDER = Path(__file__).parent
CLAIM = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")


def holds(datum: Any, index: int) -> list[Any]:  # noqa: ARG001 - signature of `constraints`
    """Constraint that the claim of a datum is true; an empty list for a datum without a claim.

    Reads from the datum's line: `claim` (optional), as `"17 + 25 = 42"`.

    Raises:
        ValueError: the claim is not of that form.

    Example:
        >>> from types import SimpleNamespace
        >>> import z3
        >>> (claim,) = holds(SimpleNamespace(record={"claim": "6 * 9 = 42"}), 0)
        >>> z3.simplify(claim)
        False
        >>> holds(SimpleNamespace(record={}), 0)
        []
    """
    import z3  # noqa: PLC0415 - an extra

    claim = datum.record.get("claim")
    if claim is None:
        return []
    match = CLAIM.fullmatch(claim)
    if match is None:
        raise ValueError(f"claim must be a sum such as '17 + 25 = 42', got {claim!r}.")
    left, sign, right, result = match.groups()
    a, b, c = (z3.IntVal(int(number)) for number in (left, right, result))
    return [{"+": a + b, "-": a - b, "*": a * b}[sign] == c]


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


@dataclass(frozen=True)
class Demo:
    """Result of the demo.

    Attributes:
        outcome: outcome of the run.
        report: path of the report; None if the run was stopped before its first step.
        summary: sentences that summarize the report.
    """

    outcome: Outcome
    report: Path | None
    summary: list[str]


def run_demo(
    folder: str | Path,
    overrides: Iterable[str] = (),
    *,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Demo:
    """Train the demo's model while its validator is running, and write the report.

    Args:
        folder: run folder, which must be new; the report is `report.html` in it.
        overrides: `key=value`, as for `steelyard train`.
        watch: notified of each step.
        stop: called before each step; when it returns True the run saves a checkpoint and ends.

    Raises:
        ConfigError: an override is invalid.
        ModelError: the model cannot be loaded.
        RunError: the folder already contains a run.
    """
    with Validator(_FOLDER / "data.jsonl") as validator:
        address = f'regularizers.reviewer.options.url="{validator.url}"'
        config = read_config(_FOLDER / "config.toml", [address, *overrides])
        with warnings.catch_warnings():
            # A batch of 16 has 8 data of each group on average, and at times fewer.
            warnings.filterwarnings("ignore", "a batch has few data of a group")
            outcome = train(config, folder, watch=watch, stop=stop)
    if not outcome.steps:
        return Demo(outcome, None, [])
    report = write_report([outcome.folder], outcome.folder / "report.html")
    return Demo(outcome, report, summary(outcome.folder))
