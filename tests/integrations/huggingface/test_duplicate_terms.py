"""A loss that the trainer has, and that a term adds once more: KL, entropy, load balancing."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import RegularizerSpec, penalties
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import itself, reads
from steelyard.errors import InputError, SpecError
from steelyard.integrations import term
from steelyard.integrations.huggingface.completion_inputs import reads_reference_of_data
from steelyard.integrations.huggingface.duplicate_terms import (
    check_duplicate_terms,
)
from steelyard.integrations.huggingface.trainer_kinds import KINDS
from steelyard.penalties import from_logits
from steelyard.regularizers import (
    L1,
    Adaptive,
    ConfidencePenalty,
    Entropy,
    JSToReference,
    KLToReference,
)
from tests.integrations.huggingface.training import Collator, RegularizedTrainer, arguments, rows
from tests.integrations.huggingface.trl_trainers import build, mixture_of_experts

GRPO = KINDS["GRPOTrainer"]


def distance(completion_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return (completion_logprobs - reference_logprobs).square().mean()


def check(spec: RegularizerSpec, *, beta: float = 0.04, kind: Any = GRPO, **arguments: Any) -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(beta=beta, **arguments))
    check_duplicate_terms(trainer, kind, CompositeLoss(reads(itself, "loss"), [spec]))


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


ENTROPIES = [
    RegularizerSpec(Entropy(mode="bonus"), 0.1, "mine"),
    RegularizerSpec(Entropy(), name="mine", at_least=2.0),
    RegularizerSpec(Adaptive(regularizer=Entropy(), target=0.1), 0.1, "mine"),
    term(Entropy(mode="bonus"), 0.1, "mine", inputs=("data", "logprobs")),
    term(from_logits.entropy, 0.1, "mine", inputs="projection"),
    term(partial(from_logits.entropy, temperature=0.5), 0.1, "mine", inputs="completion_logits"),
    term("entropy", 0.1, "mine", inputs="completion_logits"),
]


@pytest.mark.parametrize("spec", ENTROPIES)
def test_the_same_entropy_twice_is_an_error(spec: RegularizerSpec) -> None:
    message = (
        r"^GRPOTrainer has an entropy bonus with entropy_coef=0\.01, and regularizer 'mine' adds "
        r"the same entropy once more: remove the term, or set entropy_coef=0\.$"
    )
    trainer = type("GRPOTrainer", (), {"args": SimpleNamespace(beta=0.0, entropy_coef=0.01)})()
    composite = CompositeLoss(reads(itself, "loss"), [spec])
    with pytest.raises(SpecError, match=message):
        check_duplicate_terms(trainer, GRPO, composite)
    with pytest.raises(SpecError, match=r"set entropy_coef=0 and use_adaptive_entropy=False\.$"):
        check(spec, beta=0.0, entropy_coef=0.0, use_adaptive_entropy=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(spec, beta=0.0, entropy_coef=0.0, use_adaptive_entropy=False)
        check(spec, beta=0.04)  # a trainer without these arguments
        check(spec, kind=None, entropy_coef=0.01)


def explore(completion_entropy: Tensor, completion_mask: Tensor) -> Tensor:
    return -completion_entropy.sum() / completion_mask.sum()


@pytest.mark.parametrize(
    "spec", [term(explore, 0.1, "mine"), RegularizerSpec(ConfidencePenalty(), 0.1, "mine")]
)
def test_another_term_over_the_entropy_is_a_warning(spec: RegularizerSpec) -> None:
    with pytest.warns(UserWarning, match="entropy_coef=0.01, and regularizer 'mine' reads this"):
        check(spec, beta=0.0, entropy_coef=0.01)


def test_a_term_without_an_entropy_is_none_of_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(RegularizerSpec(L1(), 0.1), beta=0.0, entropy_coef=0.01)
        # Of something that is not the policy.
        check(term("entropy", 0.1, inputs="activations.gate"), beta=0.0, entropy_coef=0.01)


@pytest.mark.parametrize("more", [{"entropy_coef": 0.02}, {"use_adaptive_entropy": True}])
def test_training_does_not_begin_with_a_bonus_of_grpo(more: dict[str, Any], tmp_path: Path) -> None:
    trainer = build("GRPO", tmp_path, beta=0.0, terms=ENTROPIES[:1], **more)
    with pytest.raises(SpecError, match=r"^GRPOTrainer has an entropy bonus with .* 'mine' adds"):
        trainer.train()


def balance(aux_loss: Tensor) -> Tensor:
    return aux_loss


def squares(router_logits: Any) -> Tensor:
    return sum((x.logsumexp(-1).square().mean() for x in router_logits), torch.zeros(()))


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO", "ORPO"])
def test_the_router_of_a_mixture_of_experts(name: str, tmp_path: Path) -> None:
    def trained(coefficient: float, fn: Any) -> Any:
        more: dict[str, Any] = {"router_aux_loss_coef": coefficient}
        model = mixture_of_experts()
        if name == "ORPO":  # its config has no coefficient
            model = mixture_of_experts(output_router_logits=True, **more)
            more = {}
        if name == "GRPO":
            more["beta"] = 0.0
        return build(name, tmp_path, language_model=model, terms=[term(fn, 0.1, "mine")], **more)

    message = r"router_aux_loss_coef=0\.02, and regularizer 'mine' adds the same loss once more"
    with pytest.raises(SpecError, match=message):
        trained(0.02, balance).train()
    if name == "ORPO":  # the fused head of the others returns no router_logits
        with pytest.warns(UserWarning, match="regularizer 'mine' reads this router too"):
            trained(0.02, squares).train()
    trainer = trained(1e-9, balance)
    trainer.train()
    assert trainer.state.log_history[0]["regularizers/mine/value"] > 0.5


def test_the_loss_of_the_model_itself(tmp_path: Path) -> None:
    def trained(coefficient: float, *, requested: bool = True, **more: Any) -> Any:
        return RegularizedTrainer(
            model=mixture_of_experts(
                output_router_logits=requested, router_aux_loss_coef=coefficient
            ),
            args=arguments(tmp_path, max_steps=1, **more),
            train_dataset=rows([5, 9, 4, 6]),
            data_collator=Collator(),
            terms=[term(balance, 0.1, "mine")],
        )

    with pytest.raises(SpecError, match=r"^Trainer has a load-.* in the config that the model"):
        trained(0.02).train()
    for allowed in (trained(1e-9), trained(0.02, label_smoothing_factor=0.1)):
        allowed.train()
        assert allowed.state.log_history[0]["regularizers/mine/value"] > 0.5
    with pytest.raises(InputError, match="'aux_loss', which is not there"):
        trained(0.02, requested=False).train()


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor`:FutureWarning")
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_with_smoothed_labels_has_no_loss_of_the_router(loss_type: str, tmp_path: Path) -> None:
    trainer = build(
        "SFT",
        tmp_path,
        language_model=mixture_of_experts(),
        terms=[term(balance, 0.1, "mine")],
        label_smoothing_factor=0.1,
        loss_type=loss_type,
        router_aux_loss_coef=0.02,
    )
    if loss_type == "dft":  # which ignores the smoothing
        with pytest.raises(SpecError, match="adds the same loss once more"):
            trainer.train()
        return
    composite = trainer.regularizers.composite
    check_duplicate_terms(trainer, KINDS["SFTTrainer"], composite)
