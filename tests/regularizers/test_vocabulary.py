"""Terms over whole distributions, against torch's own formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from steelyard import Pipeline, RegularizerSpec
from steelyard.errors import InputError, SpecError
from steelyard.regularizers import Adaptive, WholeVocabulary

LENGTHS, CLASSES = (3, 5), 7
WEIGHTS = [torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0])]
LOGPROBS = [torch.zeros(length) for length in LENGTHS]


def batch() -> tuple[list[dict[str, Any]], list[Tensor], list[Tensor], list[Tensor]]:
    torch.manual_seed(3)
    logits = [torch.randn(n, CLASSES, dtype=torch.float64) for n in LENGTHS]
    teacher = [torch.randn(n, CLASSES, dtype=torch.float64) for n in LENGTHS]
    targets = [torch.randint(0, CLASSES, (n,)) for n in LENGTHS]
    data = [
        {"loss_fn_inputs": {"weights": w, "target_tokens": t, "reference_logits": r}}
        for w, t, r in zip(WEIGHTS, targets, teacher, strict=True)
    ]
    return data, logits, teacher, targets


def entropies(z: Tensor, _r: Tensor, _t: Tensor) -> Tensor:
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)


def reverse_kl(z: Tensor, r: Tensor, _t: Tensor) -> Tensor:
    both = functional.kl_div(
        z.log_softmax(-1), r.log_softmax(-1), log_target=True, reduction="none"
    )
    return both.sum(-1)


def js(z: Tensor, r: Tensor, _t: Tensor) -> Tensor:
    p, q = z.softmax(-1), r.softmax(-1)
    half = (p + q) / 2
    return sum(0.5 * (x * (x / half).log()).sum(-1) for x in (p, q))  # type: ignore[return-value]


def squared(z: Tensor, _r: Tensor, _t: Tensor) -> Tensor:
    return z.logsumexp(-1).square()


def nll(z: Tensor, _r: Tensor, t: Tensor) -> Tensor:
    return functional.cross_entropy(z, t, reduction="none")


KINDS: list[tuple[dict[str, Any], Callable[..., Tensor]]] = [
    ({"kind": "entropy"}, entropies),
    ({"kind": "entropy", "options": {"mode": "bonus"}}, lambda *x: -entropies(*x)),
    ({"kind": "kl", "options": {"direction": "reverse"}}, reverse_kl),
    ({"kind": "js"}, js),
    ({"kind": "z_loss"}, squared),
    ({"kind": "cross_entropy"}, nll),
]


@pytest.mark.parametrize(("options", "formula"), KINDS)
def test_the_mean_over_the_tokens_that_count(
    options: dict[str, Any], formula: Callable[..., Tensor]
) -> None:
    data, logits, teacher, targets = batch()
    leaves = [z.clone().requires_grad_() for z in logits]
    loss = WholeVocabulary(**options).compute(data, LOGPROBS, logits=leaves)
    found = torch.autograd.grad(loss, leaves)
    again = [z.clone().requires_grad_() for z in logits]
    each = [formula(z, r, t) for z, r, t in zip(again, teacher, targets, strict=True)]
    wanted = torch.cat([x[w != 0] for x, w in zip(each, WEIGHTS, strict=True)]).mean()
    torch.testing.assert_close(loss.double(), wanted)
    for a, b in zip(found, torch.autograd.grad(wanted, again), strict=True):
        torch.testing.assert_close(a, b)


def test_one_tensor_and_a_reference_from_a_function() -> None:
    _, logits, teacher, _ = batch()
    term = WholeVocabulary(kind="js", reference=lambda _datum, index: teacher[index])
    loss = term.compute([], LOGPROBS[0], logits=logits[0])
    torch.testing.assert_close(loss.double(), js(logits[0], teacher[0], teacher[0]).mean())


def test_a_missing_reference() -> None:
    with pytest.raises(InputError, match="datum 0 must have the field 'reference_logits'"):
        WholeVocabulary(kind="kl").compute([{}], LOGPROBS[:1], logits=[torch.zeros(3, CLASSES)])


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("entropy", {"mode": "more"}, "mode must be"),
        ("entropy", {"direction": "reverse"}, "direction"),
        ("kl", {"temperature": 0}, "temperature must be"),
        ("js", {"reduction": "sum"}, "reduction"),
        ("js", {"mask": None}, "mask"),
        ("js", 3, "must be a mapping"),
    ],
)
def test_invalid_options_of_the_function(kind: Any, options: Any, why: str) -> None:
    with pytest.raises(SpecError, match=f"(?s)options must be those of from_logits.{kind}.*{why}"):
        WholeVocabulary(kind=kind, options=options)


def test_an_unknown_kind() -> None:
    with pytest.raises(SpecError, match="kind must be one of 'cross_entropy', 'entropy', 'js'"):
        WholeVocabulary(kind="perplexity")  # type: ignore[arg-type]


def test_needs_of_the_term_and_of_its_spec() -> None:
    own = WholeVocabulary(kind="js")
    assert RegularizerSpec(own, 1.0).needs == ("logits",)
    both = ("logits", "hidden_states")  # what a spec says goes first
    assert RegularizerSpec(own, 1.0, needs=both).needs == both
    held = RegularizerSpec(Adaptive(regularizer=own, target=0.1), 1.0)
    assert held.needs == ("logits",)
    with pytest.raises(SpecError, match=r"\['logits'\] is not: train on steelyard.engine"):
        Pipeline(lambda _d, lp: lp[0].sum(), [RegularizerSpec(own, 1.0)])
