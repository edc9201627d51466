"""Micro-batches in which no token counts: terms over tokens are left out, and training goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import RegularizerSpec
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import itself, reads
from steelyard.engine import tiny
from steelyard.integrations import term
from steelyard.integrations.huggingface.accumulation import StepState
from steelyard.penalties import from_logits
from steelyard.regularizers import Adaptive, KLToReference
from tests.integrations.huggingface.test_trl import Recorder
from tests.integrations.huggingface.training import (
    Batch,
    Collator,
    RegularizedTrainer,
    arguments,
    assert_same_weights,
    entropy,
    rows,
    surprise,
)
from tests.integrations.huggingface.trl_trainers import END, build, predictions, sequences

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


def explore(completion_entropy: Tensor, completion_mask: Tensor) -> Tensor:
    """The term of docs/trl.md."""
    return -completion_entropy.sum() / completion_mask.sum()


def size(parameters: Mapping[str, Tensor]) -> Tensor:
    return parameters["lm_head.weight"].square().mean()


GRPO_TERMS = [
    term(explore, 0.3, "explore"),
    RegularizerSpec(KLToReference(), 0.1, "kl"),
    term(from_logits.z_loss, 0.05, "z", inputs="projection"),
    term(size, 0.2, "size"),
]


def test_grpo_trains_on_when_every_answer_is_truncated_and_masked(tmp_path: Path) -> None:
    trainer = build(
        "GRPO",
        tmp_path,
        2,
        beta=1e-9,
        mask_truncated_completions=True,
        generation_kwargs={"suppress_tokens": [END]},
        max_steps=2,
        terms=GRPO_TERMS,
        term_options={"track_grad_norms": True},
    )
    recorder = Recorder(trainer)
    trainer.train()
    assert not any(batch["completion_mask"].any() for batch in recorder.batches)
    assert trainer.state.global_step == 2
    log = trainer.state.log_history[1]
    assert math.isfinite(log["loss"])
    assert set(trainer.regularizers.composite.output.not_run) == {"explore", "kl", "z"}
    assert log["regularizers/size/contribution"] == pytest.approx(0.2 * size_of(trainer), rel=1e-5)
    assert not any(key.startswith("regularizers/explore") for key in log)


def size_of(trainer: Any) -> float:
    return size(dict(trainer.model.named_parameters())).item()


def test_a_masked_micro_batch_of_grpo_is_left_out_of_the_others(tmp_path: Path) -> None:
    trainer = build("GRPO", tmp_path, 4, beta=1e-9, terms=GRPO_TERMS)
    recorder, own = Recorder(trainer), trainer.compute_loss

    def masked(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if len(recorder.batches) in (1, 2):
            inputs = {**inputs, "completion_mask": torch.zeros_like(inputs["completion_mask"])}
        return own(model, inputs, *args, **kwargs)

    trainer.compute_loss = masked
    trainer.train()
    log, value = trainer.state.log_history[0], 0.0
    for batch in (recorder.batches[0], recorder.batches[3]):
        logits, _ = predictions(trainer.model, sequences("GRPO", batch), 0.7)
        logprobs = logits.log_softmax(-1)
        value += (logprobs.exp() * logprobs).sum(-1).mean().item()
    assert log["regularizers/explore/value"] == pytest.approx(value / 2, rel=1e-5)
    assert log["regularizers/explore/contribution"] == pytest.approx(0.3 * value / 4, rel=1e-5)
    added = sum(log[f"regularizers/{spec.name}/contribution"] for spec in GRPO_TERMS)
    assert log["base_loss/value"] + added == pytest.approx(log["loss"], rel=1e-5)


def without_labels(row: Batch) -> Batch:
    return {**row, "labels": torch.full_like(row["labels"], -100)}


def trained(folder: Path, data: Sequence[Batch], accumulation: int = 2, **changed: Any) -> Any:
    trainer = RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=arguments(
            folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulation,
            train_sampling_strategy="sequential",
            max_steps=1,
        ),
        train_dataset=list(data),
        data_collator=Collator(),
        **changed,
    )
    trainer.train()
    return trainer


TERMS = [
    term(entropy, 0.3, "labelled"),
    RegularizerSpec(surprise, 0.02, "surprise"),
    term(size, 0.2, "size"),
    term(lambda hidden_states: hidden_states[-1].square().mean(), 0.1, "hidden"),
]


def test_a_row_without_labels_adds_nothing_to_the_step(tmp_path: Path) -> None:
    (row, other) = rows([6, 9])
    both = trained(tmp_path, [row, without_labels(other)], terms=TERMS)
    alone = trained(tmp_path, [row], 1, terms=TERMS)
    assert both.regularizers.composite.output.not_run == ("labelled", "surprise")
    assert_same_weights(both.model, alone.model)
    found, expected = both.state.log_history[0], alone.state.log_history[0]
    names = [f"regularizers/{spec.name}/contribution" for spec in TERMS]
    for name in ["loss", "base_loss/value", *names]:
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_step_without_any_label_leaves_the_terms_at_zero(tmp_path: Path) -> None:
    """The trainer's own loss is 0/0 there; one that is 0 stands for TRL's, which clamps."""

    class Clamped(RegularizedTrainer):
        pass

    def clamped(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        total: Tensor = 0.0 * outputs["logits"].sum()
        return total

    data = [without_labels(row) for row in rows([6, 9])]
    trainer = trained(tmp_path, data, terms=TERMS, compute_loss_func=clamped)
    assert_same_weights(trainer.model, tiny.build(torch.float32))
    assert trainer.state.log_history[0]["loss"] == 0.0


def test_a_term_over_all_logits_runs_if_a_batch_has_no_labels(tmp_path: Path) -> None:
    trainer = build(
        "Reward", tmp_path, terms=[term(lambda logits: logits.square().mean(), 0.1, "z")]
    )
    trainer.train()
    assert "regularizers/z/value" in trainer.state.log_history[0]


@pytest.mark.parametrize("calls", [[()], [(), ("adaptive",)], [("adaptive",), ()]])
def test_state_moves_by_the_micro_batches_that_were_measured(calls: list[tuple[str, ...]]) -> None:
    adaptive = Adaptive(regularizer="l1", target=1.0, rate=0.5, clip=1.0)
    composite = CompositeLoss(
        reads(itself, "loss"), [term(adaptive, 1.0, "adaptive", inputs=("data", "logprobs"))]
    )
    state = StepState(composite)
    for unmeasured in calls:
        composite.unmeasured = unmeasured
        state.begin_micro_batch()
        row = torch.tensor([1.4], requires_grad=True)
        composite(loss=row.sum(), data=[], logprobs=[row])
        state.end_micro_batch()
    state.end_step()
    assert adaptive.multiplier == pytest.approx(1 + 0.5 * 0.4)


def test_a_state_stays_if_no_micro_batch_was_measured() -> None:
    adaptive = Adaptive(regularizer="l1", target=1.0)
    composite = CompositeLoss(
        reads(itself, "loss"), [term(adaptive, 1.0, "adaptive", inputs=("data", "logprobs"))]
    )
    composite.unmeasured = ("adaptive",)
    state, before = StepState(composite), composite.get_extra_state()["terms"]
    for _ in range(2):
        state.begin_micro_batch()
        composite(loss=torch.ones((), requires_grad=True))
        state.end_micro_batch()
    state.end_step()
    assert composite.get_extra_state()["terms"] == before
