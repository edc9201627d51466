"""Best and worst answers over time, and answers to held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.page.records import answers, prompt_text
from tests.experiment.folders import write_lines

from .frozen_page import document_of
from .on_policy_runs import SECRET, STEPS, OnPolicyRun, train_on_policy


def record(step: int, answer: str, reward: float | None, **changed: Any) -> dict[str, Any]:
    scores = {} if reward is None else {"short": reward}
    own = {"step": step, "line": 1, "group": 0, "prompt": "Name a fruit.", "answer": answer}
    return {**own, "reward": reward, "rewards": scores, **changed}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def collected(folder: Path, *records: Any, **settings: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps({"rollouts": settings}))
    write_lines(folder / "rollouts.jsonl", records)
    return answers(folder)


def test_the_best_and_the_worst_answer_are_to_one_prompt(folder: Path) -> None:
    found = collected(
        folder,
        record(0, "near", 0.5),
        record(0, "nearer", 0.75),
        record(0, "dropped", None),
        record(0, "bad", -1.0, group=1, prompt="And a tree?"),
        record(0, "good", 0.7, group=1, prompt="And a tree?"),
    )
    (step,) = found["extremes"]
    assert (step["step"], step["prompt"]) == (0, "And a tree?")
    assert step["best"] == {"text": "good", "reward": 0.7, "rewards": {"short": 0.7}}
    assert (step["worst"]["text"], step["worst"]["reward"]) == ("bad", -1.0)


@pytest.mark.parametrize(
    ("count", "steps"),
    [(1, [0]), (3, [0, 1, 2]), (6, [0, 1, 2, 3, 4, 5]), (101, [0, 20, 40, 60, 80, 100])],
)
def test_the_first_and_the_last_step_are_among_those_shown(
    folder: Path, count: int, steps: list[int]
) -> None:
    found = collected(folder, *(record(step, "a", float(step)) for step in range(count)))
    assert [extreme["step"] for extreme in found["extremes"]] == steps


def test_held_out_answers_are_paired_by_prompt(folder: Path) -> None:
    held_out = {"held_out": True}
    found = collected(
        folder,
        record(0, "long", 0.1, **held_out),
        record(0, "first", 0.2, line=2, prompt="Two?", **held_out),
        record(5, "between", 0.5, **held_out),
        record(9, "short", 0.9, **held_out),
        record(9, "second of its group", 0.8, **held_out),
        record(9, "new", 0.7, line=3, prompt="Three?", **held_out),
        record(9, "dropped", None, line=2, prompt="Two?", **held_out),
        evaluate="sampled",
    )
    assert found["extremes"] == []
    assert found["sampled"]
    one, three = found["held_out"]
    assert (one["prompt"], one["before"]["text"], one["after"]["text"]) == (
        "Name a fruit.",
        "long",
        "short",
    )
    assert (three["prompt"], three["before"], three["after"]["text"]) == ("Three?", None, "new")


def test_a_single_evaluation_is_no_before(folder: Path) -> None:
    (one,) = collected(folder, record(0, "only", 0.1, held_out=True))["held_out"]
    assert (one["before"], one["after"]["text"]) == (None, "only")


def test_a_chat_is_shown_with_roles_and_long_texts_are_shortened() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt_text(chat) == "system: Be brief.\nuser: Hi"
    long = prompt_text("word " * 500)
    assert len(long) < 610
    assert long.endswith("word …")


def test_damaged_records_are_left_out(folder: Path) -> None:
    damaged = [{"step": 0, "answer": "a"}, {"step": "x", "answer": "a", "rewards": {}}]
    found = collected(folder, *damaged, record(1, "kept", 0.5))
    assert [answer["answer"] for answer in found["latest"]] == ["kept"]
    assert [extreme["step"] for extreme in found["extremes"]] == [1]


def test_the_latest_answers_come_first(folder: Path) -> None:
    records = [record(step, "a", 0.5, advantage=1.0) for step in range(100)]
    found = collected(folder, *records, record(100, "b", None))
    assert len(found["latest"]) == 64
    latest = found["latest"][0]
    assert (latest["step"], latest["reward"], latest["held_out"]) == (100, None, False)
    assert found["latest"][1]["advantage"] == 1.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OnPolicyRun:
    return train_on_policy(tmp_path_factory.mktemp("on_policy"))


def test_the_report_shows_the_answers_of_a_run(run: OnPolicyRun, tmp_path: Path) -> None:
    document = document_of(write_report([run.folder], tmp_path / "report.html"))
    found = document["records"]["answers"]
    assert not found["sampled"]
    assert len(found["held_out"]) == 3
    assert [extreme["step"] for extreme in found["extremes"]] == [0, 1, 3, 4, 6, STEPS - 1]
    kept = [each for each in run.at(STEPS - 1) if each["reward"] is not None]
    last = found["extremes"][-1]
    by_group = [[e["reward"] for e in kept if e["group"] == group] for group in (0, 1)]
    widest = max(max(each) - min(each) for each in by_group if each)
    assert last["best"]["reward"] - last["worst"]["reward"] == pytest.approx(widest)
    assert set(last["best"]["rewards"]) == {"letters", "judge"}


def test_answers_are_escaped_and_secrets_redacted(
    run: OnPolicyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", SECRET)
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (folder / name).write_bytes((run.folder / name).read_bytes())
    evil = f"</script><script>alert(1)</script> {SECRET}"
    records = [record(0, evil, 1.0, prompt=evil), record(0, "b", 0.0, held_out=True)]
    content = "".join(f"{json.dumps(each)}\n" for each in records)
    (folder / "rollouts.jsonl").write_text(content, encoding="utf-8")
    html = write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert SECRET not in html
    assert "<script>alert(1)" not in html
    shown = document_of(tmp_path / "report.html")["records"]["answers"]["extremes"][0]
    assert shown["prompt"] == shown["best"]["text"] == evil.replace(SECRET, "***")
