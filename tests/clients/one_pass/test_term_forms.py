"""Which terms lower; the table of docs/one_pass.md is compared with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard import Pipeline, RegularizerSpec, regularizers
from steelyard.clients.one_pass.loss_graph import UnsuitableTermError
from steelyard.clients.one_pass.term_forms import TermForms
from steelyard.composition.per_datum import PerDatum
from steelyard.composition.terms import Term
from steelyard.regularizers import L1, L2, EMADrift, OverlongPenalty

from .batches import LENGTHS, batch

SHAPES = [torch.Size([length]) for length in LENGTHS]
PAGE = Path(__file__).parents[3] / "docs" / "one_pass.md"


def term_of(fn: Any, gives: Any = (), **spec: Any) -> Term:
    spec = {"weight": 1.0, "name": "mine", **spec}
    if {"at_most", "at_least"} & spec.keys():
        del spec["weight"]
    pipeline = Pipeline(lambda _, rows: rows[0].sum(), [RegularizerSpec(fn, **spec)], gives=gives)
    return pipeline.due()[1]


def plain(_: Any, rows: Any) -> Any:
    return torch.cat(rows).sum()


async def later(_: Any, rows: Any) -> Any:
    return torch.cat(rows).sum()


def with_logits(_: Any, rows: Any, logits: Any) -> Any:
    return logits[0].sum() + rows[0].sum()


def test_a_ready_made_term_and_a_function_have_forms() -> None:
    for fn in (L1(), plain, OverlongPenalty(max_length=5, buffer=2)):
        form, key = TermForms().form_of(term_of(fn), batch(), SHAPES)
        assert isinstance(form, PerDatum)
        assert hash(key) is not None


def test_equal_terms_have_equal_keys() -> None:
    forms = TermForms()
    keys = [forms.form_of(term_of(fn), batch(), SHAPES)[1] for fn in (L1(), L1(), L2())]
    assert keys[0] == keys[1] != keys[2]


class Scaled:
    """A term whose attributes can be set."""

    scale = 1.0

    def compute(self, _: Any, rows: Any) -> Any:
        return self.scale * torch.cat(rows).sum()

    def per_datum(self, _: Any, __: Any) -> PerDatum:
        return PerDatum(lambda logprobs: self.scale * logprobs, reduction="sum")


def test_an_attribute_that_is_set_gives_another_key() -> None:
    forms, scaled = TermForms(), Scaled()
    keys = []
    for scaled.scale in (1.0, 2.0, 1.0):
        keys.append(forms.form_of(term_of(scaled), batch(), SHAPES)[1])
    assert keys[0] == keys[2] != keys[1]


class Doubled(Scaled):
    """It has another `compute`, and the form of its parent."""

    def compute(self, data: Any, rows: Any) -> Any:
        return 2 * super().compute(data, rows)


@pytest.mark.parametrize(
    ("term", "reason"),
    [
        (term_of(plain, at_most=3.0), "a bound, and its weight depends on this step's value"),
        (term_of(with_logits, needs=("logits",), gives=("logits",)), "it reads logits"),
        (term_of(plain, run_in="thread"), "it runs in a thread"),
        (term_of(plain, run_in="process"), "it runs in a process"),
        (term_of(later), "it runs in the event loop|it is a coroutine"),
        (term_of(plain, gradient="numerical"), "its gradient is 'numerical'"),
        (term_of(plain, gradient="score"), "its gradient is 'score'"),
        (term_of(L1(), gradient="none"), "its gradient is 'none'"),
        (term_of(plain, on_error="skip"), "on_error='skip'"),
        (term_of(Doubled()), "a compute of its own, and an inherited per_datum"),
        (term_of(EMADrift()), "it keeps state from step to step"),
        (term_of(L2(center="mean")), "center='mean' is the mean over the tokens of all data"),
        (term_of(regularizers.Consistency()), "no sum over data, or has no per_datum"),
    ],
)
def test_why_a_term_does_not_lower(term: Term, reason: str) -> None:
    with pytest.raises(UnsuitableTermError, match=reason) as caught:
        TermForms().form_of(term, batch(), SHAPES)
    assert caught.value.term == "mine"


# Options that a class needs.
OPTIONS: dict[str, dict[str, Any]] = {
    "OverlongPenalty": {"max_length": 5, "buffer": 2},
    "Adaptive": {"regularizer": "l1", "target": 1.0},
    "TruncatedImportanceSampling": {"regularizer": "l1"},
    "MaskedImportanceSampling": {"regularizer": "l1"},
    "WholeVocabulary": {"kind": "entropy"},
    "ExternalValidation": {"url": "http://127.0.0.1:9"},
    "LogicalConsistency": {"constraints": lambda *_: []},
    "TopologicalConsistency": {"points": lambda *_: [[0.0]]},
}


def lowers(name: str, width: int | None) -> bool:
    term = term_of(getattr(regularizers, name)(**OPTIONS.get(name, {})), gives=("logits",))
    shapes = SHAPES if width is None else [torch.Size([n, width]) for n in LENGTHS]
    try:
        TermForms().form_of(term, batch(width=width), shapes)
    except UnsuitableTermError:
        return False
    return True


def test_the_page_lists_every_term_as_it_is() -> None:
    row = re.compile(r"^\| `(\w+)` \| (yes|no) \| (yes|no) \|", re.MULTILINE)
    rows = row.findall(PAGE.read_text("utf-8"))
    listed = {name: (tokens == "yes", classes == "yes") for name, tokens, classes in rows}
    assert listed.keys() == set(regularizers.__all__)
    for name, (tokens, classes) in listed.items():
        assert (lowers(name, None), lowers(name, 5)) == (tokens, classes), name
