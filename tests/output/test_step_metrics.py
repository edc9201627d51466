"""Reading lines of metrics."""

from __future__ import annotations

import pytest

from steelyard.output.step_metrics import (
    cosine_to_base,
    gradients,
    mean_metrics,
    reward_names,
    short_reason,
    skip_reasons,
    skipped_terms,
    terms_that_ran,
    weighted_reward,
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


def test_rewards_are_those_with_a_weight() -> None:
    line = {
        "rewards/short/mean": 0.1,
        "rewards/short/weight": 1.0,
        "rewards/a/b/weight": 0.0,  # failed for every answer
        "held_out/rewards/short": 0.2,
        "regularizers/kl/weight": 0.1,
    }
    assert reward_names(line) == ["short", "a/b"]


def test_reasons_are_read_back() -> None:
    reasons = {"judge": "TermError: away", "a/b": "OSError"}
    line = {"skipped/judge": 1.0, "skipped/a/b": 1.0, "skipped/old": 1.0, **skip_reasons(reasons)}
    assert skipped_terms(line) == {**reasons, "old": ""}
    assert skip_reasons({}) == {}


def test_a_reason_is_shortened_to_its_first_words() -> None:
    words = [str(number) for number in range(13)]
    assert short_reason(" ".join(words[:12])) == " ".join(words[:12])
    assert short_reason(" ".join(words)) == " ".join([*words[:12], "…"])
    assert short_reason("a\n  b") == "a b"
    text = "OSError: TermError: regularizer 'judge' failed: that is what the judge wrote"
    assert short_reason(text) == text


def step(base: float, **terms: tuple[float, float]) -> dict[str, float]:
    """Metrics of a step: norm of the base loss, and weighted norm and cosine of each term."""
    line = {"base_loss/grad_norm": base}
    for name, (norm, cosine) in terms.items():
        line |= {
            f"regularizers/{name}/grad_norm": 10 * norm,
            f"regularizers/{name}/grad_norm_weighted": norm,
            f"cosines/base/{name}": cosine,
        }
    return line


def test_shares_are_sums_of_norms_over_all_steps() -> None:
    lines = [step(2.0, a=(1.0, 0.5), b=(5.0, 0.0)), step(6.0, a=(2.0, 0.5)), step(4.0)]
    by_name = gradients(lines, ["a", "b", "none"])
    assert {name: each.norm for name, each in by_name.items()} == {"base": 12.0, "a": 3.0, "b": 5.0}
    shares = {name: each.share for name, each in by_name.items()}
    assert shares == pytest.approx({"base": 0.6, "a": 0.15, "b": 0.25})


def test_norms_of_different_spaces_are_not_added() -> None:
    spaces = {"size": "parameters", "rare": "logits", "flat": "logits"}
    line: dict[str, object] = {**step(1.0, kl=(3.0, 0.0), size=(9.0, 0.0), rare=(6.0, 0.0))}
    line["regularizers/flat/grad_norm_weighted"] = 2.0
    line |= {f"regularizers/{name}/grad_space": space for name, space in spaces.items()}
    by_name = gradients([line], ["kl", *spaces])
    assert {name: (each.share, each.alone) for name, each in by_name.items()} == {
        "base": (0.25, False),
        "kl": (0.75, False),
        "size": (1.0, True),
        "rare": (0.75, False),
        "flat": (0.25, False),
    }


def test_a_term_whose_space_changes_has_the_norms_of_its_last_one() -> None:
    lines: list[dict[str, object]] = [
        {**step(1.0, a=(norm, 0.0)), "regularizers/a/grad_space": space}
        for norm, space in ((3.0, "logits"), (100.0, "projection"), (4.0, "logits"))
    ]
    found = gradients([step(1.0), *lines], ["a"])["a"]
    assert (found.norm, found.space, found.share) == (7.0, "logits", 1.0)


@pytest.mark.parametrize(
    ("line", "share"), [({}, None), ({"base_loss/grad_norm": 0.0}, {"base": None})]
)
def test_without_gradients_there_are_no_shares(
    line: dict[str, float], share: dict[str, None] | None
) -> None:
    assert {name: each.share for name, each in gradients([line], ["a"]).items()} == (share or {})


def test_cancelled_is_the_projection_on_the_gradient_of_the_base_loss() -> None:
    # Gradients by hand: base (2, 0) and (0, 4); term (−1, 1) at the first step only.
    lines = [step(2.0, a=(2**0.5, -(0.5**0.5))), step(4.0)]
    found = gradients(lines, ["a"])["a"]
    assert found.cosine == pytest.approx(-(0.5**0.5))
    assert found.cancelled == pytest.approx(2 / (4 + 16)), "−⟨term, base⟩ over ‖base‖²"


def test_cosines_of_a_zero_gradient_do_not_count() -> None:
    lines = [step(2.0, a=(0.0, 0.0)), step(2.0, a=(1.0, -0.5)), step(0.0, a=(1.0, 0.0))]
    assert [cosine_to_base(line, "a") for line in lines] == [None, -0.5, None]
    assert gradients(lines, ["a"])["a"].cosine == -0.5


def test_norms_that_are_not_finite_have_no_share() -> None:
    lines = [step(2.0, a=(float("nan"), 0.1)), step(float("inf"), a=(1.0, 0.2)), step(1.0)]
    by_name = gradients(lines, ["a"])
    assert (by_name["a"].share, by_name["base"].share) == (0.25, 0.75)
    assert (by_name["a"].cosine, by_name["a"].cancelled) == (None, None)


def test_metrics_of_several_optimizer_steps_are_averaged() -> None:
    first = {"loss_total": 1.0, "skipped/judge": 1.0, "skipped/judge/reason": "down"}
    second = {"loss_total": 2.0, "regularizers/judge/value": 4.0, "grad_space": "logprobs"}
    assert mean_metrics([first, second]) == {
        "loss_total": 1.5,
        "skipped/judge": 1.0,
        "skipped/judge/reason": "down",
        "regularizers/judge/value": 4.0,
        "grad_space": "logprobs",
    }
    assert mean_metrics([first]) == first


def test_a_reward_that_was_not_measured_leaves_no_sum() -> None:
    assert weighted_reward({"held_out/rewards/a": 1.0}, {"a": 1.0, "b": 2.0}) is None
    assert weighted_reward({}, {}) is None
