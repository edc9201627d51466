from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from steelyard.cli import live_display
from steelyard.cli.live_display import table
from steelyard.cli.term_table import rows_of
from steelyard.cli.text_display import Plain
from steelyard.experiment.flags import FLAGS


def metrics(**changed: float | None) -> dict[str, float]:
    """A step with one term, `t/1`."""
    values: dict[str, float | None] = {
        "step": 3,
        "seconds": 0.5,
        "loss_total": 2.5,
        "base_loss/value": 2.0,
        "base_loss/grad_norm": 3.0,
        "regularizers/t/1/value": 5.0,
        "regularizers/t/1/weight": 0.1,
        "regularizers/t/1/contribution": 0.5,
        "regularizers/t/1/grad_norm": 10.0,
        "regularizers/t/1/grad_norm_weighted": 1.0,
        "regularizers/t/1/custom/contribution": 7.0,
        "regularizers/t/1/duration": 0.002,
        "cosines/base/t/1": 0.5,
    }
    values |= {key.replace("term__", "regularizers/t/1/"): v for key, v in changed.items()}
    return {key: value for key, value in values.items() if value is not None}


def shown_table(line: dict[str, Any]) -> str:
    """The table of a step as a terminal shows it."""
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(table(line))
    return captured.get()


def test_a_row_says_what_a_term_adds_and_pulls() -> None:
    base, term = rows_of(metrics())
    assert (base.name, base.value, base.share, base.flags) == ("base", 2.0, 0.75, ())
    assert (term.name, term.value, term.weight, term.contribution) == ("t/1", 5.0, 0.1, 0.5)
    assert (term.grad_norm, term.share, term.cosine) == (1.0, 0.25, 0.5)
    assert (term.seconds, term.flags, term.skipped) == (0.002, (), None)


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        ({"term__grad_norm_weighted": 3.1}, ["dominates"]),
        ({"cosines/base/t/1": -0.31}, ["fights the base loss"]),
        (
            {"term__grad_norm_weighted": 3.1, "cosines/base/t/1": -0.31},
            ["dominates", "fights the base loss"],
        ),
        ({"cosines/base/t/1": -0.31, "term__weight": 0.0}, []),
        ({"term__grad_norm": None, "term__grad_norm_weighted": None}, ["no gradient"]),
        ({"term__grad_norm": 0.0, "term__grad_norm_weighted": 0.0}, ["no gradient"]),
    ],
)
def test_flags_of_a_row(changed: dict[str, float | None], flags: list[str]) -> None:
    assert list(rows_of(metrics(**changed))[1].flags) == flags
    shown = shown_table(metrics(**changed))
    assert ", ".join(flags) in shown
    assert [flag for flag in FLAGS if flag in shown] == flags


def test_without_norms_there_is_no_flag_and_no_share() -> None:
    untracked = {key: v for key, v in metrics().items() if "norm" not in key and "cos" not in key}
    assert [(row.share, row.cosine, row.flags) for row in rows_of(untracked)] == 2 * [
        (None, None, ())
    ]


def skipping(reason: str | None) -> dict[str, Any]:
    """A step at which `judge/2` was skipped."""
    line = {**metrics(), "skipped/judge/2": 1.0}
    return line if reason is None else {**line, "skipped/judge/2/reason": reason}


def test_a_skipped_term_has_a_row_with_its_reason() -> None:
    reason = "TermError: regularizer 'judge/2' failed: OSError: it is\n  away"
    *_, row = rows_of(skipping(reason))
    assert (row.name, row.skipped) == ("judge/2", "OSError: it is away")
    assert (row.value, row.contribution, row.flags) == (None, None, ())
    line, below = [each for each in shown_table(skipping(reason)).splitlines() if "judge" in each]
    assert line.replace("│", " ").split() == ["judge/2", "skipped"]
    assert below.strip() == "judge/2 skipped: OSError: it is away"


def test_a_long_reason_is_cut_and_a_missing_one_is_empty() -> None:
    assert rows_of(skipping("E: " + "word " * 30))[-1].skipped == "E:" + " word" * 11 + " …"
    assert rows_of(skipping(None))[-1].skipped == ""


def test_plain_text_says_which_term_was_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    Plain().step(3, 8, skipping("OSError: it is away"))
    assert capsys.readouterr().out == (
        "step 4/8  loss 2.5000  base 2.0000  t/1 +0.5000  judge/2 skipped\n"
    )


def test_a_secret_in_a_reason_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-s3cr3t")
    shown = shown_table(skipping("OSError: refused tml-s3cr3t"))
    assert "OSError: refused" in shown
    assert "s3cr3t" not in shown


def test_the_table_shows_every_number() -> None:
    text = shown_table({**metrics(), "held_out/loss": 1.25})
    assert "step 4, 0.5 s, held-out loss 1.2500" in text
    for words in ("t/1", "0.1", "0.5", "25%", "+0.50", "2.0 ms"):
        assert words in text


def test_every_flag_has_a_style() -> None:
    assert set(live_display._STYLES) == set(FLAGS)
