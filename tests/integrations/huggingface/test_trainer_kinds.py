"""The table of trainers, against the classes that transformers and TRL define."""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer

from steelyard.errors import InputError, SpecError
from steelyard.integrations import term
from steelyard.integrations.huggingface import RegularizerMixin
from steelyard.integrations.huggingface.causal_lm import Forward
from steelyard.integrations.huggingface.trainer_kinds import KINDS, kind_of, trainer_name
from tests.integrations.huggingface.trl_trainers import REWARD, TRAINERS, build


def imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def test_every_trainer_of_the_table_is_recognized() -> None:
    paths = [row.path for row in (*TRAINERS.values(), REWARD)]
    assert {path.partition(":")[2] for path in paths} | {"Trainer"} == set(KINDS)
    for path in paths:
        trainer = imported(path)
        assert kind_of(trainer.compute_loss) is KINDS[trainer.__name__]
    assert kind_of(Trainer.compute_loss) is KINDS["Trainer"]
    assert kind_of(Seq2SeqTrainer.compute_loss) is KINDS["Trainer"]  # it has none of its own


def test_a_loss_of_ones_own_is_unknown() -> None:
    class Mine(imported(TRAINERS["SFT"].path)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Renamed(imported(TRAINERS["SFT"].path)):  # type: ignore[misc]
        pass

    assert kind_of(Mine.compute_loss) is None
    assert kind_of(Renamed.compute_loss) is KINDS["SFTTrainer"]
    assert kind_of(lambda: None) is None
    for path in (
        "trl.experimental.gold.gold_trainer:GOLDTrainer",
        "trl.experimental.server_distillation.server_distillation_trainer:ServerDistillationTrainer",
        "trl.experimental.sdft.sdft_trainer:SDFTTrainer",
    ):
        assert kind_of(imported(path).compute_loss) is None


def test_a_class_names_the_trainer_it_is_like() -> None:
    kind = KINDS["SFTTrainer"]
    assert kind_of(lambda: None, "SFTTrainer") is kind
    assert kind_of(Trainer.compute_loss, "RewardTrainer") is KINDS["RewardTrainer"]
    message = "completion_like must name a trainer that Steelyard knows, got 'SFT'; there are: Tr"
    with pytest.raises(SpecError, match=message):
        kind_of(Trainer.compute_loss, "SFT")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SFT", "GRPO"])
def test_a_loss_that_only_delegates(name: str, tmp_path: Path) -> None:
    """All inputs of the completion are there, with the values of the trainer itself."""

    def mean(completion_entropy: Tensor, completion_mask: Tensor) -> Tensor:
        return completion_entropy.sum() / completion_mask.sum()

    def log(**more: Any) -> dict[str, float]:
        transformers.set_seed(0)
        trainer = build(name, tmp_path, terms=[term(mean, 0.1, "mean")], **more)
        transformers.set_seed(0)
        trainer.train()
        found: dict[str, float] = trainer.state.log_history[0]
        return found

    class Delegating:
        completion_like = f"{name}Trainer"

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    class Silent(Delegating):
        completion_like = None  # type: ignore[assignment]

    with pytest.raises(InputError, match=r'or, if it runs .* say so: completion_like = "SFTTrain'):
        log(between=Silent)
    expected, found = log(), log(between=Delegating)
    for key in ("loss", "regularizers/mean/value"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6)


def test_a_wrapped_loss_is_recognized() -> None:
    own = imported(TRAINERS["DPO"].path).compute_loss

    @wraps(own)
    def wrapper(*args: Any) -> Any:
        return own(*args)

    assert kind_of(wrapper) is KINDS["DPOTrainer"]


def test_names_in_messages() -> None:
    class Mine(RegularizerMixin, Trainer):
        pass

    mine = Mine.__new__(Mine)
    assert trainer_name(mine, KINDS["Trainer"]) == "Trainer"
    assert trainer_name(mine, None) == "Mine"


@pytest.mark.parametrize("name", ["GRPOTrainer", "DistillationTrainer"])
def test_tokens_that_tools_have_written_do_not_count(name: str) -> None:
    labels = torch.tensor([[-100, -100, 5, 6, 7, 8]])
    batch = {
        "prompt_ids": torch.tensor([[1, 2]]),
        "completion_ids": torch.tensor([[5, 6, 7, 8]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1]]),
    }
    labels_of = KINDS[name].labels
    assert labels_of is not None
    forward = Forward({"labels": labels})
    whole = labels_of(None, batch, forward)
    assert whole is not None
    assert whole.tolist() == labels.tolist()
    found = labels_of(None, {**batch, "tool_mask": torch.tensor([[1, 0, 0, 1]])}, forward)
    assert found is not None
    assert found.tolist() == [[-100, -100, 5, -100, -100, 8]]


def test_the_reference_of_a_preference_trainer() -> None:
    find = KINDS["DPOTrainer"].reference_model
    assert find is not None
    model, reference = nn.Linear(1, 1), nn.Linear(1, 1)
    assert find(SimpleNamespace(ref_model=reference, model=model)) is reference
    assert find(SimpleNamespace(ref_model=None, model=model)) is model
