"""Entropy and confidence on fixed data: over the whole vocabulary, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.stats  # type: ignore[import-untyped]  # SciPy has no types
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition.terms import UncomparedTermWarning
from steelyard.errors import InputError, SpecError, TermError
from steelyard.penalties.from_logits import Projection
from steelyard.regularizers import Adaptive, ConfidencePenalty, Entropy, TruncatedImportanceSampling

from .checks import doubles, plain

CLASSES, FEATURES = 7, 4
WEIGHTS = [[1.0, 0.0, 2.0], [0.0, 1.0, 1.0, 0.5, 0.0]]
FIXED = [plain(weights=w, target_tokens=[1] * len(w)) for w in WEIGHTS]
SAMPLED = [plain(weights=w, logprobs=[-1.0] * len(w)) for w in WEIGHTS]
LOGPROBS = doubles(*([-0.5] * len(w) for w in WEIGHTS))
TERMS: list[Any] = [
    Entropy(),
    Entropy(mode="bonus", temperature=0.7),
    Entropy(normalize=True),
    Entropy(normalize=True, vocabulary=16),
    ConfidencePenalty(threshold=1.5),
]


def projections() -> list[Projection]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, bias = normal(CLASSES, FEATURES), normal(CLASSES)
    return [Projection(normal(len(w), FEATURES), weight, bias) for w in WEIGHTS]


def no_loss(_: Any, logprobs: list[Tensor]) -> Tensor:
    return 0 * logprobs[0].sum()


def expected(term: Any, logits: list[Tensor]) -> tuple[float, float]:
    """Value and mean entropy by SciPy, from the distributions of the tokens that count."""
    temperature = getattr(term, "temperature", 1.0)
    rows = [z[torch.tensor(w) != 0] for z, w in zip(logits, WEIGHTS, strict=True)]
    probabilities = (torch.cat(rows) / temperature).softmax(-1).detach().numpy()
    base = None
    if getattr(term, "normalize", False):
        base = term.vocabulary or CLASSES
    entropies = [float(scipy.stats.entropy(p, base=base)) for p in probabilities]
    mean = sum(entropies) / len(entropies)
    if isinstance(term, ConfidencePenalty):
        assert min(entropies) < term.threshold < max(entropies)
        return sum(max(0.0, term.threshold - h) for h in entropies) / len(entropies), mean
    return (mean if term.mode == "penalty" else -mean), mean


@pytest.mark.parametrize("need", ["projection", "logits"])
@pytest.mark.parametrize("term", TERMS, ids=repr)
def test_it_is_exact_over_the_whole_vocabulary(term: Any, need: str) -> None:
    given: list[Any] = projections()
    if need == "logits":
        given = [each.logits() for each in given]
    pipeline = Pipeline(no_loss, [RegularizerSpec(term, 1.0, "term")], gives=(need,))
    output = pipeline.compute(FIXED, LOGPROBS, given={need: given})
    logits = [each.logits() if need == "projection" else each for each in given]
    value, entropy = expected(term, logits)
    found = output.regularizers["term"]
    assert found.value == pytest.approx(value, rel=1e-10)
    assert found.custom == {"entropy": pytest.approx(entropy, rel=1e-10)}
    assert found.grad_space == need
    assert all(bool((row == 0).all()) for row in output.gradients)
    if need == "projection":
        return
    for d, row in enumerate(output.extra_gradients["logits"]):
        for at in [(0, 1), (1, 3), (2, 0)]:
            sides = []
            for step in (1e-5, -1e-5):
                moved = [each.clone() for each in logits]
                moved[d][at] += step
                sides.append(expected(term, moved)[0])
            assert row[at].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=1e-8)


def of_length(*lengths: int) -> list[Any]:
    return [plain(weights=[1.0] * n, target_tokens=[1] * n) for n in lengths]


@pytest.mark.parametrize("term", [Entropy(), ConfidencePenalty()])
def test_small_batches_are_computed_from_logits_and_large_ones_from_the_projection(
    term: Any,
) -> None:
    """All tokens have logits, those that do not count too: 512 over a vocabulary not known."""
    spec, gives = RegularizerSpec(term, 2.0), ("hidden_states", "logits", "projection")
    for lengths, need in (((3, 509), "logits"), ((3, 510), "projection")):
        assert spec.for_data(of_length(*lengths), gives).needs == (need,)
        for only in ("logits", "projection"):
            assert spec.for_data(of_length(*lengths), (only,)).needs == (only,)
    masked = [plain(weights=[0.0] * 600, target_tokens=[1] * 600)]
    assert spec.for_data(masked, gives).needs == ("projection",)
    of_unknown_length = [plain(weights=[1.0])]
    assert spec.for_data(of_unknown_length, gives).needs == ("projection",)
    assert spec.for_data(SAMPLED, gives) is spec


def test_a_known_vocabulary_decides_what_a_small_batch_is() -> None:
    gives = ("logits", "projection")
    term = Entropy(vocabulary=2**15)
    assert term.needs_for(of_length(2000, 48), gives) == ("logits",)
    assert term.needs_for(of_length(2000, 49), gives) == ("projection",)


@pytest.mark.parametrize("term", [Entropy(mode="bonus"), ConfidencePenalty(threshold=1.5)])
def test_projections_of_several_layers_are_computed_one_by_one(term: Any) -> None:
    """Of one layer, the tokens that count are computed together; the numbers are the same."""
    shared = projections()
    apart = [Projection(p.hidden, p.weight.clone(), p.bias) for p in shared]
    for p in (*shared, *apart):
        p.hidden.requires_grad_()
        p.weight.requires_grad_()
    losses = [term.compute(FIXED, LOGPROBS, projection=given)[0] for given in (shared, apart)]
    value, _ = expected(term, [p.logits() for p in shared])
    for loss in losses:
        assert loss.item() == pytest.approx(value, rel=1e-10)
        loss.backward()
    for one, other in zip(shared, apart, strict=True):
        torch.testing.assert_close(one.hidden.grad, other.hidden.grad, rtol=1e-9, atol=1e-12)
    total = torch.stack([p.weight.grad for p in apart]).sum(0)
    torch.testing.assert_close(shared[0].weight.grad, total, rtol=1e-9, atol=1e-12)


def test_without_a_token_that_counts_there_is_no_entropy() -> None:
    data = [plain(weights=[0.0] * len(w), target_tokens=[1] * len(w)) for w in WEIGHTS]
    assert Entropy().compute(data, LOGPROBS, projection=projections()) is None


def test_it_says_once_that_nothing_is_compared_with_it() -> None:
    spec = RegularizerSpec(Entropy(), 0.1)
    meant = RegularizerSpec(Entropy(), 0.1, needs=("logits",))
    given = {"logits": [p.logits() for p in projections()]}
    quiet = [
        Pipeline(no_loss, [spec], gives=("logits",)),
        Pipeline(no_loss, [meant], track_grad_norms=True, gives=("logits",)),
        Pipeline(no_loss, [spec.measuring()], track_grad_norms=True, gives=("logits",)),
    ]
    for pipeline in quiet:
        pipeline.compute(FIXED, LOGPROBS, given=given)
    pipeline = Pipeline(no_loss, [spec], track_grad_norms=True, gives=("logits",))
    with pytest.warns(UncomparedTermWarning) as caught:
        pipeline.compute(FIXED, LOGPROBS, given=given)
    pipeline.compute(FIXED, LOGPROBS, given=given)
    (warning,) = caught
    assert str(warning.message) == (
        "regularizer 'entropy' reads logits with these data, and its gradient is with respect to "
        "that: it has no cosine with the base loss and is not in total_grad_norm. "
        "grad_space='parameters' compares it with the others; needs=('logits',) in its spec says "
        "that it is meant so."
    )
    assert warning.filename == __file__


def test_the_gradient_of_projections_is_that_of_the_logits() -> None:
    leaves = [
        Projection(p.hidden.clone().requires_grad_(), p.weight, p.bias) for p in projections()
    ]
    spec = RegularizerSpec(Entropy(), 2.0)
    pipeline = Pipeline(no_loss, [spec], gives=("projection",))
    output = pipeline.compute(FIXED, LOGPROBS, given={"projection": leaves})
    rows = torch.cat(
        [p.logits()[torch.tensor(w) != 0] for p, w in zip(leaves, WEIGHTS, strict=True)]
    ).log_softmax(-1)
    total = 2.0 * -(rows.exp() * rows).sum(-1).mean()
    for own, leaf in zip(output.extra_gradients["projection"], leaves, strict=True):
        (gradient,) = torch.autograd.grad(total, leaf.hidden, retain_graph=True)
        torch.testing.assert_close(own.hidden, gradient, rtol=1e-9, atol=1e-12)


CURES = (
    "an entropy from log-probs [T] takes tokens that the model sampled, and the data have no "
    "sampling log-probs, in the field 'logprobs': -log p of fixed tokens is their NLL. Train on "
    "steelyard.engine, where it is computed exactly over the whole vocabulary, or give the data "
    "their sampling log-probs, importance=... or [T, K] targets. For logits of your own there is "
    "steelyard.penalties.from_logits.entropy."
)


@pytest.mark.parametrize("term", [Entropy(mode="bonus"), ConfidencePenalty()])
def test_without_logits_fixed_data_are_refused(term: Any) -> None:
    with pytest.raises(InputError) as caught:
        term.compute(FIXED, LOGPROBS)
    assert str(caught.value) == CURES
    with pytest.raises(TermError, match="takes tokens that the model sampled"):
        Pipeline(no_loss, [RegularizerSpec(term, 0.1)]).compute(FIXED, LOGPROBS)
    with pytest.raises(InputError, match="takes tokens that the model sampled"):
        term.per_datum(FIXED, [row.shape for row in LOGPROBS])


def test_whole_sequences_of_fixed_data_are_refused_with_logits_too() -> None:
    term, given = Entropy(level="sequence"), {"projection": projections()}
    assert term.needs_for(FIXED, ("projection",)) == ()
    pipeline = Pipeline(no_loss, [RegularizerSpec(term, 0.1)], gives=("projection",))
    with pytest.raises(TermError, match="level='sequence' takes sequences that the model sampled"):
        pipeline.compute(FIXED, LOGPROBS, given=given)
    with pytest.raises(InputError, match="level='sequence' takes sequences"):
        term.per_datum(FIXED, [row.shape for row in LOGPROBS])
    for option in ({"level": "sequence"}, {"importance": "weights"}):
        explicit = RegularizerSpec(Entropy(**option), 0.1, needs=("projection",))  # type: ignore[arg-type]
        pipeline = Pipeline(no_loss, [explicit], gives=("projection",))
        with pytest.raises(TermError, match=r"for logits, which are .*: leave needs out of the sp"):
            pipeline.compute(SAMPLED, LOGPROBS, given=given)


@pytest.mark.parametrize("term", [Entropy(), ConfidencePenalty(threshold=3.0)])
def test_sampled_tokens_and_no_data_are_estimated(term: Any) -> None:
    value = {"entropy": 0.5, "confidence_penalty": 2.5}[term.name]
    for data in (SAMPLED, []):
        assert term.compute(data, LOGPROBS)[0].item() == pytest.approx(value)
    assert term.compute_sampled(FIXED, LOGPROBS)[0].item() == pytest.approx(value)
    unasked: list[Any] = [SAMPLED, [], None, 3]
    for data in unasked:
        assert term.needs_for(data, ("projection",)) == ()
    single = term.compute(None, LOGPROBS[0])[0].item()
    assert single == pytest.approx(value)


@pytest.mark.parametrize("term", [Entropy(), ConfidencePenalty()])
def test_needs_in_the_spec_make_it_exact_for_sampled_tokens(term: Any) -> None:
    spec = RegularizerSpec(term, 0.1, needs=("logits",))
    assert spec.for_data(SAMPLED, ("logits",)) is spec
    pipeline = Pipeline(no_loss, [spec], gives=("logits",))
    (one,) = [each.logits() for each in projections()][:1]
    output = pipeline.compute(SAMPLED[:1], LOGPROBS[:1], given={"logits": one})
    probabilities = one[torch.tensor(WEIGHTS[0]) != 0].softmax(-1).numpy()
    mean = sum(float(scipy.stats.entropy(p)) for p in probabilities) / len(probabilities)
    assert output.regularizers[spec.name].custom["entropy"] == pytest.approx(mean)


def test_listed_classes_and_importance_take_fixed_data() -> None:
    classes = doubles([[-1.0, -2.0]] * 3, [[-0.5, -3.0]] * 5)
    listed = [plain(weights=w, target_tokens=[[1, 2]] * len(w)) for w in WEIGHTS]
    terms: list[Any] = [Entropy(), ConfidencePenalty()]
    for term in terms:
        assert term.needs_for(listed, ("projection",)) == ()
        assert term.compute(listed, classes)[0].item() > 0
        term.per_datum(listed, [row.shape for row in classes])
    weighed = [plain(weights=w, q=[-1.0] * len(w)) for w in WEIGHTS]
    term = Entropy(importance="q")
    assert term.needs_for(weighed, ("projection",)) == ()
    ratio = torch.tensor(0.5).exp().item()
    assert term.compute(weighed, LOGPROBS)[0].item() == pytest.approx(0.5 * ratio)
    term.per_datum(weighed, [row.shape for row in LOGPROBS])
    wrapped = TruncatedImportanceSampling(regularizer=Entropy(), importance="q", high=1.2)
    assert wrapped.compute(weighed, LOGPROBS)[0].item() == pytest.approx(0.5)


@pytest.mark.parametrize("term", [Entropy(), ConfidencePenalty()])
def test_a_batch_of_both_kinds_is_refused(term: Any) -> None:
    mixed = [SAMPLED[0], FIXED[1]]
    assert term.needs_for(mixed, ("projection",)) == ()
    pipeline = Pipeline(no_loss, [RegularizerSpec(term, 0.1)], gives=("projection",))
    with pytest.raises(TermError, match="got datum 0 with and datum 1 without"):
        pipeline.compute(mixed, LOGPROBS, given={"projection": projections()})


def test_a_wrapped_entropy_reads_what_it_needs() -> None:
    term = Adaptive(regularizer=Entropy(), target=1.0)
    assert Adaptive(regularizer="l2", target=1.0).needs_for(FIXED, ("projection",)) == ()
    spec = RegularizerSpec(term, 0.1, "adaptive").for_data(FIXED, ("projection",))
    assert spec.needs == ("projection",)
    value, _ = expected(Entropy(), [each.logits() for each in projections()])
    loss, _ = spec.fn.compute(FIXED, LOGPROBS, projection=projections())
    assert loss.item() == pytest.approx(value)
    assert spec.measuring().needs == ("projection",)


def test_a_numerical_gradient_does_not_reach_the_vocabulary() -> None:
    spec = RegularizerSpec(Entropy(), 0.1, gradient="numerical")
    with pytest.raises(SpecError, match="moves the log-probs alone and cannot go with needs"):
        spec.for_data(FIXED, ("projection",))
