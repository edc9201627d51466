"""Each sentence of the summary: a run in which it is true, and one in which it would be false.

The runs are real pipelines on a few log-probs. In the second run of each test the numbers tempt
one to say the sentence: a mean over other steps, a sum of unlike norms, a sign without a size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import RegularizerSpec
from steelyard.experiment.page.formatting import number, percent
from steelyard.experiment.page.load import LoadedRun
from steelyard.experiment.page.run_statistics import RunStatistics, statistics_of
from steelyard.experiment.page.sentences import finding_sentences, headline, summarize_runs
from steelyard.experiment.page.sentences import summarize as summarize_details
from tests.experiment.folders import confidence, evenness, flaky, length, metrics

from .on_policy_runs import FAILING_LINE, STEPS, WEIGHT, OnPolicyRun, train_on_policy


def summarize(found: RunStatistics, run: LoadedRun = LoadedRun("run", Path(), {}, [])) -> list[str]:  # noqa: B008 - frozen
    """All sentences about a run, the headline first."""
    return [headline(run, found), *finding_sentences(found), *summarize_details(found)]


def headed(result: str, found: list[str]) -> bool:
    """Whether the headline has a result."""
    return result in found[0]


def sentences(*terms: RegularizerSpec, steps: int = 12, **changed: Any) -> list[str]:
    """Summary of a run with these terms; `changed` replaces metrics of every step."""
    rows = [row | changed for row in metrics(terms, steps, tracked=True)]
    return summarize(statistics_of(LoadedRun("run", Path(), {}, rows)))


def said(start: str, found: list[str]) -> bool:
    return any(sentence.startswith(start) for sentence in found)


def term(fn: Callable[..., Any], weight: float, **options: Any) -> RegularizerSpec:
    return RegularizerSpec(fn, weight, options.pop("name", fn.__name__), run_in="inline", **options)


def constant(data: Any, logprobs: list[Tensor]) -> Tensor:
    """A large value with hardly a gradient."""
    return 1000 + 1e-6 * torch.cat(logprobs).sum()


def towards_start() -> Callable[..., Tensor]:
    """Squared distance to the log-probs of the first call: no gradient there."""
    start: list[Tensor] = []

    def anchored(data: Any, logprobs: list[Tensor]) -> Tensor:
        own = torch.cat(logprobs)
        if not start:
            start.append(own.detach())
        return (own - start[0]).square().mean()

    return anchored


def test_the_base_loss_fell() -> None:
    assert headed("the base loss fell from", sentences(term(evenness, 0.1)))
    # The total falls by half, but only since the penalty on confidence drives the base up.
    found = sentences(term(confidence, 30.0))
    assert headed("the base loss rose from", found)
    assert said("The total loss fell from", found)


def test_the_base_loss_per_token_fell() -> None:
    # The sum over the tokens of a batch falls since the last batches are short.
    rows = [
        {"step": step, "base_loss/value": nll * tokens, "nll": nll, "tokens": tokens}
        for step, (nll, tokens) in enumerate([(2.0, 30), (2.1, 28), (2.2, 12), (2.3, 10)])
    ]
    run = LoadedRun("run", Path(), {"loss": {"use": "cross_entropy"}}, rows)
    result = "the base loss per token rose from 2.000 to 2.300"
    assert headed(result, summarize(statistics_of(run)))


def test_the_total_loss_fell() -> None:
    assert said("The total loss fell from", sentences(term(evenness, 0.1)))
    # A large term that runs at the first steps only: the mean of all totals falls by two thirds.
    found = sentences(term(confidence, 3.0), term(constant, 0.1, every=6))
    assert said("The total loss, over the 10 steps with the same terms and weights,", found)
    (total,) = [sentence for sentence in found if sentence.startswith("The total loss")]
    assert "100." not in total, "the steps with the large term are not compared with the others"


def test_the_total_loss_rose() -> None:
    # The base falls; a skipped term of a large value comes back at the last steps.
    failures = [*["away"] * 9, None, None, None]
    spec = flaky(*failures)
    large = RegularizerSpec(spec.fn, 100.0, "flaky", on_error="skip", run_in="inline")
    found = sentences(large)
    assert headed("the base loss fell from", found)
    assert not any("rose" in sentence for sentence in found)
    assert said("“flaky” was skipped at 9 of 12 steps: OSError: away.", found)


def test_the_total_loss_is_not_compared_while_its_weights_change() -> None:
    warming = RegularizerSpec(confidence, lambda step: 0.1 * step, "confidence", run_in="inline")
    assert said("The total loss is not compared", sentences(warming))
    assert not said("The total loss is not compared", sentences(term(confidence, 0.1)))


def test_a_term_dominates() -> None:
    start = "Warning: Regularizer 'confidence' dominates the gradient"
    large: dict[str, Any] = {"regularizers/confidence/grad_norm_weighted": 1e4}
    assert said(start, sentences(term(confidence, 40.0), **large))
    # Its norm is the largest number in the table, in units of its own.
    elsewhere = large | {
        "regularizers/confidence/grad_space": "parameters",
        "cosines/base/confidence": None,
    }
    found = sentences(term(confidence, 40.0), **elsewhere)
    assert not said(start, found)
    assert said("The gradient of “confidence” is with respect to the parameters", found)


def test_a_term_opposes_the_base_loss() -> None:
    start = "Warning: Regularizer 'confidence' works against the base loss"
    assert said(start, sentences(term(confidence, 1.6)))
    # The same cosine with a thousandth of the size.
    found = sentences(term(confidence, 0.0016))
    assert not said(start, found)
    assert "The doctor has nothing to warn of." in found


def test_a_term_has_no_gradient() -> None:
    start = "Problem: Regularizer 'length' has no gradient"
    assert said(start, sentences(term(length, 0.01, gradient="none")))
    # Its gradient is 0 at the first step, as that of a KL to the base model is.
    anchored = term(towards_start(), 0.1, name="anchored")
    assert metrics([anchored], 1, tracked=True)[0]["regularizers/anchored/grad_norm"] == 0
    found = sentences(term(towards_start(), 0.1, name="anchored"))
    assert not any("no gradient" in sentence for sentence in found)


def test_factors_of_an_aggregator_are_not_in_the_norms() -> None:
    sentence = "Norms, shares and cosines are those of the weighted gradients, before the factors"
    factors: dict[str, Any] = {"factors/base": 1.0, "factors/confidence": 0.5}
    assert said(sentence, sentences(term(confidence, 1.6), **factors))
    assert not said(sentence, sentences(term(confidence, 1.6)))


def test_there_is_nothing_to_warn_of() -> None:
    sentence = "The doctor has nothing to warn of."
    assert sentence in sentences(term(evenness, 0.1))
    assert sentence not in sentences(term(confidence, 1.6))


@pytest.mark.parametrize("tracked", [False, True])
def test_norms_were_not_tracked(tracked: bool) -> None:
    rows = metrics([term(evenness, 0.1)], 4, tracked=tracked)
    found = summarize(statistics_of(LoadedRun("run", Path(), {}, rows)))
    assert said("Gradient norms were not tracked", found) is not tracked


def test_norms_were_tracked_at_some_of_the_steps() -> None:
    rows = metrics([term(evenness, 0.1)], 6, tracked=True)
    plain = metrics([term(evenness, 0.1)], 6, tracked=False)
    some = [row if row["step"] % 3 == 0 else plain[row["step"]] for row in rows]
    found = summarize(statistics_of(LoadedRun("run", Path(), {}, some)))
    assert said("Gradient norms were tracked at 2 of 6 steps, and shares", found)
    assert not said("Gradient norms were tracked", sentences(term(evenness, 0.1)))


def test_a_bound_of_zero_has_no_five_percent() -> None:
    at = "regularizers/kl"
    rows = [
        {"step": step, f"{at}/contribution": 0.0, f"{at}/value": value, f"{at}/bound": 0.0,
         f"{at}/violation": value}
        for step, value in enumerate([0.25, 0.0, 0.5])
    ]  # fmt: skip
    found = summarize(statistics_of(LoadedRun("run", Path(), {}, rows)))
    assert (
        "“kl” went from 0.250 to 0.500, with a bound of 0: it was beyond it at 2 of 3 steps."
        in found
    )


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory: pytest.TempPathFactory) -> OnPolicyRun:
    return train_on_policy(tmp_path_factory.mktemp("on_policy"))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)  # exactly rounded, whatever the order


def test_what_the_rewards_of_a_real_run_did(on_policy: OnPolicyRun) -> None:
    found = summarize(statistics_of(on_policy.loaded))
    quarter = STEPS // 4

    def kept(step: int, name: str, *, held_out: bool = False) -> list[float]:
        scores = [each["rewards"] for each in on_policy.at(step, held_out=held_out)]
        return [each[name] for each in scores if each[name] is not None]

    def total(step: int, *, held_out: bool = False) -> float:
        records = on_policy.at(step, held_out=held_out)
        scores = [e["rewards"] for e in records if e["rewards"]["judge"] is not None]
        return mean([e["letters"] + WEIGHT * e["judge"] for e in scores])

    def check(start: str, values: list[float]) -> None:
        first, last = (mean(some) for some in (values[:quarter], values[-quarter:]))
        sentence = next(each for each in found if start in each and "failed" not in each)
        assert number(last) in sentence
        if abs(last - first) > 1e-9:
            verb = "fell" if last < first else "rose"
            assert f"{start} {verb} from {number(first)} to {number(last)}" in sentence

    check("the reward", [total(step) for step in range(STEPS)])
    for name in ("letters", "judge"):
        check(f"“{name}”", [mean(kept(step, name)) for step in range(STEPS)])
    ends = [number(total(step, held_out=True)) for step in (0, STEPS - 1)]
    assert f"On held-out prompts the reward went from {ends[0]} to {ends[1]}." in found
    sampled = [each for each in on_policy.records if "held_out" not in each]
    dropped = sum(each["line"] == FAILING_LINE for each in sampled)
    assert said(f"{dropped} of {len(sampled)} answers were dropped: “judge” failed: Conn", found)
    silent = []
    for step in range(STEPS):
        for group in (0, 1):
            records = [each for each in on_policy.at(step) if each["group"] == group]
            silent.append(len({e["reward"] for e in records if e["reward"] is not None}) < 2)
    assert said(f"On average {percent(mean(silent))} of the groups of a step had", found)
    lengths = [mean([e["tokens"] for e in on_policy.at(s)]) for s in range(STEPS)]
    ends = [number(mean(some)) for some in (lengths[:quarter], lengths[-quarter:])]
    cut = percent(mean([each["truncated"] for each in sampled]))
    assert said(
        f"The length of the answers went from {ends[0]} to {ends[1]} tokens; on average {cut}",
        found,
    )
    assert not any("loss" in sentence and "base loss" not in sentence for sentence in found)


def rewarded(*rewards: float, weights: tuple[float, ...] = (1.0,), **changed: Any) -> list[str]:
    """Summary of an on-policy run of which the only reward has these means."""
    rows = [
        {
            "step": step,
            "rewards/short/mean": reward,
            "rewards/short/weight": weights[step % len(weights)],
            "rollouts/reward": weights[step % len(weights)] * reward,
            "rollouts/no_signal": 0.0,
            "held_out/reward": weights[step % len(weights)] * reward,
            "held_out/rewards/short": reward,
            **changed,
        }
        for step, reward in enumerate(rewards)
    ]
    return summarize(statistics_of(LoadedRun("run", Path(), {}, rows)))


def test_the_reward_rose() -> None:
    change = "rose from 0.250 to 0.500 (+100 %)"
    assert rewarded(0.25, 0.5) == [
        f"2 steps: the reward {change}, held-out {change}.",
        "The doctor has nothing to warn of.",
        "On held-out prompts the reward went from 0.250 to 0.500.",
        "No answer was dropped.",
        "Every group had a signal.",
        "There were no regularizers.",
    ]
    assert headed("the reward fell from 0.500 to 0.250", rewarded(0.5, 0.25))
    # The sum doubles since its weight does, while the reward falls.
    found = rewarded(0.5, 0.375, weights=(1.0, 2.0))
    assert not headed("the reward", found)
    assert said("The weights of the rewards changed, so their sum is not compared.", found)
    assert said("“short” fell from 0.500 to 0.375", found)
    assert said("On held-out prompts the rewards went: “short” from 0.500 to 0.375.", found)


def test_dropped_answers_without_records_are_counted() -> None:
    dropped: dict[str, Any] = {"rollouts/dropped": 1.0}
    assert "2 answers were dropped." in rewarded(0.5, 0.5, **dropped)
    assert "1 answer was dropped." in rewarded(0.5, **dropped)


def compared(*configs: Any, values: tuple[float, ...] = (0.5, 0.75)) -> list[str]:
    rows = [{"step": 0, "rewards/a/weight": 1.0, "held_out/reward": value} for value in values]
    runs = [
        LoadedRun(name, Path(), config, [row])
        for name, config, row in zip("xy", configs, rows, strict=True)
    ]
    return summarize_runs(runs, [statistics_of(run) for run in runs])


def test_runs_are_compared_by_the_reward_only_if_it_is_the_same() -> None:
    config: dict[str, Any] = {"rollouts": {"prompts": "p"}, "rewards": [{"use": "a"}]}
    assert compared(config, config)[1:] == [
        "The held-out reward ends highest in “y” (0.750) and lowest in “x” (0.500)."
    ]
    assert compared(config, config, values=(0.9, 0.75))[1].startswith(
        "The held-out reward ends highest in “x” (0.900)"
    )
    other = {**config, "rewards": [{"use": "a", "weight": 2.0}]}
    assert compared(config, other)[1:] == [
        "Their rewards differ, so held-out rewards are not compared."
    ]


def test_a_failed_run_says_so_first() -> None:
    rows = [{"step": 0, "base_loss/value": 1.0}]
    failed = {"step": 1, "failed": "TermError", "failed/reason": "kl failed: away."}
    run = LoadedRun("run", Path(), {"train": {"steps": 9}}, rows, failure=failed)
    found = statistics_of(run)
    assert headline(run, found) == "1 of 9 steps: failed with TermError, kl failed: away."


def test_the_baseline_stands_in_the_headline() -> None:
    run = LoadedRun("run", Path(), {}, [{"step": 0, "seconds": 2.0}])
    with_and_without = "The held-out loss is 1 with the terms, 2 without."
    assert (
        headline(run, statistics_of(run), with_and_without)
        == f"1 step in 2.0 s. {with_and_without}"
    )


def test_how_values_were_averaged_is_said_once() -> None:
    means = "First and last values are means over a quarter of the steps"
    found = sentences(term(evenness, 0.1))
    assert [sentence.startswith(means) for sentence in found].count(True) == 1
    assert not any("means of" in sentence for sentence in found)
