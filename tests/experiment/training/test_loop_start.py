"""Checks before the model is loaded: sinks, services and data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import DataError, MissingExtraError, RunError, SteelyardError, TermError
from steelyard.experiment import Config, read_config, train
from steelyard.experiment.training.loop import check_start
from steelyard.experiment.training.terms import build_terms
from tests.engine.server.wire_client import start
from tests.experiment.small_runs import L2, Recorder, lines, small_config, write_data
from tests.regularizers.http_server import Server

DEAD = "http://127.0.0.1:9/judge"  # the discard port, where nothing listens
JUDGE: dict[str, Any] = {"use": "external_validation", "name": "judge", "weight": 0.1}


def with_term(folder: Path, term: dict[str, Any], *overrides: str) -> Config:
    return small_config(folder, *overrides, regularizers=[term])


def check(config: Config) -> None:
    check_start(config, build_terms(config))


def test_a_service_that_is_not_there_is_an_error(folder: Path) -> None:
    term = {**JUDGE, "options": {"url": DEAD}}
    with pytest.raises(
        TermError, match=r"listen for regularizer 'external_validation' at .*:9/judge"
    ):
        check(with_term(folder, term))
    check(with_term(folder, {**term, "on_error": "skip"}))
    check(with_term(folder, {**term, "options": {"url": DEAD, "unanswered": 0.0}}))


def test_a_service_that_answers_is_there_whatever_it_says(folder: Path) -> None:
    with Server() as server:
        check(with_term(folder, {**JUDGE, "options": {"url": server.url("check")}}))
        server.wait_for_visitors(1)  # a server that stops while it accepts one leaves a socket open
        assert not server.methods


def test_a_service_of_a_wrapped_term_is_checked(folder: Path) -> None:
    options: dict[str, Any] = {"regularizer": {"fn": "external_validation"}, "target": 0.1}
    options["regularizer"]["options"] = {"url": DEAD}
    with pytest.raises(TermError, match="listen for regularizer 'external_validation'"):
        check(with_term(folder, {"use": "adaptive", "weight": 0.1, "options": options}))


def on_policy(folder: Path, reward: dict[str, Any], *terms: dict[str, Any], **line: Any) -> Config:
    write_data(folder / "prompts.jsonl", [{"prompt": "a", **line}, {"prompt": "b", **line}])
    raw = {
        "model": {"base_model": "tiny-random"},
        "rollouts": {"prompts": "prompts.jsonl"},
        "rewards": [{"weight": 1.0, **reward}],
        "regularizers": list(terms),
    }
    return read_config(raw, folder=folder)


def test_a_reward_over_http_that_is_not_there_is_an_error(folder: Path) -> None:
    config = on_policy(folder, {"use": "http_validation", "options": {"url": DEAD}})
    with pytest.raises(TermError, match=r"listen for reward 'http_validation' at .*:9/judge"):
        check(config)


def test_a_reward_model_that_is_not_there_is_an_error(folder: Path) -> None:
    config = on_policy(folder, {"use": "reward_model", "options": {"model": str(folder)}})
    with pytest.raises(TermError, match="reward 'reward_model' must be loaded before"):
        check(config)


def test_the_prompts_must_have_what_rewards_read(folder: Path) -> None:
    check(on_policy(folder, {"use": "exact_match"}, answer="4"))
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: must have the field 'answer' for rew"):
        check(on_policy(folder, {"use": "exact_match"}))


@pytest.mark.parametrize("key", ["right", "wrong"])
def test_a_tinker_service_must_answer_and_accept_the_key(
    folder: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", f"tml-{key}")
    with start(folder / "served", api_key="tml-right") as running:
        service = ("model.backend=tinker", f"model.base_url={running.base_url}")
        config = with_term(folder, L2, *service)
        if key == "right":
            check(config)
        else:
            with pytest.raises(RunError, match=r"must accept the connection, and .*401"):
                check(config)
    with pytest.raises(RunError, match=r"a Tinker service must answer at .*, and none does: "):
        check(config)


def test_a_sink_that_is_not_installed_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtraError, match="the trackio sink needs trackio"):
        check(with_term(folder, L2, "sinks.trackio={}"))


def test_prompts_of_rollouts_are_checked(folder: Path) -> None:
    config = on_policy(folder, {"use": "valid_json"})
    write_data(folder / "prompts.jsonl", [{"prompt": "a"}, {"question": "b"}])
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: must have the keys of"):
        check(config)


@pytest.mark.parametrize("fault", ["line", "field", "service"])
def test_a_start_that_fails_loads_no_model_and_makes_no_folder(folder: Path, fault: str) -> None:
    terms = {
        "line": L2,
        "field": {"use": "demographic_parity", "weight": 0.1, "options": {"group": "side"}},
        "service": {**JUDGE, "options": {"url": DEAD}},
    }
    config, recorder = with_term(folder, terms[fault]), Recorder()
    if fault == "line":
        (folder / "train.jsonl").write_text("{\n")
    with pytest.raises(SteelyardError):
        train(config, folder / "r", watch=recorder)
    assert recorder.messages == []
    assert not (folder / "r").exists()


def fail(*_: object) -> float:
    raise RuntimeError("not yet")


def test_a_start_after_one_that_failed_needs_no_other_folder(folder: Path) -> None:
    term = {"use": f"{__name__}:fail", "name": "own", "weight": 0.1}
    with pytest.raises(TermError, match="not yet") as caught:
        train(with_term(folder, term), folder / "r")
    line, log = fail.__code__.co_firstlineno + 1, folder / "r" / "log.txt"
    assert caught.value.__notes__ == [
        f'  File "{__file__}", line {line}, in fail\n    raise RuntimeError("not yet")',
        f"The whole traceback is in {log}.",
    ]
    assert "Traceback (most recent call last)" in log.read_text()
    config = with_term(folder, L2)
    write_data(folder / "train.jsonl", lines(9))
    assert train(config, folder / "r").status == "done"
