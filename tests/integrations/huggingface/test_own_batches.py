"""Terms with data of their own in Hugging Face's and TRL's trainers."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.errors import InputError
from steelyard.integrations import term
from steelyard.penalties import from_logits
from steelyard.regularizers import NLL, KLToReference
from tests.integrations.huggingface.training import (
    Collator,
    RegularizedTrainer,
    arguments,
    rows,
)
from tests.integrations.huggingface.trl_trainers import build

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
OWN: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, 9]},
    {"input_ids": [10, 11, 12], "completion_mask": [0, 1, 1]},
    {"input_ids": torch.tensor([20, 21, 22, 23])},
]
COUNTED = [[2, 3, 4], [1, 2], [1, 2, 3]]  # positions of the tokens that count, by hand


def trainer_of(folder: Path, model: Any, *terms: Any, **changed: Any) -> RegularizedTrainer:
    return RegularizedTrainer(
        model, arguments(folder, **changed), Collator(), rows([7, 5, 6, 4]), terms=terms
    )


def own_nll(model: Any) -> Tensor:
    """Mean over the counted tokens of all items, one item at a time and without padding."""
    found = []
    for item, positions in zip(OWN, COUNTED, strict=True):
        ids = torch.as_tensor(item["input_ids"])
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        found += [-logprobs[at - 1, ids[at]] for at in positions]
    return torch.stack(found).mean()


def test_the_gradient_is_that_of_both_by_hand(tmp_path: Path) -> None:
    model = tiny.build(torch.float32)
    expected = deepcopy(model)
    spec = RegularizerSpec(NLL(), 0.5, "sft", data=OWN, per_step=3)
    trainer = trainer_of(tmp_path, model, spec, max_steps=1)
    trainer.train()
    batch = trainer.data_collator.batches[0]  # type: ignore[union-attr]  # a Collator
    with torch.no_grad():
        value = own_nll(expected).item()
    loss = expected(**batch).loss + 0.5 * own_nll(expected)
    loss.backward()
    log = trainer.state.log_history[0]
    assert log["regularizers/sft/value"] == pytest.approx(value, rel=1e-4)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-3)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours, theirs - 0.05 * theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_kl_to_the_model_without_its_adapter(tmp_path: Path) -> None:
    """Exact over the vocabulary, and on tokens, both on its own data; no reference elsewhere."""
    whole: dict[str, Any] = {
        "inputs": ("completion_logits", "reference_logits"),
        "data": OWN,
        "per_step": 3,
    }
    specs = [
        term(from_logits.kl, 0.1, "whole", **whole),
        RegularizerSpec(KLToReference(), 0.1, "tokens", data=OWN, per_step=3),
        RegularizerSpec(NLL(), 0.1, "batch"),
    ]
    base = tiny.build(torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = trainer_of(tmp_path, model, *specs, max_steps=4, learning_rate=3.0)
    trainer.train()
    first, *_, last = (log for log in trainer.state.log_history if "loss" in log)
    for name in ("whole", "tokens"):
        assert first[f"regularizers/{name}/value"] == pytest.approx(0.0, abs=1e-6)
        assert last[f"regularizers/{name}/value"] > 1e-6
    assert "regularizers/tokens/custom/half_squared_log_ratio" in last
    with pytest.raises(InputError, match=r"'reference_logits', .*'whole' .*adapter of peft"):
        trainer_of(tmp_path, tiny.build(torch.float32), specs[0]).train()


def test_each_micro_batch_draws_its_own(tmp_path: Path) -> None:
    drawn: list[int] = []

    def spy(data: Any, logprobs: Any) -> Tensor:
        drawn.append(int(data[0]["loss_fn_inputs"]["target_tokens"].max()))
        value: Tensor = NLL().compute(data, logprobs)
        return value

    spec = RegularizerSpec(spy, 0.1, "spy", data=OWN, per_step=1)
    trainer = trainer_of(tmp_path, tiny.build(torch.float32), spec, gradient_accumulation_steps=2)
    trainer.train()
    assert len(drawn) == 6
    assert len(set(drawn)) > 1


def test_supervised_data_beside_sampled_answers(tmp_path: Path) -> None:
    """In GRPO, whose own terms and reference are about the completions."""
    spec = RegularizerSpec(NLL(), 2.0, "sft", data=OWN, per_step=3)
    trainer = build("GRPO", tmp_path, terms=[spec])
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["regularizers/sft/contribution"] == pytest.approx(2 * log["regularizers/sft/value"])
    assert log["regularizers/sft/value"] > 0


def test_norms_and_cosines_with_respect_to_the_parameters(tmp_path: Path) -> None:
    spec = RegularizerSpec(NLL(), 0.5, "sft", data=OWN, per_step=3)
    trainer = RegularizedTrainer(
        tiny.build(torch.float32), arguments(tmp_path, max_steps=1), Collator(), rows([7, 5]),
        terms=[spec], term_options={"track_grad_norms": True},
    )  # fmt: skip
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["regularizers/sft/grad_norm"] > 0
    assert -1 <= log["cosines/base/sft"] <= 1


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("text", r"regularizer 'sft' must be a mapping with input_ids, .*got str: tokenize"),
        ({"prompt": "a"}, r"got dict with \['prompt'\]: tokenize it first"),
        ({"input_ids": [1, 2], "labels": [1]}, "a label for each of its 2 tokens, got 1"),
    ],
)
def test_data_that_are_no_tokens_are_an_error(tmp_path: Path, item: Any, message: str) -> None:
    spec = RegularizerSpec(NLL(), 0.5, "sft", data=[item])
    with pytest.raises(InputError, match=message):
        trainer_of(tmp_path, tiny.build(torch.float32), spec).train()
