"""Each sentence of the summary: a run in which it is true, and one in which it would be false.

The runs are real pipelines on a few log-probs. In the second run of each test the numbers tempt
one to say the sentence: a mean over other steps, a sum of unlike norms, a sign without a size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import RegularizerSpec
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.metrics import findings
from steelyard.experiment.report.sentences import summarize
from tests.experiment.folders import confidence, evenness, flaky, length, metrics


def sentences(*terms: RegularizerSpec, steps: int = 12, **changed: Any) -> list[str]:
    """Summary of a run with these terms; `changed` replaces metrics of every step."""
    rows = [row | changed for row in metrics(terms, steps, tracked=True)]
    return summarize(findings(LoadedRun("run", Path(), {}, rows)))


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
    assert said("The base loss fell from", sentences(term(evenness, 0.1)))
    # The total falls by half, but only since the penalty on confidence drives the base up.
    found = sentences(term(confidence, 30.0))
    assert said("The base loss rose from", found)
    assert said("The total loss fell from", found)


def test_the_base_loss_per_token_fell() -> None:
    # The sum over the tokens of a batch falls since the last batches are short.
    rows = [
        {"step": step, "base_loss/value": nll * tokens, "nll": nll, "tokens": tokens}
        for step, (nll, tokens) in enumerate([(2.0, 30), (2.1, 28), (2.2, 12), (2.3, 10)])
    ]
    run = LoadedRun("run", Path(), {"loss": {"use": "cross_entropy"}}, rows)
    assert said("The base loss per token rose from 2.000 to 2.300", summarize(findings(run)))


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
    assert said("The base loss fell from", found)
    assert not any("rose" in sentence for sentence in found)
    assert said("“flaky” was skipped at 9 of 12 steps: OSError: away.", found)


def test_the_total_loss_is_not_compared_while_its_weights_change() -> None:
    warming = RegularizerSpec(confidence, lambda step: 0.1 * step, "confidence", run_in="inline")
    assert said("The total loss is not compared", sentences(warming))
    assert not said("The total loss is not compared", sentences(term(confidence, 0.1)))


def test_a_term_dominates() -> None:
    assert said("“confidence” dominates", sentences(term(confidence, 40.0)))
    # At the steps at which it runs it has 62 % of the norms, over the run 29 %.
    rare = term(confidence, 4.0, every=4)
    assert not said("“confidence” dominates", sentences(rare))
    # Its norm is the largest number in the table, in units of its own.
    elsewhere: dict[str, Any] = {
        "regularizers/confidence/grad_space": "parameters",
        "cosines/base/confidence": None,
    }
    found = sentences(term(confidence, 40.0), **elsewhere)
    assert not any("dominates:" in sentence for sentence in found)
    assert said("The gradient of “confidence” is with respect to the parameters", found)


def test_a_term_opposes_the_base_loss() -> None:
    start = "With respect to the log-probs, the gradient of “confidence” opposes"
    assert said(start, sentences(term(confidence, 1.6)))
    # The same cosine with a thousandth of the size.
    found = sentences(term(confidence, 0.0016))
    assert not said(start, found)
    assert found[-1] == "No term dominates, and none fights the base loss."


def test_a_term_has_no_gradient() -> None:
    idle = term(length, 0.01, gradient="none")
    assert said("“length” has no gradient", sentences(idle))
    # Its gradient is 0 at the first step, as that of a KL to the base model is.
    anchored = term(towards_start(), 0.1, name="anchored")
    assert metrics([anchored], 1, tracked=True)[0]["regularizers/anchored/grad_norm"] == 0
    found = sentences(term(towards_start(), 0.1, name="anchored"))
    assert not any("no gradient" in sentence for sentence in found)


def test_no_term_dominates_and_none_fights() -> None:
    sentence = "No term dominates, and none fights the base loss."
    assert sentence in sentences(term(evenness, 0.01))
    assert sentence not in sentences(term(confidence, 1.6))


@pytest.mark.parametrize("tracked", [False, True])
def test_norms_were_not_tracked(tracked: bool) -> None:
    rows = metrics([term(evenness, 0.1)], 4, tracked=tracked)
    found = summarize(findings(LoadedRun("run", Path(), {}, rows)))
    assert said("Gradient norms were not tracked", found) is not tracked
