"""A KL penalty that the trainer has, and that a term adds once more."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from steelyard import RegularizerSpec, penalties
from steelyard.composition import CompositeLoss, itself, reads
from steelyard.errors import SpecError
from steelyard.integrations import term
from steelyard.integrations.huggingface.double_kl import check_single_kl, reads_reference_of_data
from steelyard.integrations.huggingface.trainers import KINDS
from steelyard.penalties import from_logits
from steelyard.regularizers import L1, Adaptive, JSToReference, KLToReference
from tests.integrations.huggingface.trl_trainers import build

GRPO = KINDS["GRPOTrainer"]


def distance(completion_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return (completion_logprobs - reference_logprobs).square().mean()


def check(spec: RegularizerSpec, *, beta: float = 0.04, kind: Any = GRPO) -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(beta=beta))
    check_single_kl(trainer, kind, CompositeLoss(reads(itself, "loss"), [spec]))


@pytest.mark.parametrize(
    "spec",
    [
        RegularizerSpec(KLToReference(), 0.1, "mine"),
        RegularizerSpec(Adaptive(regularizer=KLToReference(), target=0.1), 0.1, "mine"),
        term(KLToReference(), 0.1, "mine", inputs=("data", "logprobs")),
        term(from_logits.kl, 0.1, "mine", inputs=("completion_logits", "reference_logits")),
        term(
            penalties.kl_divergence,
            0.1,
            "mine",
            inputs=("completion_logprobs", "reference_logprobs"),
        ),
    ],
)
def test_the_same_kl_twice_is_an_error(spec: RegularizerSpec) -> None:
    message = r"beta=0\.04, and regularizer 'mine' adds the same KL once more: remove the term, or"
    with pytest.raises(SpecError, match=message):
        check(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(spec, beta=1e-9)
        check(spec, kind=KINDS["DPOTrainer"])  # there beta is no weight of a penalty
        check(spec, kind=None)


@pytest.mark.parametrize(
    "spec", [term(distance, 0.1, "mine"), RegularizerSpec(JSToReference(), 0.1, "mine")]
)
def test_another_term_over_the_reference_is_a_warning(spec: RegularizerSpec) -> None:
    with pytest.warns(UserWarning, match="'mine' reads this reference too"):
        check(spec)


def test_a_term_that_only_measures_is_none_of_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"weight": 0.0}, {"gradient": "none"}, {"enabled": False}):
            fields: dict[str, Any] = {"weight": 0.1, **options}
            check(RegularizerSpec(KLToReference(), fields.pop("weight"), "mine", **fields))
        check(RegularizerSpec(L1(), 0.1))
        check(RegularizerSpec(KLToReference(reference=lambda datum, index: [0.0]), 0.1))


def test_terms_that_read_the_reference_from_each_datum() -> None:
    assert reads_reference_of_data(RegularizerSpec(KLToReference(), 0.1))
    assert reads_reference_of_data(RegularizerSpec(JSToReference(), 0.1))
    assert not reads_reference_of_data(RegularizerSpec(L1(), 0.1))
    assert not reads_reference_of_data(term(distance, 0.1))


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_training_does_not_begin(name: str, tmp_path: Path) -> None:
    trainer = build(
        name, tmp_path, peft=True, terms=[RegularizerSpec(KLToReference(), 0.1, "mine")]
    )
    with pytest.raises(SpecError, match=rf"^{name}Trainer has a KL penalty .* beta=0\.3, and"):
        trainer.train()
