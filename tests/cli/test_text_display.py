"""The display as plain lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.cli.display import TextDisplay
from steelyard.doctor import Finding

from .example_metrics import metrics, on_policy, skipping


def test_a_line_says_which_term_was_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    TextDisplay().step(3, 8, skipping("OSError: it is away"))
    assert capsys.readouterr().out == (
        "step 3 (4/8)  loss 2.5000  base 2.0000  t/1 +0.5000  judge/2 skipped\n"
    )


def test_a_line_has_the_loss_and_the_contribution_of_each_term(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TextDisplay() as display:
        display.step(0, 2, {**metrics(), "held_out/loss": 1.25})
        display.restore()
    assert capsys.readouterr().out == (
        "step 0 (1/2)  loss 2.5000  base 2.0000  t/1 +0.5000  held-out 1.2500\n"
    )


def test_a_line_of_one_of_several_runs_begins_with_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    TextDisplay().step_of("none, seed 1", 1, 2, metrics())
    assert capsys.readouterr().out == (
        "none, seed 1: step 1 (2/2)  loss 2.5000  base 2.0000  t/1 +0.5000\n"
    )


def test_findings_are_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    begun = Finding("overfits", "held_out", "warning", "it rises", "1 → 2", "", "stop", 3)
    TextDisplay().findings([begun, replace(begun, ended=9)], [begun])
    assert capsys.readouterr().out == (
        "warning: It rises; 1 → 2. Stop.\nwarning: Over at step 9, since step 3: it rises.\n"
    )


def test_messages_are_printed_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-s3cr3t")
    TextDisplay().say("key tml-s3cr3t")
    assert capsys.readouterr().out == "key ***\n"


def test_a_line_has_the_rewards_and_facts_about_the_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    TextDisplay().step(3, 8, on_policy(**{"held_out/reward": 0.83}))
    assert capsys.readouterr().out == (
        "step 3 (4/8)  short 0.438 ± 0.12  judge/1 -0.00123 ± 0.00099 (2 failed)  "
        "reward 0.437 ± 0.13  groups without signal 25%  tokens per answer 12.3  truncated 6%  "
        "dropped 2  entropy 1.23  KL 0.0123  clipped 3%  loss 2.5000  base 2.0000  t/1 +0.5000  "
        "held-out reward 0.8300\n"
    )
