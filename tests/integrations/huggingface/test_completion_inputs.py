"""Inputs of the completion in trainers that are known and in those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.errors import InputError
from steelyard.integrations import term
from steelyard.integrations.huggingface import RegularizerCallback, RegularizerMixin
from steelyard.integrations.huggingface.causal_lm import Forward
from steelyard.integrations.huggingface.completion import Completion
from steelyard.integrations.huggingface.completion_inputs import (
    check_available,
    sampling_logprobs,
)
from steelyard.integrations.huggingface.trainer_kinds import KINDS
from tests.integrations.huggingface.training import Collator, arguments, entropy, rows, surprise


class Scaled(Trainer):
    """A trainer with a loss of its own."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        inputs.pop("note", None)
        return 2 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def trained(folder: Path, *specs: RegularizerSpec, **changed: Any) -> Any:
    """A step of the unknown trainer; a learning rate of 0 keeps the model as it is."""
    trainer = Scaled(
        model=tiny.build(torch.float32),
        args=arguments(folder, max_steps=1, learning_rate=0.0, **changed),
        train_dataset=rows([5, 9]),
        data_collator=Collator(),
    )
    RegularizerCallback(specs).attach(trainer)
    trainer.train()
    return trainer


def test_log_probs_at_the_time_of_sampling() -> None:
    labels = torch.tensor([[-100, 5, 6], [-100, 7, -100]])
    completion = Completion(None, Forward(), labels, shifted=True)
    now = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    assert sampling_logprobs({}, now, completion).equal(now)
    before = {"old_per_token_logps": now - 0.5, "sampling_per_token_logps": None}
    expected = [[-1.5, -2.5], [-3.5, 0.0]]  # 0 where no token counts
    assert sampling_logprobs(before, now, completion).tolist() == expected
    engine = torch.tensor([[-9.0, -1.25, torch.nan], [-9.0, -3.25, torch.nan]])
    batch = {**before, "sampling_per_token_logps": engine}  # it could not score one
    expected = [[-1.25, -2.0], [-3.25, 0.0]]
    assert sampling_logprobs(batch, now, completion).tolist() == expected


def test_an_unknown_trainer_works_as_before(tmp_path: Path) -> None:
    specs = (term(entropy, 0.3, "entropy"), RegularizerSpec(surprise, 0.02, "surprise"))
    log = trained(tmp_path, *specs).state.log_history[0]
    model = tiny.build(torch.float32)
    batch = Collator()(rows([5, 9]))
    outputs, labels = model(**batch), batch["labels"]
    targets = labels[:, 1:]
    logprobs = outputs.logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])
    square = logprobs[..., 0][targets != -100].square().mean()
    spread = entropy(outputs.logits, labels)
    assert log["base_loss/value"] == pytest.approx(2 * outputs.loss.item(), rel=1e-5)
    assert log["regularizers/surprise/value"] == pytest.approx(square.item(), rel=1e-5)
    total = 2 * outputs.loss + 0.3 * spread + 0.02 * square
    assert log["loss"] == pytest.approx(total.item(), rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "completion_logprobs",
        "completion_entropy",
        "completion_logits",
        "completion_mask",
        "projection",
        "reference_logprobs",
    ],
)
def test_an_unknown_trainer_has_no_completion(name: str, tmp_path: Path) -> None:
    message = f"^Scaled has no input '{name}', which regularizer 'mine' reads: its compute_loss is"
    with pytest.raises(InputError, match=message):
        trained(tmp_path, term(lambda value: value.sum(), 0.1, "mine", inputs=name))


def test_a_field_of_an_unknown_trainers_batch_is_read(tmp_path: Path) -> None:
    class Mixed(RegularizerMixin, Scaled):
        pass

    trainer: Any = Mixed(
        model=tiny.build(torch.float32).train(),
        args=arguments(tmp_path),
        train_dataset=rows([5]),
        terms=[term(lambda completion_mask, loss: loss * completion_mask, 1.0, "mine")],
    )
    batch = Collator()(rows([5]))
    plain = trainer.compute_loss(trainer.model, {**batch, "completion_mask": torch.zeros(())})
    total = trainer.compute_loss(trainer.model, {**batch, "completion_mask": torch.ones(())})
    torch.testing.assert_close(total, 2 * plain)


def test_all_inputs_of_the_plain_trainer(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def look(**inputs: Any) -> Tensor:
        seen.update(inputs)
        value: Tensor = inputs["completion_logprobs"].sum()
        return value

    class Mixed(RegularizerMixin, Trainer):
        pass

    names = ("mask", "logprobs", "entropy", "logits")
    trainer: Any = Mixed(
        model=tiny.build(torch.float32).train(),
        args=arguments(tmp_path),
        train_dataset=rows([5]),
        terms=[term(look, 1.0, "look", inputs={n: n for n in [f"completion_{n}" for n in names]})],
    )
    batch = Collator()(rows([6, 4]))
    trainer.compute_loss(trainer.model, dict(batch))
    logits = tiny.build(torch.float32)(**batch).logits[:, :-1]
    mask = batch["labels"][:, 1:] != -100
    logprobs = logits.log_softmax(-1)
    assert torch.equal(seen["completion_mask"], mask)
    torch.testing.assert_close(seen["completion_logits"], logits[mask])
    spread = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(seen["completion_entropy"], spread.where(mask, 0.0))
    picked = logprobs.gather(-1, batch["labels"][:, 1:].clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(seen["completion_logprobs"], picked.where(mask, 0.0))


def test_check_available_ignores_inputs_that_are_not_of_the_completion() -> None:
    check_available(None, None, {"router_logits": "mine", "data": "mine"}, ())
    with pytest.raises(InputError, match="'data', which regularizer 'mine' reads: the batch has"):
        check_available(None, KINDS["Trainer"], {"data": "mine"}, ())
