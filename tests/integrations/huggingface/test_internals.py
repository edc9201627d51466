"""Private parts of transformers and TRL: that they still do what we rely on, and without them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from steelyard.engine import tiny
from steelyard.errors import InputError
from steelyard.integrations.huggingface.internals import (
    keep_reference,
    loss_replaced,
    loss_shifts_labels,
)
from tests.integrations.huggingface.trl_trainers import build


def test_a_causal_language_model_shifts_labels(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[])
    assert loss_shifts_labels(Trainer(tiny.build(torch.float32), arguments))


def test_a_trainer_that_does_not_say_whether_it_shifts_labels_is_an_error() -> None:
    with pytest.raises(InputError) as error:
        loss_shifts_labels(SimpleNamespace())
    assert str(error.value) == (
        "a trainer with terms must have _loss_shifts_labels, as in transformers 5.22, got "
        "SimpleNamespace without it: install the version that the extra names, or report it to us."
    )


def test_a_replaced_loss_leaves_no_attribute() -> None:
    model: Any = tiny.build(torch.float32)

    def loss(*args: Any) -> Any: ...

    before = set(vars(model))
    with loss_replaced(model, loss):
        assert model.loss_function is loss
        # Its setter creates this attribute. If it has another name, `loss_replaced` must know it.
        assert vars(model).keys() - before == {"_loss_function"}
    assert set(vars(model)) == before
    restored: Any = model.loss_function
    assert restored is ForCausalLMLoss


def test_a_loss_is_restored_where_it_is_kept_under_another_name() -> None:
    model = SimpleNamespace(loss_function=max)
    with loss_replaced(model, min):
        assert model.loss_function is min
    assert model.loss_function is max


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["_generate_and_score_completions", "_get_per_token_logps_and_entropies"]
)
def test_rloo_without_the_parts_that_score_completions_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build("RLOO", tmp_path, beta=0.3)
    trl: Any = import_module("trl")
    monkeypatch.delattr(trl.RLOOTrainer, name)
    with pytest.raises(InputError, match=f"must have {name}, as in TRL 1.16, got Regularized"):
        keep_reference(trainer)
