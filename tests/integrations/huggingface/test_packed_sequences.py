"""Sequences of one batch without padding: each is a datum, as in the same batch with padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.integrations.huggingface.completion import packed_spans
from tests.integrations.huggingface.test_trl import Recorder, assert_equal, step
from tests.integrations.huggingface.training import RegularizedTrainer, arguments, rows
from tests.integrations.huggingface.trl_trainers import build, predictions, sequences

Data = Sequence[Mapping[str, Mapping[str, Tensor]]]

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


def likelihood(data: Data, logprobs: Sequence[Tensor]) -> Tensor:
    """Mean over the sequences of the squared sum of their log-probs."""
    weights = [datum["loss_fn_inputs"]["weights"] for datum in data]
    sums = [(w * row).sum() for w, row in zip(weights, logprobs, strict=True)]
    return torch.stack(sums).square().mean()


def lengths(data: Data, logprobs: Sequence[Tensor]) -> list[float]:
    """One penalty for each sequence, for a score gradient."""
    return [datum["loss_fn_inputs"]["weights"].sum().item() ** 2 for datum in data]


TERMS = [
    RegularizerSpec(likelihood, 0.01, "likelihood"),
    RegularizerSpec(lengths, 0.02, "lengths", gradient="score"),
]
WITHOUT_PADDING: list[dict[str, Any]] = [
    {"padding_free": True, "max_length": None},
    {"packing": True, "max_length": 40},
]


@pytest.mark.parametrize("changed", WITHOUT_PADDING, ids=["padding_free", "packing"])
def test_values_and_gradients_are_those_of_each_sequence(
    changed: Mapping[str, Any], tmp_path: Path
) -> None:
    padded = build("SFT", tmp_path / "padded", terms=TERMS)
    expected = step(padded, padded_batches := Recorder(padded), regularized=True)
    (batch,) = padded_batches.batches
    plain = step(padded, padded_batches, regularized=False)
    trainer = build("SFT", tmp_path / "packed", terms=TERMS, **changed)
    found = step(trainer, recorder := Recorder(trainer), regularized=True)
    (packed,) = recorder.batches
    assert packed["input_ids"].shape[0] == 1
    assert_equal(
        {n: found[n] - plain[n] for n in found}, {n: expected[n] - plain[n] for n in expected}
    )

    # By hand, one sequence at a time: mean (Σ log p)², and the score (cᵢ − c̄) / (n − 1).
    model = padded.model
    model.zero_grad()
    read = sequences("SFT", batch)
    costs = torch.tensor([float(tokens.counted[1:].sum()) ** 2 for tokens in read])
    sums = []
    for tokens in read:
        logits, ids = predictions(model, [tokens], 1.0)
        sums.append(logits.log_softmax(-1).gather(-1, ids[:, None]).sum())
    every = torch.stack(sums)
    scores = (costs - costs.mean()) / (len(costs) - 1)
    total: Any = 0.01 * every.square().mean() + 0.02 * (scores * every).sum()
    total.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_equal({n: found[n] - plain[n] for n in gradients}, gradients)
    values = {"likelihood": every.square().mean().item(), "lengths": costs.mean().item()}
    for name, value in values.items():
        log = trainer.state.log_history[0][f"regularizers/{name}/value"]
        assert log == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("lengths_too", [True, False])
def test_transformers_own_collator_is_unpacked(lengths_too: bool, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def look(data: Data, logprobs: Sequence[Tensor]) -> Tensor:
        seen.append([len(row) for row in logprobs])
        assert [d["loss_fn_inputs"]["weights"].tolist() for d in data] == [
            [1.0] * (n - 1) for n in (5, 9, 6)
        ]
        return likelihood(data, logprobs)

    data = rows([5, 9, 6])
    trainer = RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=arguments(
            tmp_path,
            per_device_train_batch_size=3,
            max_steps=1,
            train_sampling_strategy="sequential",
        ),
        train_dataset=[{name: x.tolist() for name, x in row.items()} for row in data],
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=lengths_too),  # type: ignore[no-untyped-call]
        terms=[RegularizerSpec(look, 0.1, "look")],
    )
    trainer.train()
    assert seen == [[4, 8, 5]]
    model, sums = tiny.build(torch.float32), []
    for row in data:
        logits = model(row["input_ids"][None]).logits[0, :-1]
        sums.append(logits.log_softmax(-1).gather(-1, row["input_ids"][1:, None]).sum())
    value = torch.stack(sums).square().mean().item()
    log = trainer.state.log_history[0]
    assert log["regularizers/look/value"] == pytest.approx(value, rel=1e-5)


SHAPE = torch.Size([2, 6])
RESTARTING = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
TWO_EACH = [(0, 0, 3), (0, 3, 6), (1, 0, 2), (1, 2, 6)]


def test_sequences_begin_where_positions_do() -> None:
    assert packed_spans({"position_ids": RESTARTING}, SHAPE) == TWO_EACH
    attended = torch.ones(SHAPE, dtype=torch.long)
    assert packed_spans({"position_ids": RESTARTING, "attention_mask": attended}, SHAPE) == TWO_EACH
    blocks = {"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool)}
    assert packed_spans({"position_ids": RESTARTING, **blocks}, SHAPE) == TWO_EACH
    shared = {"position_ids": RESTARTING[:1]}
    assert packed_spans(shared, SHAPE) == [(r, c, c + 3) for r in (0, 1) for c in (0, 3)]


def test_cumulative_lengths_go_before_positions() -> None:
    both = {
        "cu_seq_lens_q": torch.tensor([0, 4, 6, 12], dtype=torch.int32),
        "position_ids": RESTARTING,
    }
    assert packed_spans(both, SHAPE) == [(0, 0, 4), (0, 4, 6), (1, 0, 6)]
    of_other_tokens = {"cu_seq_lens_q": torch.tensor([0, 4, 6])}  # without their padding
    assert packed_spans(of_other_tokens, SHAPE) is None


def test_padding_is_no_sequence() -> None:
    to_a_multiple = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]])}
    assert packed_spans(to_a_multiple, torch.Size([1, 8])) == [(0, 0, 3), (0, 3, 5)]


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"position_ids": torch.arange(6).expand(2, 6)},
        {  # padding in front, as generate() counts it
            "position_ids": torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
        },
        {"position_ids": torch.zeros(3, 2, 6)},  # one for each axis of an image
    ],
)
def test_rows_that_are_one_sequence_each(inputs: Mapping[str, Any]) -> None:
    assert packed_spans(inputs, SHAPE) is None
