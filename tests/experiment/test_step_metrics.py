"""Reading one line of metrics."""

from __future__ import annotations

import pytest

from steelyard.experiment.step_metrics import (
    gradient_shares,
    short_reason,
    skip_reasons,
    skipped_terms,
    terms_that_ran,
)


def test_terms_that_ran_are_those_with_a_contribution() -> None:
    line = {
        "regularizers/kl/contribution": 0.1,
        "regularizers/a/b/contribution": 0.1,
        "regularizers/kl/custom/x/contribution": 1.0,
        "held_out/regularizers/l2": 0.1,
        "regularizers/off/weight": 0.0,
    }
    assert terms_that_ran(line) == ["kl", "a/b"]


def test_reasons_are_read_back() -> None:
    reasons = {"judge": "TermError: away", "a/b": "OSError"}
    line = {"skipped/judge": 1.0, "skipped/a/b": 1.0, "skipped/old": 1.0, **skip_reasons(reasons)}
    assert skipped_terms(line) == {**reasons, "old": ""}
    assert skip_reasons({}) == {}


def test_a_reason_is_shortened_to_its_first_words() -> None:
    words = [str(number) for number in range(13)]
    assert short_reason("x", " ".join(words[:12])) == " ".join(words[:12])
    assert short_reason("x", " ".join(words)) == " ".join([*words[:12], "…"])
    assert short_reason("x", "a\n  b") == "a b"
    assert short_reason("x", "TermError: regularizer 'y' failed: z").startswith("TermError")


def test_shares_add_up_to_one() -> None:
    line = {
        "base_loss/grad_norm": 2.0,
        "regularizers/a/grad_norm_weighted": 1.0,
        "regularizers/b/grad_norm_weighted": 5.0,
    }
    shares = gradient_shares(line, ["a", "b", "none"])
    assert shares == {
        "base": pytest.approx(0.25),
        "a": pytest.approx(0.125),
        "b": pytest.approx(0.625),
        "none": None,
    }


@pytest.mark.parametrize("line", [{}, {"base_loss/grad_norm": 0.0}])
def test_without_gradients_there_are_no_shares(line: dict[str, float]) -> None:
    assert gradient_shares(line, ["a"]) == {"base": None, "a": None}
