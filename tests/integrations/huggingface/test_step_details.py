"""Norms, cosines and the terms' own metrics in the log, against gradients by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import RegularizerSpec
from steelyard.composition.bounds import GAIN, KP
from steelyard.engine import tiny
from steelyard.integrations import term
from steelyard.integrations.huggingface.metrics import StepDetails, metrics_of
from steelyard.output.custom_loss import BaseLossOutput, CustomLossOutput, RegularizerOutput
from tests.integrations.huggingface.test_trl import BY_TOKENS, Recorder
from tests.integrations.huggingface.training import (
    Collator,
    RegularizedTrainer,
    arguments,
    entropy,
    rows,
    surprise,
)
from tests.integrations.huggingface.trl_trainers import build, predictions, sequences

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


def size(parameters: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    return parameters["lm_head.weight"].square().mean(), {"ones": 1.0, "seen_total": 2.0}


def confidence(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    value = entropy(logits, labels)
    return value, {"longest": (labels != -100).sum(-1).max().float()}


TERMS = [
    term(confidence, 0.3, "confidence"),
    RegularizerSpec(surprise, 0.02, "surprise"),
    term(size, 0.2, "size"),
]


def flat(loss: Any, model: Any) -> Tensor:
    found = torch.autograd.grad(
        loss, list(model.parameters()), retain_graph=True, allow_unused=True
    )
    pairs = zip(found, model.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def numbers(gradients: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, float]:
    """The metrics of some gradients, the base loss first."""
    total = sum(weights.get(name, 1.0) * gradient for name, gradient in gradients.items())
    assert isinstance(total, Tensor)
    found = {"total_grad_norm": total.norm().item()}
    for name, gradient in gradients.items():
        if name == "base":
            found["base_loss/grad_norm"] = gradient.norm().item()
            continue
        found[f"regularizers/{name}/grad_norm"] = gradient.norm().item()
        found[f"regularizers/{name}/grad_norm_weighted"] = weights[name] * gradient.norm().item()
    for (a, x), (b, y) in combinations(gradients.items(), 2):
        cosine = torch.nn.functional.cosine_similarity(x, y, dim=0, eps=1e-30)
        found[f"cosines/{a}/{b}"] = cosine.item()
    return found


@pytest.mark.parametrize("accumulation", [1, 3])
def test_norms_and_cosines_are_those_of_the_steps_gradients(
    accumulation: int, tmp_path: Path
) -> None:
    collator = Collator()
    trainer = RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=arguments(
            tmp_path,
            max_steps=1,
            gradient_accumulation_steps=accumulation,
            learning_rate=0.0,
        ),
        train_dataset=rows([5, 9, 12, 7, 6, 10]),
        data_collator=collator,
        terms=TERMS,
        term_options={"track_grad_norms": True},
    )
    trainer.train()
    log, batches = trainer.state.log_history[0], collator.batches[:accumulation]
    model = tiny.build(torch.float32)
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    sums: dict[str, Any] = dict.fromkeys(("base", "confidence", "surprise", "size"), 0.0)
    longest = 0.0
    for batch, count in zip(batches, counts, strict=True):
        outputs, share = model(**batch, num_items_in_batch=sum(counts)), count / sum(counts)
        targets = batch["labels"][:, 1:]
        logprobs = outputs.logits[:, :-1].log_softmax(-1)
        picked = logprobs.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != -100]
        losses = {
            "confidence": entropy(outputs.logits, batch["labels"]),
            "surprise": picked.square().mean(),
            "size": model.lm_head.weight.square().mean(),
        }
        sums["base"] = sums["base"] + flat(outputs.loss, model)
        for name, loss in losses.items():
            sums[name] = sums[name] + share * flat(loss, model)
        longest += share * (batch["labels"] != -100).sum(-1).max().item()
    weights = {spec.name: float(spec.weight_at(0)) for spec in TERMS}
    expected = numbers(sums, weights)
    assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert log["total_grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-4)
    assert log["regularizers/confidence/custom/longest"] == pytest.approx(longest, rel=1e-6)
    assert log["regularizers/size/custom/ones"] == 1.0
    assert log["regularizers/size/custom/seen_total"] == 2.0 * accumulation


def test_means_over_the_steps_of_a_log_line(tmp_path: Path) -> None:
    def steps(folder: Path, **changed: Any) -> Sequence[Mapping[str, float]]:
        trainer = RegularizedTrainer(
            model=tiny.build(torch.float32),
            args=arguments(folder, max_steps=4, **changed),
            train_dataset=rows([5, 9, 12, 7, 6, 10, 8, 4]),
            data_collator=Collator(),
            terms=[*TERMS, RegularizerSpec(surprise, name="held", at_most=30.0)],
            term_options={"track_grad_norms": True, "track_every": 2},
        )
        trainer.train()
        return [row for row in trainer.state.log_history if "loss" in row]

    each, (whole,) = steps(tmp_path / "each"), steps(tmp_path / "whole", logging_steps=4)
    for name in ("total_grad_norm", "cosines/base/confidence", "regularizers/held/grad_norm"):
        tracked = [row[name] for row in each if name in row]
        assert len(tracked) == 2
        assert whole[name] == pytest.approx(sum(tracked) / 2, rel=1e-5)
    assert whole["regularizers/held/bound"] == 30.0
    violations = [row["regularizers/held/violation"] for row in each]
    assert whole["regularizers/held/violation"] == pytest.approx(sum(violations) / 4, rel=1e-5)


def output(norm: float, cosine: float, weight: float = 0.5) -> CustomLossOutput:
    """Output whose gradients other processes have seen too, so that they are not known here."""
    custom = {"x": norm, "seen_total": 2.0}
    spread = RegularizerOutput("t", 1.0, weight, weight, norm, weight * norm, custom)
    base = BaseLossOutput(1.0, 2.0)
    return CustomLossOutput(1.5, base, {"t": spread}, 0.5, 3.0, cosines={("base", "t"): cosine})


def test_a_sum_of_gradients_that_are_not_known_has_no_norm() -> None:
    details = StepDetails()
    assert details.end_step() is None
    details.add(output(3.0, 0.5), 0.25, 1)
    details.add(output(4.0, -0.1), 0.75, 1)
    untracked = CustomLossOutput(1.0, BaseLossOutput(1.0))
    details.add(untracked, 1.0, 1)
    assert metrics_of([details.end_step()]) == pytest.approx(
        {"regularizers/t/custom/x": 0.25 * 3 + 0.75 * 4, "regularizers/t/custom/seen_total": 4.0}
    )


def test_the_processes_of_a_step_count_with_their_shares() -> None:
    ranks = []
    for norm, observed, share in ((3.0, 10.0, 0.5), (3.0, 20.0, 1.5)):
        details = StepDetails()
        of_rank = output(norm, 0.5)
        held = replace(
            of_rank.regularizers["t"],
            value=observed,
            bound=16.0,
            violation=max(0.0, observed - 16.0),
            custom={"observed": observed, "seen_total": 2.0},
        )
        details.add(replace(of_rank, regularizers={"t": held}), share, 1)
        ranks.append(details.end_step())
    mean = (0.5 * 10 + 1.5 * 20) / 2
    assert metrics_of([*ranks, None]) == pytest.approx(
        {
            "regularizers/t/custom/observed": mean,
            "regularizers/t/custom/seen_total": 4.0,
            "regularizers/t/bound": 16.0,
            "regularizers/t/violation": mean - 16,
            "base_loss/grad_norm": 2.0,
            "regularizers/t/grad_norm": 3.0,
            "regularizers/t/grad_norm_weighted": 1.5,
            "cosines/base/t": 0.5,
            "total_grad_norm": 3.0,
        }
    )
    assert metrics_of([None, None]) == {}


def test_a_lower_bound_turns_the_cosine_round(tmp_path: Path) -> None:
    found = {}
    for accumulation in (1, 2):
        trainer = RegularizedTrainer(
            model=tiny.build(torch.float32),
            args=arguments(
                tmp_path,
                max_steps=1,
                per_device_train_batch_size=2 // accumulation,
                gradient_accumulation_steps=accumulation,
                learning_rate=0.0,
            ),
            train_dataset=rows([6]) * 2,
            data_collator=Collator(),
            terms=[
                term(entropy, name="high", at_least=100.0),
                term(entropy, name="low", at_most=0.1),
            ],
            term_options={"track_grad_norms": True},
        )
        trainer.train()
        found[accumulation] = trainer.state.log_history[0]
    for key in ("cosines/high/low", "cosines/base/high", "regularizers/high/grad_norm"):
        assert found[2][key] == pytest.approx(found[1][key], rel=1e-4)
    assert found[1]["cosines/high/low"] == pytest.approx(-1.0)


def test_a_bound_has_the_weight_of_one_batch(tmp_path: Path) -> None:
    weights = []
    for accumulation in (1, 2, 4):
        trainer = RegularizedTrainer(
            model=tiny.build(torch.float32),
            args=arguments(
                tmp_path,
                max_steps=1,
                per_device_train_batch_size=4 // accumulation,
                gradient_accumulation_steps=accumulation,
                learning_rate=0.0,
            ),
            train_dataset=rows([6]) * 4,
            data_collator=Collator(),
            terms=[term(entropy, name="low", at_most=0.1)],
        )
        trainer.train()
        log = trainer.state.log_history[0]
        weights.append(log["regularizers/low/weight"])
        # Σ_t NLL / 0.1, the unit, times the first gain, times 1 + KP far beyond the bound
        assert log["regularizers/low/value"] > 0.2
        assert weights[-1] == pytest.approx(log["base_loss/value"] / 0.1 * GAIN * (1 + KP))
    assert weights[1:] == pytest.approx([weights[0]] * 2, rel=1e-5)


def uncertain(completion_entropy: Tensor, completion_mask: Tensor) -> Any:
    return -completion_entropy.sum() / completion_mask.sum(), {"tokens": completion_mask.sum()}


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", ["SFT", "GRPO", "DPO"])
def test_trl_logs_them_too(name: str, accumulation: int, tmp_path: Path) -> None:
    more: dict[str, Any] = {"beta": 1e-9} if name == "GRPO" else {}
    trainer = build(
        name,
        tmp_path,
        accumulation,
        terms=[term(uncertain, 0.3, "uncertain")],
        term_options={"track_grad_norms": True},
        **more,
    )
    recorder = Recorder(trainer)
    trainer.train()
    log = trainer.state.log_history[0]
    read = [sequences(name, batch) for batch in recorder.batches]
    counts = [sum(int(tokens.counted[1:].sum()) for tokens in batch) for batch in read]
    gradient: Any = 0.0
    for batch, count in zip(read, counts, strict=True):
        logits, _ = predictions(trainer.model, batch, 0.7 if name == "GRPO" else 1.0)
        logprobs = logits.log_softmax(-1)
        share = count / sum(counts) if name in BY_TOKENS else 1 / accumulation
        value = (logprobs.exp() * logprobs).sum(-1).mean()
        gradient = gradient + share * flat(value, trainer.model)
    norm = log["regularizers/uncertain/grad_norm"]
    assert norm == pytest.approx(gradient.norm().item(), rel=1e-4)
    whole = torch.cat([g.flatten() for g in recorder.gradients.values()])
    assert log["total_grad_norm"] == pytest.approx(whole.norm().item(), rel=1e-4)
    assert -1 <= log["cosines/base/uncertain"] <= 1
    assert log["regularizers/uncertain/custom/tokens"] == sum(counts)
