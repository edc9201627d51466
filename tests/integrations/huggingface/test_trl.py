"""Terms in TRL's real trainers: gradients and logs against a plain recomputation."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import TrainerCallback

from steelyard import RegularizerSpec
from steelyard.errors import InputError, TermError
from steelyard.integrations import term
from steelyard.penalties import from_logits
from steelyard.regularizers import Entropy, KLToReference
from tests.integrations.huggingface.trl_trainers import (
    TRAINERS,
    build,
    model,
    predictions,
    sequences,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
WITH_REFERENCE = ("DPO", "KTO", "GRPO", "RLOO", "GKD", "Distillation")
SAMPLES = ("GRPO", "RLOO", "Distillation")  # completions of the model that is trained
WITH_REFERENCE_LOGITS = ("DPO", "KTO", "GKD", "Distillation")
BY_TOKENS = ("SFT", "GKD")  # the loss is divided by the tokens of the whole step
KL_OF_OUR_OWN: dict[str, dict[str, Any]] = {name: {"beta": 1e-9} for name in ("GRPO", "RLOO")}


def mean(values: Tensor, mask: Tensor) -> Tensor:
    assert values.shape == mask.shape
    assert not values[~mask].any()
    return values.sum() / mask.sum()


def square(completion_logprobs: Tensor, completion_mask: Tensor) -> Tensor:
    return mean(completion_logprobs.square(), completion_mask)


def z(completion_logits: Tensor) -> Tensor:
    return completion_logits.logsumexp(-1).square().mean()


def distance(
    completion_logprobs: Tensor, reference_logprobs: Tensor, completion_mask: Tensor
) -> Tensor:
    return mean((completion_logprobs - reference_logprobs).square(), completion_mask)


def terms(name: str) -> list[RegularizerSpec]:
    """One term for each input that a trainer has."""
    found = [
        term(square, 0.2, "square"),
        term(mean, 0.3, "entropy", inputs=("completion_entropy", "completion_mask")),
        term(z, 0.05, "z"),
        term(from_logits.entropy, 0.4, "projected", inputs="projection"),
    ]
    if name in WITH_REFERENCE:
        found.append(RegularizerSpec(KLToReference(), 0.1, "kl"))
        found.append(term(distance, 0.07, "distance"))
    if name in WITH_REFERENCE_LOGITS:
        inputs = ("completion_logits", "reference_logits")
        found.append(term(from_logits.kl, 0.15, "whole", inputs=inputs))
    return found


def by_hand(name: str, logits: Tensor, ids: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
    """The same values from the logits of all tokens that count."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(-1, ids[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    values = {
        "square": own.square().mean(),
        "entropy": entropy,
        "z": logits.logsumexp(-1).square().mean(),
        "projected": entropy,
    }
    if reference is not None:
        other = reference.log_softmax(-1)
        gap = own - other.gather(-1, ids[:, None])[:, 0]
        k2 = gap.square().mean() / 2
        values |= {"kl": k2, "distance": gap.square().mean()}
        if name in SAMPLES:  # the value of k3, with the gradient of k2
            k3 = torch.expm1(-gap).mean() + gap.mean()
            values["kl"] = k3.detach() + k2 - k2.detach()
        if name in WITH_REFERENCE_LOGITS:
            values["whole"] = functional.kl_div(
                other, logprobs, log_target=True, reduction="batchmean"
            )
    return values


class Recorder(TrainerCallback):
    """Records the micro-batches of a trainer and the gradients of each optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        self.gradients: dict[str, Tensor] = {}
        own = trainer.compute_loss

        def compute_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self.batches.append(dict(inputs))
            return own(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        named = rest["model"].named_parameters()
        self.gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}


def step(trainer: Any, recorder: Recorder, *, regularized: bool) -> dict[str, Tensor]:
    """Gradients of one step; the learning rate is 0, and the seed the same."""
    composite = trainer.regularizers.composite
    for spec in composite.specs:
        composite.set_enabled(spec.name, regularized)
    if not regularized:
        trainer.remove_callback(trainer.regularizers)
    recorder.batches.clear()
    transformers.set_seed(0)
    random.seed(0)
    trainer.train()
    return recorder.gradients


def reference_of(name: str, *, peft: bool) -> Any:
    """The reference model of a trainer; None if it has none."""
    if name not in WITH_REFERENCE:
        return None
    if peft and name not in ("GKD", "Distillation"):
        return model()  # the adapter is switched off
    return model(1)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    error = sum((found[n] - expected[n]).double().square().sum() for n in expected) ** 0.5
    size = sum(expected[n].double().square().sum() for n in expected) ** 0.5
    assert size > 0.1
    assert error / size < 3e-6  # float32; the base gradient was subtracted


@pytest.mark.parametrize(("accumulation", "peft"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("name", TRAINERS)
def test_gradients_and_logs_equal_those_by_hand(
    name: str, accumulation: int, peft: bool, tmp_path: Path
) -> None:
    trainer = build(
        name, tmp_path, accumulation, peft=peft, terms=terms(name), **KL_OF_OUR_OWN.get(name, {})
    )
    recorder = Recorder(trainer)
    found = step(trainer, recorder, regularized=True)
    log, batches = trainer.state.log_history[0], list(recorder.batches)
    plain = step(trainer, recorder, regularized=False)

    read = [sequences(name, batch) for batch in batches]
    assert len({len(tokens.ids) for batch in read for tokens in batch}) > 1  # there was padding
    counts = [sum(int(tokens.counted[1:].sum()) for tokens in batch) for batch in read]
    weights = {spec.name: spec.weight_at(0) for spec in terms(name)}
    trained = trainer.accelerator.unwrap_model(trainer.model)
    trained.zero_grad()
    reference = reference_of(name, peft=peft)
    values = dict.fromkeys(weights, 0.0)
    for batch, count in zip(read, counts, strict=True):
        share = count / sum(counts) if name in BY_TOKENS else 1 / accumulation
        temperature = TRAINERS[name].temperature
        logits, ids = predictions(trained, batch, temperature)
        others = None
        if reference is not None:
            with torch.no_grad():
                others = predictions(reference, batch, temperature)[0]
        by_name = by_hand(name, logits, ids, others)
        assert by_name.keys() == weights.keys()
        total: Any = share * sum(weights[key] * value for key, value in by_name.items())
        total.backward()
        for key, found_value in by_name.items():
            values[key] += share * found_value.item()
    expected = {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}
    assert_equal({n: found[n] - plain[n] for n in expected}, expected)

    for key, value in values.items():
        assert log[f"regularizers/{key}/value"] == pytest.approx(value, rel=1e-5)
        assert log[f"regularizers/{key}/weight"] == pytest.approx(weights[key])
    contributions = [log[f"regularizers/{key}/contribution"] for key in weights]
    assert contributions == pytest.approx([weights[k] * v for k, v in values.items()], rel=1e-5)
    assert log["base_loss/value"] + sum(contributions) == pytest.approx(log["loss"], rel=1e-5)


def test_sft_without_its_fused_head(tmp_path: Path) -> None:
    """Label smoothing needs the logits, which the trainer then computes without labels."""
    trainer = build("SFT", tmp_path, 2, terms=terms("SFT"), label_smoothing_factor=0.1)
    recorder = Recorder(trainer)
    trainer.train()
    log = trainer.state.log_history[0]
    read = [sequences("SFT", batch) for batch in recorder.batches]
    every = [tokens for batch in read for tokens in batch]
    values = by_hand("SFT", *predictions(trainer.model, every, 1.0), None)
    for key, value in values.items():
        assert log[f"regularizers/{key}/value"] == pytest.approx(value.item(), rel=1e-5)


def test_gkd_on_policy_logs_values_as_they_are(tmp_path: Path) -> None:
    """Its loss is divided by the tokens of the data, although it is over the generated ones."""
    trainer = build("GKD", tmp_path, 2, terms=terms("SFT"), lmbda=1.0)
    recorder = Recorder(trainer)
    trainer.train()
    log = trainer.state.log_history[0]
    read = [sequences("GKD", batch) for batch in recorder.batches]
    every = [tokens for batch in read for tokens in batch]
    values = by_hand("SFT", *predictions(trainer.model, every, 1.0), None)
    shares = 0.0
    for key, value in values.items():
        assert log[f"regularizers/{key}/value"] == pytest.approx(value.item(), rel=1e-5)
        contribution = log[f"regularizers/{key}/contribution"]
        shares += contribution / (log[f"regularizers/{key}/weight"] * value.item())
    assert shares / len(values) != pytest.approx(1.0, abs=0.01)
    contributions = sum(log[f"regularizers/{key}/contribution"] for key in values)
    assert log["base_loss/value"] + contributions == pytest.approx(log["loss"], rel=1e-5)


def reward_trainer(folder: Path, *specs: RegularizerSpec) -> Any:
    return build("Reward", folder, 2, terms=specs)


def test_a_reward_model_has_scores_hidden_states_and_parameters(tmp_path: Path) -> None:
    def size(
        logits: Tensor, hidden_states: tuple[Tensor, ...], parameters: Mapping[str, Tensor]
    ) -> Tensor:
        assert logits.shape[1:] == (1,)
        return logits.square().mean() + hidden_states[-1].sum() + parameters["score.weight"].sum()

    trainer = reward_trainer(tmp_path, term(size, 0.5))
    recorder = Recorder(trainer)
    found = step(trainer, recorder, regularized=True)
    batches = list(recorder.batches)
    plain = step(trainer, recorder, regularized=False)
    trainer.model.zero_grad()
    for batch in batches:
        fields = {key: batch[key] for key in ("input_ids", "attention_mask")}
        outputs = trainer.model(**fields, output_hidden_states=True)
        parameters = dict(trainer.model.named_parameters())
        total: Any = 0.5 * size(outputs.logits, outputs.hidden_states, parameters) / 2
        total.backward()
    expected = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert_equal({n: found[n] - plain[n] for n in expected}, expected)


@pytest.mark.parametrize(
    ("name", "wanted", "more", "why"),
    [
        ("Reward", "completion_logprobs", {}, "scores whole sequences: read logits, hidden_stat"),
        ("Reward", "projection", {}, "scores whole sequences"),
        ("Reward", "data", {}, "scores whole sequences"),
        ("SFT", "reference_logprobs", {}, "runs no reference model"),
        ("ORPO", "reference_logits", {}, "runs no reference model"),
        ("DPO", "reference_logprobs", {"precompute_ref_log_probs": True}, "precompute_ref_log_p"),
        ("KTO", "reference_logprobs", {"precompute_ref_log_probs": True}, "precompute_ref_log_p"),
        ("GRPO", "reference_logprobs", {"beta": 0.0}, "only if beta is not 0"),
        ("RLOO", "reference_logits", {}, "keeps log-probs alone"),
    ],
)
def test_an_absent_input_names_the_trainer(
    name: str, wanted: str, more: Mapping[str, Any], why: str, tmp_path: Path
) -> None:
    spec = term(lambda value: value.sum(), 0.1, "mine", inputs=wanted)
    trainer = build(name, tmp_path, terms=[spec], **more)
    message = f"^{name}Trainer has no input '{wanted}', which regularizer 'mine' reads: it.*{why}"
    with pytest.raises(InputError, match=message):
        trainer.train()


def test_an_absent_input_that_a_term_can_do_without_is_no_error(tmp_path: Path) -> None:
    seen = []

    def optional(
        completion_mask: Tensor, loss: Tensor, reference_logprobs: object = None
    ) -> Tensor:
        seen.append((completion_mask.dtype, reference_logprobs))
        return loss

    build("SFT", tmp_path, terms=[term(optional, 0.1)]).train()
    assert seen == [(torch.bool, None)]


def test_inputs_are_computed_only_when_a_term_is_due(tmp_path: Path) -> None:
    trainer = build("SFT", tmp_path, terms=[term(z, 0.1, every=2)], max_steps=3)
    rows: list[int] = []
    trainer.model.lm_head.register_forward_hook(lambda _m, _a, made: rows.append(made.shape[1]))
    recorder = Recorder(trainer)
    trainer.train()
    counts = [
        sum(int(tokens.counted[1:].sum()) for tokens in sequences("SFT", batch))
        for batch in recorder.batches
    ]
    assert rows == [counts[0], counts[2]]  # the fused head does not call the layer


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_an_entropy_of_what_the_model_sampled_is_estimated(name: str, tmp_path: Path) -> None:
    def surprise(completion_logprobs: Tensor, completion_mask: Tensor) -> Tensor:
        return -mean(completion_logprobs, completion_mask)

    terms = [RegularizerSpec(Entropy(), 0.1, "entropy"), term(surprise, 0.1, "surprise")]
    trainer = build(name, tmp_path, 1, terms=terms)
    trainer.train()
    log = trainer.state.log_history[0]
    expected = log["regularizers/surprise/value"]
    assert log["regularizers/entropy/value"] == pytest.approx(expected, rel=1e-5)


def test_an_entropy_of_fixed_data_is_refused(tmp_path: Path) -> None:
    trainer = build("SFT", tmp_path, 1, terms=[RegularizerSpec(Entropy(), 0.1, "entropy")])
    with pytest.raises(TermError, match=r"there is steelyard\.penalties\.from_logits\.entropy"):
        trainer.train()
