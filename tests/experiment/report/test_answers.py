"""Best and worst answers over time, and answers to held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import RunError
from steelyard.experiment.report import write_report
from steelyard.experiment.report.answers import Answers, collect_answers, prompt_text
from steelyard.experiment.report.load import LoadedRun

from .on_policy_runs import SECRET, STEPS, OnPolicyRun, train_on_policy
from .parsed_page import text_of


def record(step: int, answer: str, reward: float | None, **changed: Any) -> dict[str, Any]:
    scores = {} if reward is None else {"short": reward}
    own = {"step": step, "line": 1, "group": 0, "prompt": "Name a fruit.", "answer": answer}
    return {**own, "reward": reward, "rewards": scores, **changed}


def collected(*records: dict[str, Any], **settings: Any) -> Answers:
    config = {"rollouts": settings}
    return collect_answers(LoadedRun("run", Path(), config, [{"step": 0}], rollouts=records))


def test_the_best_and_the_worst_answer_are_to_one_prompt() -> None:
    found = collected(
        record(0, "near", 0.5),
        record(0, "nearer", 0.75),
        record(0, "dropped", None),
        record(0, "bad", -1.0, group=1, prompt="And a tree?"),
        record(0, "good", 0.7, group=1, prompt="And a tree?"),
    )
    (step,) = found.extremes
    assert (step.step, step.prompt) == (0, "And a tree?")
    assert (step.best.text, step.best.reward, step.best.rewards) == ("good", 0.7, {"short": 0.7})
    assert (step.worst.text, step.worst.reward) == ("bad", -1.0)


@pytest.mark.parametrize(
    ("count", "steps"),
    [(1, [0]), (3, [0, 1, 2]), (6, [0, 1, 2, 3, 4, 5]), (101, [0, 20, 40, 60, 80, 100])],
)
def test_the_first_and_the_last_step_are_among_those_shown(count: int, steps: list[int]) -> None:
    found = collected(*(record(step, "a", float(step)) for step in range(count)))
    assert [each.step for each in found.extremes] == steps


def test_held_out_answers_are_paired_by_prompt() -> None:
    held_out = {"held_out": True}
    found = collected(
        record(0, "long", 0.1, **held_out),
        record(0, "first", 0.2, line=2, prompt="Two?", **held_out),
        record(5, "between", 0.5, **held_out),
        record(9, "short", 0.9, **held_out),
        record(9, "second of its group", 0.8, **held_out),
        record(9, "new", 0.7, line=3, prompt="Three?", **held_out),
        record(9, "dropped", None, line=2, prompt="Two?", **held_out),
        evaluate="sampled",
    )
    assert found.extremes == []
    assert found.sampled
    one, three = found.held_out
    assert one.before is not None
    assert (one.prompt, one.before.text, one.after.text) == ("Name a fruit.", "long", "short")
    assert (three.prompt, three.before, three.after.text) == ("Three?", None, "new")


def test_a_single_evaluation_is_no_before() -> None:
    (one,) = collected(record(0, "only", 0.1, held_out=True)).held_out
    assert (one.before, one.after.text) == (None, "only")


def test_a_chat_is_shown_with_roles_and_long_texts_are_shortened() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt_text(chat) == "system: Be brief.\nuser: Hi"
    long = prompt_text("word " * 500)
    assert len(long) < 610
    assert long.endswith("word …")


def test_a_damaged_record_is_an_error_that_names_the_file() -> None:
    with pytest.raises(RunError, match=r"rollouts\.jsonl must hold records .* KeyError: 'reward'"):
        collected({"step": 0, "answer": "a"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OnPolicyRun:
    return train_on_policy(tmp_path_factory.mktemp("on_policy"))


def test_the_report_shows_the_answers_of_a_run(run: OnPolicyRun, tmp_path: Path) -> None:
    text = text_of(write_report([run.folder], tmp_path / "report.html"))
    assert "Best and worst answers over time" in text
    assert "Answers to held-out prompts, before and after" in text
    assert "The most likely answer to prompts that are not trained on" in text
    answers = collect_answers(run.loaded)
    assert [each.step for each in answers.extremes] == [0, 1, 3, 4, 6, STEPS - 1]
    kept = [each for each in run.at(STEPS - 1) if each["reward"] is not None]
    last = answers.extremes[-1]
    by_group = [[e["reward"] for e in kept if e["group"] == group] for group in (0, 1)]
    widest = max(max(each) - min(each) for each in by_group if each)
    assert last.best.reward - last.worst.reward == pytest.approx(widest)
    assert set(last.best.rewards) == {"letters", "judge"}


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
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt; ***") == 3, "prompt, best and worst"
