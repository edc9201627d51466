"""The entropy of a run's data: exact on fixed data, estimated on the model's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tinker import types

from steelyard.engine import tiny
from steelyard.errors import TermError
from steelyard.experiment import Config, RunFolder, resume, train
from steelyard.experiment.config.schema import TermConfig
from steelyard.experiment.data.batches import split
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.data.files import read_records
from tests.engine.server.wire_client import start
from tests.experiment.small_runs import small_config, small_rollouts, stop_after, without_clock

BONUS = {"use": "entropy", "weight": 0.3, "options": {"mode": "bonus"}}
CONFIDENCE = {"use": "confidence_penalty", "weight": 0.1, "options": {"threshold": 5.0}}


def true_entropy(data: list[types.Datum], adapter: Path | None) -> float:
    """Mean entropy over the vocabulary of the tokens that count, by transformers and peft."""
    model: Any = tiny.build(torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    entropies = []
    for datum in data:
        tokens = torch.tensor([datum.model_input.to_ints()])
        counted = torch.tensor(datum.loss_fn_inputs["weights"].data) != 0
        with torch.no_grad():
            rows = model(input_ids=tokens).logits[0].double().log_softmax(-1)[counted]
        entropies.append(-(rows.exp() * rows).sum(-1))
    return torch.cat(entropies).mean().item()


def test_on_fixed_data_it_is_that_of_the_whole_vocabulary(folder: Path) -> None:
    settings = ("train.steps=4", "train.evaluate_every=2")
    config = small_config(folder, *settings, regularizers=[BONUS, CONFIDENCE])
    train(config, folder / "whole")
    lines = RunFolder(folder / "whole").metrics()
    assert {line["regularizers/entropy/grad_space"] for line in lines} == {"logits"}
    log = (folder / "whole" / "log.txt").read_text()
    assert log.count("regularizer 'entropy' reads logits with these data, and its gradient") == 1
    encoder = Encoder(tiny.tokenizer(), max_length=48)
    groups = read_records(folder / "train.jsonl", encoder.encode, skip_bad=False).groups
    held_out = [datum for group in split(groups, 0.2, 0)[1] for datum in group]
    (last,) = (folder / "whole").glob("checkpoints/*/weights/step-00000004")
    for line, adapter in ((lines[0], None), (lines[-1], last)):
        expected = true_entropy(held_out, adapter)
        found = line["held_out/regularizers/entropy"]
        assert found == pytest.approx(-expected, rel=1e-5)  # of a bonus
    train(config, folder / "resumed", stop=stop_after(2))
    assert resume(folder / "resumed").status == "done"
    resumed = RunFolder(folder / "resumed").metrics()
    assert [without_clock(line) for line in resumed] == [without_clock(line) for line in lines]


@pytest.mark.parametrize(
    "setting", ["train.gradient_accumulation_steps=2", "train.grad_space=parameters"]
)
def test_the_first_step_has_the_same_value_in_every_setting(folder: Path, setting: str) -> None:
    values = []
    for name, settings in (("plain", ()), ("other", (setting,))):
        config = small_config(folder, "train.steps=2", *settings, regularizers=[BONUS, CONFIDENCE])
        train(config, folder / name)
        line = RunFolder(folder / name).metrics()[0]
        values.append(
            [line[f"regularizers/{term}/value"] for term in ("entropy", "confidence_penalty")]
        )
        assert ("cosines/base/entropy" in line) == ("grad_space" in setting and name == "other")
    assert values[1] == pytest.approx(values[0], rel=1e-5)


def test_on_the_models_own_answers_it_is_estimated(folder: Path) -> None:
    train(small_rollouts(folder, regularizers=[BONUS]), folder / "r")
    for line in RunFolder(folder / "r").metrics():
        assert "cosines/base/entropy" in line
        assert line.get("regularizers/entropy/grad_space", "logprobs") == "logprobs"


def test_a_server_without_logits_refuses_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    config: Config = small_config(folder)
    with start(tmp_path / "served") as running:
        model = config.model.model_copy(
            update={"backend": "tinker", "base_url": running.base_url, "device": "auto"}
        )
        terms = [TermConfig(**BONUS)]  # type: ignore[arg-type]
        changed = config.model_copy(update={"model": model, "regularizers": terms})
        with pytest.raises(TermError, match=r"Train on steelyard\.engine, where"):
            train(changed, folder / "r")
