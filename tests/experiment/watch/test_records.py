from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.experiment import RunFolder
from steelyard.experiment.watch.records import RECORDS, config, drivers, log, rollouts, samples


def test_texts_of_a_run(trained: Path) -> None:
    run = RunFolder(trained / "first")
    assert samples(run.path) == {"records": run.samples(), "whole": True}
    shown = drivers(run.path)["records"]
    last = max(record["step"] for record in run.drivers())
    expected = [record for record in run.drivers() if record["step"] == last]
    assert json.loads(json.dumps(shown)) == expected
    assert "the knowledge base is down" in log(run.path)["text"]
    assert json.loads(config(run.path)["text"])["train"]["steps"] == run.config().train.steps


@pytest.mark.parametrize("kind", RECORDS)
def test_a_run_that_has_just_begun_has_none(tmp_path: Path, kind: str) -> None:
    found = RECORDS[kind](tmp_path)
    assert found.get("records", []) == []
    assert found.get("text", "") in ("", "{}")


def test_the_last_rollouts_come_first(tmp_path: Path) -> None:
    with (tmp_path / "rollouts.jsonl").open("w") as file:
        file.writelines(f'{{"step": {step}, "reward": NaN}}\n' for step in range(100))
    found = rollouts(tmp_path)
    assert found["records"][0] == {"step": 99, "reward": None}
    assert len(found["records"]) == 64
    assert not found["whole"]


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


@pytest.mark.parametrize("kind", ["samples", "rollouts", "drivers", "log"])
def test_secrets_are_redacted(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-abcdefgh")
    pieces = [["tml-", 0.5], ["abcdefgh", 0.5]]
    record = {"step": 0, "answer": "tml-abcdefgh", "data": [{"tokens": pieces}]}
    suffix = "txt" if kind == "log" else "jsonl"
    (tmp_path / f"{kind}.{suffix}").write_text(f"{json.dumps(record)}\n")
    shown = json.dumps(RECORDS[kind](tmp_path))
    assert "***" in shown
    assert "tml-abcdefgh" not in shown


@pytest.mark.parametrize("data", [None, 3, [3], [{}], [{"tokens": [["a"], 3, ["a", "b"]]}]])
def test_damaged_drivers_are_left_out(tmp_path: Path, data: object) -> None:
    line = {"step": 0, "term": "kl", "data": data}
    (tmp_path / "drivers.jsonl").write_text(f'{{"step": "x"}}\n{json.dumps(line)}\n')
    (found,) = drivers(tmp_path)["records"]
    assert all(isinstance(datum["tokens"], list) for datum in found["data"])
