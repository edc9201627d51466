"""A validator over HTTP: answers that a service rejects become less likely.

The service runs on loopback; any service that answers a POST with `{"penalty": number}` works. The
requests are sent concurrently. If the service is slow or broken, the term is skipped for that
step. Needs `steelyard[http]`, takes seconds.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.regularizers import ExternalValidation

ANSWERS = ["Paris", "Rome", "Paris, of course", "I would rather not say"]


class Validator(BaseHTTPRequestHandler):
    """Handler that penalises answers without the word Paris."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"penalty": 0.0 if "Paris" in asked["text"] else 1.0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def none(data: Any, logprobs: list[Tensor]) -> Tensor:
    """Base loss of 0, so that only the term is trained."""
    return 0 * torch.cat(logprobs).sum()


def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Validator) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        train(f"http://127.0.0.1:{server.server_port}/check")
        server.shutdown()


def train(url: str) -> None:
    judge = ExternalValidation(url=url, payload=lambda datum, _index: {"text": datum["text"]})
    spec = RegularizerSpec(judge, weight=1.0, name="judge", timeout=10, on_error="skip")
    data = [{"text": text} for text in ANSWERS]
    scores = torch.zeros(len(ANSWERS))  # the model: one logit for each of four answers
    with Pipeline(none, [spec]) as pipeline:
        for step in range(31):
            logprobs = scores.log_softmax(0)
            output = pipeline.compute(data, [row.reshape(1) for row in logprobs], step)
            if step % 10 == 0:
                penalty = output.regularizers["judge"].value
                chances = ", ".join(f"{p:.2f}" for p in logprobs.exp().tolist())
                print(f"step {step:2d}  mean penalty {penalty:.2f}  chances {chances}")
            gradient = torch.cat(output.gradients)
            scores -= gradient - logprobs.exp() * gradient.sum()  # backward through log_softmax


if __name__ == "__main__":
    main()
