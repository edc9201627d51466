"""The demo: its data, what its terms ask, and the whole of it on a tiny model."""

from __future__ import annotations

import http.client
import json
import re
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from steelyard import RegularizerSpec, compute
from steelyard.experiment import demo, read_config
from steelyard.experiment.demo import run_demo
from steelyard.experiment.demo.claims import holds
from steelyard.experiment.demo.validator import Validator, question
from steelyard.regularizers import ExternalValidation, LogicalConsistency

FOLDER = Path(demo.__file__).parent
DATA, HELD_OUT = (
    [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]
    for name in ("data.jsonl", "held_out.jsonl")
)


POLITE = r"\b(please|kindly|could you|would you|may i|how may|grateful|like to)\b"


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


# The data.


def test_there_are_enough_pairs_of_many_kinds() -> None:
    assert len(DATA) >= 200
    topics = Counter(line["topic"] for line in DATA)
    assert len(topics) >= 10
    assert max(topics.values()) <= 0.25 * len(DATA)


def test_every_line_has_its_fields() -> None:
    for line in DATA + HELD_OUT:
        assert set(line) - {"claim"} == {"prompt", "completion", "topic", "group", "bad"}
        assert line["group"] in (0, 1)
        assert line["bad"] in (0, 1)
        assert line["prompt"] == line["prompt"].strip()
        assert line["completion"] == " " + line["completion"].strip()


def test_no_two_lines_ask_or_answer_the_same_at_length() -> None:
    prompts = [words(line["prompt"]) for line in DATA + HELD_OUT]
    assert [prompt for prompt, times in Counter(prompts).items() if times > 1] == []
    answers = [words(line["completion"]) for line in DATA + HELD_OUT]
    long = [answer for answer in answers if len(answer.split()) > 3]
    assert [answer for answer, times in Counter(long).items() if times > 1] == []


def test_bad_ones_are_spread_evenly_and_held_out_data_are_good() -> None:
    places = [index for index, line in enumerate(DATA) if line["bad"]]
    assert 0.12 <= len(places) / len(DATA) <= 0.18
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) <= 2 * min(gaps)
    assert not any(line["bad"] for line in HELD_OUT)
    assert len(HELD_OUT) >= 20


def test_groups_are_balanced_and_mean_what_they_say() -> None:
    polite = re.compile(POLITE, re.IGNORECASE)
    for line in DATA + HELD_OUT:
        asked = re.sub(r'"[^"]*"', "", line["prompt"])  # what is quoted has manners of its own
        assert bool(polite.search(asked)) == bool(line["group"]), line
    shares = [sum(line["group"] for line in part) / len(part) for part in (DATA, HELD_OUT)]
    assert all(0.4 <= share <= 0.6 for share in shares)


def test_a_claim_is_false_exactly_in_bad_answers() -> None:
    claims = [line for line in DATA + HELD_OUT if "claim" in line]
    assert len(claims) >= 50
    judge = LogicalConsistency(constraints=holds)
    data = [SimpleNamespace(record=line) for line in claims]
    penalties, metrics = judge.compute(data, [])
    assert penalties == [float(line["bad"]) for line in claims]
    assert metrics["unknown"] == 0


def test_a_claim_that_is_no_sum_is_an_error() -> None:
    with pytest.raises(ValueError, match="claim must be a sum such as '17 \\+ 25 = 42', got 'x'"):
        holds(SimpleNamespace(record={"claim": "x"}), 0)


# The validator.


def post(url: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    try:
        connection.request("POST", "/", body, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_the_validator_penalises_bad_answers_through_the_regularizer() -> None:
    lines = DATA[:12]
    data = [SimpleNamespace(record=line, loss_fn_inputs={}) for line in lines]
    logprobs = [torch.tensor([-1.0, -2.0]) for _ in data]
    with Validator(FOLDER / "data.jsonl") as validator:
        assert urlsplit(validator.url).hostname == "127.0.0.1"
        term = ExternalValidation(url=validator.url, payload=question)
        output = compute(
            data,
            logprobs,
            lambda _, lps: -torch.cat(lps).mean(),
            regularizers=[RegularizerSpec(term, 1.0, "reviewer")],
            track_grad_norms=True,
        )
        term.close()
    found = output.regularizers["reviewer"]
    assert found.value == pytest.approx(sum(line["bad"] for line in lines) / len(lines))
    assert found.value > 0
    assert found.grad_norm
    assert found.custom == {"retries": 0.0, "unanswered": 0.0}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"prompt": "x"}', b"\xff"])
def test_the_validator_refuses_what_it_cannot_read(body: bytes) -> None:
    with Validator(FOLDER / "data.jsonl") as validator:
        status, answer = post(validator.url, body)
        assert (status, answer) == (400, {"error": "send a prompt and a completion"})
        good = json.dumps({"prompt": "x", "completion": "y"}).encode()
        assert post(validator.url, good) == (200, {"penalty": 0.0})


def test_the_validator_does_not_read_without_end() -> None:
    with Validator(FOLDER / "data.jsonl") as validator:
        assert post(validator.url, b"", {"Content-Length": "99999999"})[0] == 400


def test_the_validator_stops_listening_at_the_end() -> None:
    with Validator(FOLDER / "data.jsonl") as validator:
        url = validator.url
    with pytest.raises(ConnectionRefusedError):
        post(url, b"{}")


# The config, and the whole.


def test_the_config_has_five_terms_of_five_kinds() -> None:
    config = read_config(FOLDER / "config.toml")
    assert config.model.base_model == "smollm2-135m"
    assert (config.model.rank, config.train.steps) == (16, 20)
    assert (config.train.batch_size, config.data.max_length) == (4, 64)
    assert len({term.use for term in config.regularizers}) == 5
    raw = tomllib.loads((FOLDER / "config.toml").read_text("utf-8"))
    assert raw["data"]["held_out"] == "held_out.jsonl"


class Watch:
    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        pass

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)


TINY = ["model.base_model=tiny-random", "data.max_length=256", "train.sample_tokens=4"]


def test_the_demo_runs_all_its_terms_and_ends_with_a_report(tmp_path: Path) -> None:
    watch = Watch()
    done = run_demo(tmp_path / "run", [*TINY, "train.steps=6"], watch=watch)
    assert done.outcome.status == "done"
    assert done.report == tmp_path / "run" / "report.html"
    assert done.summary[0].startswith("6 steps in ")
    html = done.report.read_text(encoding="utf-8")
    for name in ("kl", "decisive", "parity", "sums", "reviewer"):
        assert all(f"regularizers/{name}/value" in metrics for metrics in watch.steps)
        assert name in html
    verdicts = [metrics["regularizers/reviewer/value"] for metrics in watch.steps]
    assert any(verdicts)
    assert set(verdicts) <= {0, 0.25, 0.5, 0.75, 1}
    assert "skipped" not in (tmp_path / "run" / "log.txt").read_text("utf-8")


def test_a_demo_that_is_stopped_at_once_has_no_report(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "run", TINY, stop=lambda: True)
    assert done.outcome.status == "interrupted"
    assert (done.report, done.summary) == (None, [])
