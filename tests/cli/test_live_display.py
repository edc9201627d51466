"""The live display: its table, and a real run on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group
from rich.table import Table

from steelyard.cli.display import LiveDisplay, step_table, step_tables
from steelyard.cli.doctor import COLORS
from steelyard.doctor.finding import SEVERITIES, Finding, Severity

from .command import Spawn
from .example_metrics import metrics, on_policy, skipping
from .project import metrics_of


def shown_table(line: dict[str, Any]) -> str:
    """Table of a step as a terminal shows it."""
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(step_table(line))
    return captured.get()


def finding(rule: str, subject: str, severity: Severity = "warning") -> Finding:
    return Finding(rule, subject, severity, f"{subject} is off", "5 of 6", "", "do less", 2)


def test_the_table_marks_what_lasts_the_worst_first() -> None:
    of_term = [finding("small share", "regularizers/t/1", "information")]
    of_term.append(finding("bound broken", "regularizers/t/1", "problem"))
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        of_reward = finding("reward fails", "rewards/judge/1")
        of_run = finding("overfits", "held_out")
        console.print(Group(*step_tables(on_policy(), console, [*of_term, of_reward, of_run])))
    lines = [line for line in captured.get().splitlines() if "t/1" in line or "judge/1" in line]
    assert "bound broken, small share" in lines[0]
    assert "reward fails" in lines[1]
    assert captured.get().splitlines()[-1].strip() == "overfits: 5 of 6"
    assert "small share" not in shown_table(metrics())


def test_every_column_has_a_heading() -> None:
    console = Console(width=160, color_system=None)
    marked = [finding("bound broken", "regularizers/t/1"), finding("fails", "rewards/short")]
    for findings, count in ([], 0), (marked, 2):
        tables = step_tables(on_policy(), console, findings)[:2]
        headings = [str(c.header) for t in tables if isinstance(t, Table) for c in t.columns]
        assert len(headings) >= 13
        assert all(headings)
        assert headings.count("finding") == count
    assert [str(column.header) for column in step_table(skipping(None)).columns][-1] == "finding"


def test_findings_are_printed_once_and_marked_while_they_last() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, color_system=None, force_terminal=True)
    begun = finding("fights the base loss", "regularizers/t/1")
    with LiveDisplay(console) as display:
        display.findings([begun], [begun])
        display.step(3, 8, metrics())
        marked = output.getvalue()
        display.findings([replace(begun, ended=4)], [])
    assert marked.count("warning: Regularizers/t/1 is off; 5 of 6. Do less.") == 1
    assert "Over at step 4, since step 2: regularizers/t/1 is off." in output.getvalue()
    assert display._findings == []


def test_the_table_shows_a_bound() -> None:
    line = {**metrics(), "regularizers/t/1/bound": 0.25}
    assert "5 (bound 0.25)" in shown_table(line)
    narrow = shown_lines(line, 72)
    (below,) = [index for index, each in enumerate(narrow) if each == "(bound 0.25)"]
    assert narrow[below - 1].split()[:2] == ["t/1", "5"]


def test_the_table_shows_the_factors_of_an_aggregator() -> None:
    assert "factor" not in shown_table(metrics())
    shown = shown_table({**metrics(), "factors/base": 0.75, "factors/t/1": 1.25})
    assert "factor" in shown
    assert [factor for factor in ("0.75", "1.25") if factor in shown] == ["0.75", "1.25"]


def test_the_table_names_the_space_of_the_gradients() -> None:
    assert "gradients w.r.t. log-probs" in shown_table(metrics())
    elsewhere: dict[str, Any] = {"regularizers/t/1/grad_space": "hidden_states"}
    shown = shown_table({**metrics(), **elsewhere})
    assert "w.r.t." not in shown
    assert "100% of log-probs" in shown
    assert "100% of hidden states" in shown
    untracked = {key: v for key, v in metrics().items() if "norm" not in key}
    assert "w.r.t." not in shown_table(untracked)


def test_the_table_shows_the_change_by_a_measured_step() -> None:
    assert "change" not in shown_table(metrics())
    shown = shown_table(
        {**metrics(), "base_loss/progress": -0.125, "regularizers/t/1/progress": 0.5}
    )
    assert "change" in shown
    assert "-0.125" in shown
    assert "+0.5 " in shown


def test_the_table_shows_why_a_term_was_skipped() -> None:
    reason = "OSError: it is\n  away"
    line, below = [each for each in shown_table(skipping(reason)).splitlines() if "judge" in each]
    assert line.replace("│", " ").split() == ["judge/2", "skipped"]
    assert below.strip() == "judge/2 skipped: OSError: it is away"


def test_a_secret_in_a_reason_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-s3cr3t")
    shown = shown_table(skipping("OSError: refused tml-s3cr3t"))
    assert "OSError: refused" in shown
    assert "s3cr3t" not in shown


def test_the_table_shows_every_number() -> None:
    text = shown_table({**metrics(), "held_out/loss": 1.25})
    assert "step 3, 0.5 s, held-out loss 1.2500" in text
    for cell in ("t/1", "0.1", "0.5", "25%", "+0.50", "2.0 ms"):
        assert cell in text


def shown_lines(line: dict[str, Any], width: int) -> list[str]:
    """Lines of all tables of a step in a terminal of this width, without borders."""
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        for table in step_tables(line, console):
            console.print(table)
    return [each.replace("│", " ").strip() for each in captured.get().splitlines()]


def test_the_rewards_have_a_table_and_the_answers_a_line() -> None:
    shown = shown_lines(on_policy(**{"held_out/reward": 0.83}), 160)
    assert shown[0] == "step 3, 0.5 s, held-out reward 0.8300, gradients w.r.t. log-probs"
    start = shown.index("rewards")
    assert [each.split() for each in shown[start + 4 : start + 6]] == [
        ["short", "0.4375", "0.125", "1"],
        ["judge/1", "-0.001234", "0.000988", "0.05", "2"],
    ]
    facts = (
        "reward 0.437 ± 0.13   groups without signal 25%   tokens per answer 12.3   truncated 6%   "
        "dropped 2   entropy 1.23   KL 0.0123   clipped 3%"
    )
    assert shown[-1] == facts


def test_brackets_in_the_name_of_a_reward_are_shown() -> None:
    line = {**metrics(), "rewards/[bold]x/weight": 1.0}
    assert any(each.startswith("[bold]x ") for each in shown_lines(line, 120))


def test_a_run_without_rollouts_has_one_table() -> None:
    assert len(step_tables(metrics(), Console(width=120))) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_is_cut(width: int) -> None:
    term = {"value": -12345.678, "weight": 0.012345, "contribution": -0.00012345}
    term |= {"grad_norm_weighted": 0.00012345, "duration": 1234.56}
    changed = {f"regularizers/t/1/{key}": value for key, value in term.items()}
    line = on_policy(**changed, **{"cosines/base/t/1": -0.31, "rewards/short/mean": -12345.678}) | {
        "base_loss/value": -0.00012345
    }
    shown = shown_lines(line, width)
    assert max(map(len, shown)) <= width
    assert "…" not in "".join(shown)
    (base,) = [each.split() for each in shown if each.startswith("base ")]
    assert base == ["base", "-0.000123", "-0.000123", "3", "100%"]
    (own,) = [each.split() for each in shown if each.startswith("t/1 ")]
    numbers = ["t/1", "-1.23e+04", "0.0123", "-0.000123", "0.000123", "0%", "-0.31", "1234.6", "s"]
    assert own[: len(numbers)] == numbers
    (short,) = [each.split() for each in shown if each.startswith("short ")]
    assert short == ["short", "-1.235e+04", "0.125", "1"]
    text = " ".join(shown)
    for fact in ("reward 0.437 ± 0.13", "tokens per answer 12.3", "entropy 1.23", "KL 0.0123"):
        assert fact in text


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_no_number_is_cut_beside_factors_changes_and_bounds(width: int) -> None:
    line = metrics(**{"cosines/base/t/1": -0.31, "term__value": -12345.678}) | {
        "base_loss/value": -0.00012345, "factors/base": 0.00123, "factors/t/1": 0.00456,
        "base_loss/progress": -0.00123, "regularizers/t/1/progress": -0.00456,
        "regularizers/t/1/bound": -23456.7,
    }  # fmt: skip
    shown = shown_lines(line, width)
    assert max(map(len, shown)) <= width
    (base,) = [each.split() for each in shown if each.startswith("base ")]
    (own,) = [each.split() for each in shown if each.startswith("t/1 ")]
    assert {"-0.000123", "3", "0.00123", "-0.00123"} <= set(base)
    assert {"-1.23e+04", "0.1", "1", "-0.31", "0.00456", "-0.00456"} <= set(own)
    assert "(bound -2.35e+04)" in " ".join(shown)


def test_a_long_name_makes_way_for_tiny_numbers() -> None:
    name = "regularizers/a_term_with_quite_a_long_name"
    own = {"value": -2.948e-12, "weight": 1.234e-05, "contribution": -3.64e-17}
    own |= {"grad_norm": 2.94e-12, "grad_norm_weighted": 3.64e-17, "duration": 0.1234}
    line = {**metrics(), **{f"{name}/{key}": value for key, value in own.items()}}
    line |= {"factors/base": 0.751, "base_loss/progress": -1.25e-10, f"{name}/progress": 5.67e-11}
    text = " ".join(shown_lines(line, 80))
    assert "…" not in text
    assert {"-2.95e-12", "1.23e-05", "3.64e-17", "+5.67e-11"} <= set(text.split())


def test_the_bar_shows_the_reward() -> None:
    output = io.StringIO()
    console = Console(file=output, width=80, color_system=None, force_terminal=True)
    with LiveDisplay(console) as display:
        display.step(3, 8, on_policy())
    assert "reward 0.4374" in output.getvalue()
    assert "loss 2.5" not in output.getvalue()


def test_every_severity_has_a_color() -> None:
    assert set(COLORS) == set(SEVERITIES)


@pytest.fixture
def terminal(project: Path) -> Path:
    """A project with a slow term, in a process, so that Ctrl-C reaches that process too."""
    config = (project / "c.toml").read_text()
    slow = (
        '[[regularizers]]\nuse = "own_terms:slow"\nname = "slow"\nweight = 1e-6\nrun_in = "process"'
    )
    (project / "c.toml").write_text(f"{config}\n{slow}\n")
    return project


def test_a_terminal_shows_a_progress_bar_and_a_table(spawn: Spawn, terminal: Path) -> None:
    arguments = ("train", "c.toml", "train.steps=40", "--run", "r")
    screen, training = spawn(*arguments, columns=140)
    for pattern in ("loading tiny-random", "loss \\d+", "1/40", "left", "\\d:\\d\\d:\\d\\d"):
        screen.expect(pattern)
    screen.expect("┏")
    # Headings of two lines stand at the bottom: the first line holds the upper halves only.
    headings = ("weight", "gradient", "term", "value", "weight", "× value", "norm", "share")
    for column in (*headings, "cosine", "time"):
        screen.expect(column)
    screen.expect("│ base ")
    screen.expect(" \\d+% │")
    screen.expect("small share")
    screen.send("\x03")  # Ctrl-C
    screen.expect("Finishing this step")
    screen.expect("steelyard resume r")
    assert training.wait_for_code() == 130
    made = len(metrics_of(terminal / "r"))
    assert 0 < made < 40
    assert "WorkerDied" not in (terminal / "r" / "log.txt").read_text()


def test_a_terminal_of_80_columns_shows_an_on_policy_run(spawn: Spawn, project: Path) -> None:
    tables = [
        '[model]\nbase_model = "tiny-random"\nrank = 2',
        '[rollouts]\nprompts = "prompts.jsonl"\nper_step = 2\ngroup_size = 4\nmax_tokens = 6',
        "[train]\nsteps = 2",
        '[[rewards]]\nuse = "length"\nname = "short"\noptions = { max_characters = 4 }',
    ]
    (project / "on_policy.toml").write_text("\n".join(tables))
    (project / "prompts.jsonl").write_text('{"prompt": "Name a fruit."}\n' * 6)
    screen, training = spawn("train", "on_policy.toml", "--run", "r", columns=80)
    screen.expect("sampling answers: 4 to each of 2 prompts a step")
    # The display may show the second step at once.
    for word in ("reward [\\d.e-]+ ", "held-out reward", "rewards", "name", "mean", "spread"):
        screen.expect(word)
    screen.expect("short[ │]+[\\d.e-]+[ │]+[\\d.e-]+[ │]+1 ")
    screen.expect("groups without signal \\d+%")
    screen.expect("Held-out reward: [\\d.]+ -> [\\d.]+\\.")
    assert training.wait_for_code() == 0


def test_a_resumed_run_starts_in_the_middle_of_the_bar() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, color_system=None, force_terminal=True)
    with LiveDisplay(console) as display:
        display.say("resumed after step 3")
        display.step(3, 8, metrics())
    shown = output.getvalue()
    assert "resumed after step 3" in shown
    assert "loss 2.5000" in shown
    assert "4/8" in shown


def test_a_run_that_makes_no_step_leaves_no_bar() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, color_system=None, force_terminal=True)
    with LiveDisplay(console) as display:
        display.say("loading a model")
    _, bar, after = output.getvalue().rpartition("waiting")
    assert bar
    assert "\x1b[2K" in after, "its line is erased"


def test_the_bar_starts_again_with_the_next_run() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, color_system=None, force_terminal=True)
    with LiveDisplay(console) as display:
        display.step(7, 8, metrics())
        display.step(0, 5, metrics())
    assert "1/5" in output.getvalue().rpartition("8/8")[2]
    display.restore()
    assert output.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"
