from __future__ import annotations

import pytest
from rich.console import Console

from steelyard.cli.live import table
from steelyard.cli.rows import rows_of


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


def test_a_row_says_what_a_term_adds_and_pulls() -> None:
    base, term = rows_of(metrics())
    assert (base.name, base.value, base.share, base.mark) == ("base", 2.0, 0.75, "")
    assert (term.name, term.value, term.weight, term.contribution) == ("t/1", 5.0, 0.1, 0.5)
    assert (term.grad_norm, term.share, term.cosine) == (1.0, 0.25, 0.5)
    assert (term.seconds, term.mark) == (0.002, "")


@pytest.mark.parametrize(
    ("changed", "mark"),
    [
        ({"term__grad_norm_weighted": 3.1}, "dominates"),
        ({"cosines/base/t/1": -0.31}, "fights the base loss"),
        ({"cosines/base/t/1": -0.31, "term__weight": 0.0}, ""),
        ({"term__grad_norm": None, "term__grad_norm_weighted": None}, "no gradient"),
        ({"term__grad_norm": 0.0, "term__grad_norm_weighted": 0.0}, ""),
    ],
)
def test_what_is_worth_a_mark(changed: dict[str, float | None], mark: str) -> None:
    assert rows_of(metrics(**changed))[1].mark == mark


def test_without_norms_there_is_no_mark_and_no_share() -> None:
    untracked = {key: v for key, v in metrics().items() if "norm" not in key and "cos" not in key}
    assert [(row.share, row.cosine, row.mark) for row in rows_of(untracked)] == 2 * [
        (None, None, "")
    ]


def test_the_table_shows_every_number() -> None:
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(table({**metrics(), "held_out/loss": 1.25}))
    text = captured.get()
    assert "step 4, 0.5 s, held-out loss 1.2500" in text
    for words in ("t/1", "0.1", "0.5", "25%", "+0.50", "2.0 ms"):
        assert words in text
