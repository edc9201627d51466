from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.experiment import RunFolder
from steelyard.experiment.page.records import RECORDS, config, drivers, log, samples


def test_texts_of_a_run(trained: Path) -> None:
    run = RunFolder(trained / "first")
    answers = {sample["when"]: sample["completion"] for sample in run.samples()}
    prompts = [{"prompt": "One", "answers": answers}]
    assert samples(run.path) == {"headings": list(answers), "prompts": prompts, "whole": True}
    shown = drivers(run.path)["steps"]
    assert [step["step"] for step in shown] == sorted({r["step"] for r in run.drivers()})
    terms = [term["name"] for term in shown[-1]["terms"]]
    assert set(terms) == {r["term"] for r in run.drivers() if r["step"] == shown[-1]["step"]}
    assert "the knowledge base is down" in log(run.path)["text"]
    assert json.loads(config(run.path)["text"])["train"]["steps"] == run.config().train.steps


@pytest.mark.parametrize("kind", RECORDS)
def test_a_run_that_has_just_begun_has_none(tmp_path: Path, kind: str) -> None:
    found = RECORDS[kind](tmp_path)
    lists = [value for value in found.values() if isinstance(value, list)]
    assert all(value == [] for value in lists)
    assert found.get("text", "") in ("", "{}")


def test_a_long_log_has_its_end(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("".join(f"line {n} €\n" for n in range(20_000)))
    found = log(tmp_path)
    assert found["text"].startswith("line ")
    assert found["text"].endswith("line 19999 €\n")
    assert not found["whole"]


@pytest.mark.parametrize("kind", RECORDS)
def test_no_text_of_a_file_that_is_a_link(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"step": 0, "text": "outside", "data": []}\n')
    run = tmp_path / "run"
    run.mkdir()
    for name in ("samples.jsonl", "rollouts.jsonl", "drivers.jsonl", "log.txt", "config.json"):
        (run / name).symlink_to(secret)
    assert "outside" not in json.dumps(RECORDS[kind](run))


@pytest.mark.parametrize("kind", ["samples", "answers", "drivers", "log"])
def test_secrets_are_redacted(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "tml-abcdefgh"
    monkeypatch.setenv("TINKER_API_KEY", secret)
    pieces = [["tml-", 0.5], ["abcdefgh", 0.5]]
    record = {"step": 0, "answer": secret, "rewards": {}, "prompt": secret, "completion": secret,
              "term": "kl", "data": [{"tokens": pieces}]}  # fmt: skip
    name = {"log": "log.txt", "answers": "rollouts.jsonl"}.get(kind, f"{kind}.jsonl")
    (tmp_path / name).write_text(f"{json.dumps(record)}\n")
    shown = json.dumps(RECORDS[kind](tmp_path))
    assert "***" in shown
    assert secret not in shown
