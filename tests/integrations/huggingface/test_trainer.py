"""Terms in the real `Trainer`, compared with the same training by hand."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from steelyard import RegularizerSpec, schedules
from steelyard.engine import tiny
from steelyard.errors import CheckpointError, InputError, NonFiniteError
from steelyard.integrations import aux_loss, term
from steelyard.integrations.huggingface import RegularizerCallback
from steelyard.regularizers import Adaptive
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


def size(parameters: Mapping[str, Tensor]) -> Tensor:
    return parameters["lm_head.weight"].abs().sum()


def terms() -> list[RegularizerSpec]:
    return [
        term(entropy, 0.3, "entropy"),
        term(size, schedules.linear(0.0, 1e-3, 4), "size"),
        RegularizerSpec(surprise, 0.02, "surprise"),
    ]


def by_hand(
    batches: Sequence[Batch], accumulation: int
) -> tuple[nn.Module, list[dict[str, float]]]:
    """The same training without Steelyard, and the expected log of each step."""
    model = tiny.build(torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    logs = []
    for step in range(3):
        micro = batches[step * accumulation : (step + 1) * accumulation]
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in micro]
        weights = {"entropy": 0.3, "size": 1e-3 * step / 4, "surprise": 0.02}
        log = dict.fromkeys(("loss", "base_loss/value"), 0.0)
        values = dict.fromkeys(weights, 0.0)
        optimizer.zero_grad()
        for batch, count in zip(micro, counts, strict=True):
            out = model(**batch, num_items_in_batch=sum(counts))
            share = count / sum(counts)
            targets = batch["labels"][:, 1:]
            picked = out.logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])
            found = {
                "entropy": entropy(out.logits, batch["labels"]),
                "size": model.lm_head.weight.abs().sum(),
                "surprise": picked[..., 0][targets != -100].square().mean(),
            }
            total = out.loss + share * sum(weights[name] * v for name, v in found.items())
            total.backward()
            log["loss"] += total.item()
            log["base_loss/value"] += out.loss.item()
            for name, value in found.items():
                values[name] += share * value.item()
        optimizer.step()
        for name, value in values.items():
            log[f"regularizers/{name}/value"] = value
            log[f"regularizers/{name}/weight"] = weights[name]
            log[f"regularizers/{name}/contribution"] = weights[name] * value
        logs.append(log)
    return model, logs


def mixed_in(**settings: Any) -> Trainer:
    return RegularizedTrainer(terms=terms(), **settings)


def attached(**settings: Any) -> Trainer:
    trainer = Trainer(**settings)
    RegularizerCallback(terms()).attach(trainer)
    return trainer


@pytest.mark.parametrize("build", [mixed_in, attached])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_and_its_log_equal_those_by_hand(
    build: Callable[..., Trainer], accumulation: int, tmp_path: Path
) -> None:
    collator = Collator()
    trainer = build(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path, gradient_accumulation_steps=accumulation),
        train_dataset=rows([5, 9, 12, 7, 6, 10, 8, 11, 4, 13, 3, 14]),
        data_collator=collator,
    )
    trainer.train()
    model, logs = by_hand(collator.batches, accumulation)
    assert_same_weights(trainer.model, model)
    for ours, theirs in zip(trainer.state.log_history, logs, strict=False):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=2e-6)


def test_accumulated_micro_batches_equal_one_large_batch(tmp_path: Path) -> None:
    data = rows([5, 9, 12, 7])
    models = []
    for size_, accumulation in ((4, 1), (2, 2), (1, 4)):
        args = arguments(
            tmp_path,
            per_device_train_batch_size=size_,
            gradient_accumulation_steps=accumulation,
        )
        models.append(tiny.build(torch.float32))
        RegularizedTrainer(
            model=models[-1], args=args, train_dataset=data, data_collator=Collator(), terms=terms()
        ).train()
    for other in models[1:]:
        assert_same_weights(models[0], other)


class Regression(nn.Module):
    """A model that does not take the trainer's `num_items_in_batch`."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner = nn.Linear(3, 4)
            self.outer = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(x).tanh()
        aux_loss("spread", hidden.var())
        prediction = self.outer(hidden)[:, 0]
        return {"loss": nn.functional.mse_loss(prediction, labels), "prediction": prediction}


def points() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(3, generator=numbers), "labels": torch.randn((), generator=numbers)}
        for _ in range(12)
    ]


def test_aux_losses_and_activations_with_a_loss_divided_by_micro_batches(tmp_path: Path) -> None:
    seen: list[Batch] = []

    def collate(data: Sequence[Batch]) -> Batch:
        seen.append({name: torch.stack([d[name] for d in data]) for name in data[0]})
        return seen[-1]

    model = Regression()
    trainer = RegularizedTrainer(
        model=model,
        args=arguments(tmp_path, gradient_accumulation_steps=2),
        train_dataset=points(),
        data_collator=collate,
        terms=[term(lambda a: a.square().mean(), 0.1, "activity", inputs="activations.inner")],
        capture="inner",
        term_options={"aux": {"spread": 0.5}},
    )
    trainer.train()
    other = Regression()
    optimizer = torch.optim.SGD(other.parameters(), 0.05)
    for step in range(3):
        optimizer.zero_grad()
        losses = []
        for batch in seen[2 * step : 2 * step + 2]:
            raw = other.inner(batch["x"])
            loss = nn.functional.mse_loss(other.outer(raw.tanh())[:, 0], batch["labels"])
            losses.append((loss, raw.square().mean(), raw.tanh().var()))
        total = sum(a + 0.1 * b + 0.5 * c for a, b, c in losses) / 2
        total.backward()
        optimizer.step()
        log = trainer.state.log_history[step]
        assert log["loss"] == pytest.approx(total.item(), rel=1e-5)
        spread = sum(c.item() for *_, c in losses) / 2
        assert log["regularizers/spread/value"] == pytest.approx(spread, rel=1e-5)
        assert log["regularizers/spread/contribution"] == pytest.approx(0.5 * spread, rel=1e-5)
    assert_same_weights(model, other)


def test_evaluation_uses_the_trainers_own_loss(tmp_path: Path) -> None:
    data = rows([6, 6])
    trainer = mixed_in(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path),
        train_dataset=data,
        eval_dataset=data,
        data_collator=Collator(),
    )
    plain = tiny.build(torch.float32).eval()
    with torch.no_grad():
        loss = plain(**Collator()(data)).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)


class Memory:
    """A stateful term: the mean log-prob times the number of calls."""

    name = "memory"

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, data: object, logprobs: Sequence[Tensor]) -> Tensor:
        self.calls += 1
        return self.calls * torch.cat(list(logprobs)).mean()

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.calls = state["calls"]


def with_memory(folder: Path, fn: Any = None, **changed: Any) -> RegularizedTrainer:
    return RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=arguments(folder, max_steps=4, **changed),
        train_dataset=rows([6] * 8),
        data_collator=Collator(),
        terms=[RegularizerSpec(fn or Memory(), schedules.linear(0.0, 0.1, 4))],
    )


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = with_memory(tmp_path / "whole")
    whole.train()
    stopped = with_memory(tmp_path / "halves", save_strategy="steps", save_steps=2)
    stopped.train()
    resumed = with_memory(tmp_path / "halves")
    resumed.train(resume_from_checkpoint=str(tmp_path / "halves" / "checkpoint-2"))
    assert_same_weights(whole.model, resumed.model)
    assert resumed.regularizers.composite.specs[0].fn.calls == 4
    key = "regularizers/memory/contribution"
    logged = [[log[key] for log in t.state.log_history if key in log] for t in (whole, resumed)]
    assert logged[1] == pytest.approx(logged[0], rel=1e-6)


def test_a_resumed_run_without_the_state_of_its_terms_is_refused(tmp_path: Path) -> None:
    with_memory(tmp_path, save_strategy="steps", save_steps=2).train()
    (tmp_path / "checkpoint-2" / "steelyard.pt").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-2/steelyard\.pt cannot be read"):
        with_memory(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_damaged_state_of_the_terms_names_its_file(tmp_path: Path) -> None:
    with_memory(tmp_path, save_strategy="steps", save_steps=2).train()
    file = tmp_path / "checkpoint-2" / "steelyard.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"checkpoint-2/steelyard\.pt is damaged"):
        with_memory(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


class Histogram(Memory):
    """A term whose state has NumPy's arrays and numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": np.int64(self.calls), "counts": np.full(3, self.calls / 2)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = int(state["calls"])
        np.testing.assert_array_equal(state["counts"], self.calls / 2)


def test_a_state_with_arrays_is_resumed(tmp_path: Path) -> None:
    def trainer() -> RegularizedTrainer:
        return with_memory(tmp_path, Histogram(), save_strategy="steps", save_steps=2)

    trainer().train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.regularizers.composite.specs[0].fn.calls == 4


def test_a_second_training_logs_its_own_steps_only(tmp_path: Path) -> None:
    """The last step of the first is not logged: there are three, and every second is."""
    trainer = mixed_in(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path, logging_steps=2),
        train_dataset=rows([6] * 6),
        data_collator=Collator(),
    )
    for _ in range(2):
        trainer.train()
        (log,) = [log for log in trainer.state.log_history if "loss" in log]
        contributions = [value for name, value in log.items() if name.endswith("/contribution")]
        assert log["base_loss/value"] + sum(contributions) == pytest.approx(log["loss"], rel=1e-5)


def with_adaptive(folder: Path, accumulation: int, **changed: Any) -> RegularizedTrainer:
    """A trainer whose micro-batches are all the same, whatever the accumulation."""
    adaptive = Adaptive(regularizer="l1", target=1.0, rate=0.5)
    settings: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.01}
    return RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=arguments(
            folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulation,
            **(settings | changed),
        ),
        train_dataset=rows([6]) * 16,
        data_collator=Collator(),
        terms=[RegularizerSpec(adaptive, 0.1)],
    )


def test_an_adaptive_weight_moves_once_per_optimizer_step(tmp_path: Path) -> None:
    trainers = [with_adaptive(tmp_path, accumulation) for accumulation in (1, 4)]
    for trainer in trainers:
        trainer.train()
    weights = [t.regularizers.composite.specs[0].fn.multiplier for t in trainers]
    assert weights == pytest.approx([1.1**2, 1.1**2])  # rate · clip = 0.5 · 0.2 at each step
    assert_same_weights(trainers[0].model, trainers[1].model)


def test_an_adaptive_weight_is_resumed_under_accumulation(tmp_path: Path) -> None:
    whole = with_adaptive(tmp_path / "whole", 4, max_steps=4)
    whole.train()
    with_adaptive(tmp_path / "halves", 4, max_steps=4, save_strategy="steps", save_steps=2).train()
    resumed = with_adaptive(tmp_path / "halves", 4, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "halves" / "checkpoint-2"))
    assert_same_weights(whole.model, resumed.model)
    weights = [t.regularizers.composite.specs[0].fn.multiplier for t in (whole, resumed)]
    assert weights == pytest.approx([1.1**4, 1.1**4])


class OwnStep(RegularizedTrainer):
    """A trainer whose step computes the loss by itself, as TRL's `OnlineDPOTrainer` does."""

    def training_step(self, model: nn.Module, inputs: Any, *_: Any) -> Tensor:
        loss: Tensor = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_trainer_that_never_computes_its_loss_is_refused(tmp_path: Path) -> None:
    trainer = OwnStep(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path),
        train_dataset=rows([6, 6]),
        data_collator=Collator(),
        terms=terms(),
    )
    with pytest.raises(InputError, match="OwnStep made an optimizer step without calling it"):
        trainer.train()


class Sink(TrainerCallback):
    """Records the keys that a reporter of `report_to` gets."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.seen.append(set(rest["logs"]))


def test_reporters_see_the_components(tmp_path: Path) -> None:
    sink = Sink()
    trainer = attached(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path, max_steps=1),
        train_dataset=rows([6, 6]),
        data_collator=Collator(),
        callbacks=[sink],
    )
    trainer.train()
    components = {"base_loss/value"} | {
        f"regularizers/{name}/{key}"
        for name in ("entropy", "size", "surprise")
        for key in ("value", "weight", "contribution")
    }
    assert components <= sink.seen[0]
    assert not components & sink.seen[1]  # the summary of the whole training


def test_a_term_with_every_is_averaged_over_the_steps_where_it_ran(tmp_path: Path) -> None:
    trainer = RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path, max_steps=4, logging_steps=4),
        train_dataset=rows([6] * 8),
        data_collator=Collator(),
        terms=[term(lambda loss: 0 * loss + 8.0, 0.5, "eight", every=2)],
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["regularizers/eight/value"] == pytest.approx(8.0)
    assert log["regularizers/eight/weight"] == pytest.approx(0.5)
    assert log["regularizers/eight/contribution"] == pytest.approx(2.0)
    assert log["base_loss/value"] + 2.0 == pytest.approx(log["loss"])


def test_a_term_that_is_not_finite_stops_the_training_unless_it_is_skipped(tmp_path: Path) -> None:
    def broken(logits: Tensor) -> Tensor:
        return logits.sum() * float("nan")

    settings: dict[str, Any] = {
        "model": tiny.build(torch.float32),
        "args": arguments(tmp_path, max_steps=1),
        "train_dataset": rows([6, 6]),
        "data_collator": Collator(),
    }
    with pytest.raises(NonFiniteError, match="regularizer 'broken'"):
        RegularizedTrainer(**settings, terms=[term(broken, 1.0)]).train()
    trainer = RegularizedTrainer(**settings, terms=[term(broken, 1.0, on_error="skip")])
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(log["base_loss/value"])
    assert "regularizers/broken/value" not in log


def test_a_missing_input_lists_the_available_ones(tmp_path: Path) -> None:
    trainer = RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path),
        train_dataset=rows([6, 6]),
        data_collator=Collator(),
        terms=[term(lambda router_logits: router_logits.sum(), 1.0, "router")],
    )
    message = "regularizer 'router' reads the input 'router_logits', which is not there"
    with pytest.raises(InputError, match=f"{message}.*'input_ids'.*'logits'"):
        trainer.train()


def test_a_term_that_needs_a_projection_for_each_datum_is_refused(tmp_path: Path) -> None:
    spec = RegularizerSpec(lambda d, lp, projection: lp[0].sum(), 1.0, "x", needs=("projection",))
    with pytest.raises(InputError, match=r"must run on steelyard\.engine.*regularizer 'x'"):
        RegularizedTrainer(
            model=tiny.build(torch.float32),
            args=arguments(tmp_path),
            train_dataset=rows([6, 6]),
            data_collator=Collator(),
            terms=[spec],
        ).train()


def test_a_callback_must_be_attached(tmp_path: Path) -> None:
    callback = RegularizerCallback(terms())
    trainer = Trainer(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path),
        train_dataset=rows([6, 6]),
        data_collator=Collator(),
        callbacks=[callback],
    )
    with pytest.raises(InputError, match=re.escape("RegularizerCallback(terms).attach(trainer)")):
        trainer.train()
    assert callback.attach(trainer) is callback
    assert trainer.callback_handler.callbacks.count(callback) == 1
    trainer.train()
    with pytest.raises(InputError, match="serves one trainer"):
        callback.attach(trainer)


def test_hidden_states_are_requested_and_peft_is_unwrapped(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(tiny.build(torch.float32), config)
    other = copy.deepcopy(model)
    collator = Collator()

    def drift(hidden_states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        adapters = [p for name, p in parameters.items() if "lora_B" in name]
        return hidden_states[1].square().mean() + sum(p.sum() for p in adapters)

    RegularizedTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=1),
        train_dataset=rows([6, 6]),
        data_collator=collator,
        terms=[term(drift, 0.5)],
    ).train()
    optimizer = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], 0.05)
    out = other(**collator.batches[0], output_hidden_states=True)
    adapters = [p for name, p in other.named_parameters() if "lora_B" in name]
    loss = out.loss + 0.5 * (out.hidden_states[1].square().mean() + sum(p.sum() for p in adapters))
    loss.backward()
    optimizer.step()
    assert_same_weights(model, other)


def test_label_smoothing_and_returned_outputs_are_kept(tmp_path: Path) -> None:
    collator = Collator()
    data = rows([6, 9])
    trainer = RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path, max_steps=1, label_smoothing_factor=0.1),
        train_dataset=data,
        data_collator=collator,
        terms=[term(entropy, 0.3, "entropy")],
    )
    trainer.train()
    fresh = tiny.build(torch.float32).train()
    settings: dict[str, Any] = {
        "model": fresh,
        "args": arguments(tmp_path, label_smoothing_factor=0.1),
        "train_dataset": data,
    }
    batch = collator.batches[0]
    count = (batch["labels"][:, 1:] != -100).sum()
    base, outputs = Trainer(**settings).compute_loss(fresh, dict(batch), True, count)
    expected = base + 0.3 * entropy(outputs.logits, batch["labels"])
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    again = RegularizedTrainer(**settings, terms=[term(entropy, 0.3, "entropy")])
    total, outputs = again.compute_loss(fresh, dict(batch), True, count)
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert outputs.logits.shape == (2, 9, 512)


def test_tensorboard_gets_the_components(tmp_path: Path) -> None:
    trainer = mixed_in(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path, max_steps=1, report_to="tensorboard"),
        train_dataset=rows([6, 6]),
        data_collator=Collator(),
    )
    trainer.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    assert b"train/regularizers/entropy/contribution" in file.read_bytes()


def test_weights_can_be_changed_while_training(tmp_path: Path) -> None:
    class Switch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            trainer.regularizers.composite.set_weight("entropy", 0.7)

    trainer = RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=arguments(tmp_path, max_steps=2),
        train_dataset=rows([6, 6]),
        data_collator=Collator(),
        terms=[term(entropy, 0.3, "entropy")],
        callbacks=[Switch()],
    )
    trainer.train()
    logged = [log["regularizers/entropy/weight"] for log in trainer.state.log_history[:2]]
    assert logged == pytest.approx([0.3, 0.7])


def test_missing_transformers_names_the_pip_command() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "try:\n import steelyard.integrations.huggingface\n"
        "except ImportError as error:\n print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "steelyard.integrations.huggingface needs transformers, which is not installed: "
        'pip install "steelyard[hf]".'
    )
