"""Fields and pairs that terms read, checked for every line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.errors import DataError
from steelyard.experiment import read_config
from steelyard.experiment.data.batches import read_data_files
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.training.terms import build_terms
from tests.experiment.small_runs import lines, write_data

PARITY = {"use": "demographic_parity", "name": "parity", "weight": 0.1}
ADAPTIVE = {"use": "adaptive", "name": "parity", "weight": 0.1}
FIELD = r"must have the field 'group', a number or a list of numbers, for regularizer 'parity'"


def read(folder: Path, plain: Encoder, term: dict[str, Any] | None = None, **tables: Any) -> None:
    if not (folder / "train.jsonl").read_text():
        write_data(folder / "train.jsonl", lines(6))
    terms = [] if term is None else [term]
    raw = {"data": {"path": "train.jsonl"}, "regularizers": terms, **tables}
    config = read_config(raw, folder=folder)
    read_data_files(config, build_terms(config), plain.tokenizer)


@pytest.mark.parametrize(
    "term",
    [PARITY, {**ADAPTIVE, "options": {"regularizer": "demographic_parity", "target": 0.1}}],
    ids=["plain", "wrapped"],
)
def test_a_line_without_a_field_is_named(
    folder: Path, plain: Encoder, term: dict[str, Any]
) -> None:
    data = [{**line, "group": number % 2} for number, line in enumerate(lines(6))]
    write_data(folder / "train.jsonl", data)
    read(folder, plain, term)
    data[2]["group"] = "text"
    del data[4]["group"]
    write_data(folder / "train.jsonl", data)
    with pytest.raises(DataError, match=rf"train\.jsonl:3: {FIELD}, got none\. \(1 more lines"):
        read(folder, plain, term)
    read(folder, plain, {**term, "on_error": "skip"})
    read(folder, plain, {**term, "enabled": False})


@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_importance_weights_need_the_log_probs_of_the_samples(
    folder: Path, plain: Encoder, kind: str
) -> None:
    term = {"use": f"{kind}_importance_sampling", "weight": 0.1, "options": {"regularizer": "l2"}}
    with pytest.raises(DataError, match=r"train\.jsonl:1: must have the field 'logprobs'"):
        read(folder, plain, term)


def test_reference_logprobs_are_computed_unless_the_config_says_never(
    folder: Path, plain: Encoder
) -> None:
    term = {"use": "kl_to_reference", "weight": 0.1}
    read(folder, plain, term)
    with pytest.raises(
        DataError, match=r"train\.jsonl:1: must have the field 'reference_logprobs'"
    ):
        read(folder, plain, term, data={"path": "train.jsonl", "reference": "never"})


@pytest.mark.parametrize("use", ["dpo", "chosen_nll"])
def test_pairs_are_needed_for_preferences(folder: Path, plain: Encoder, use: str) -> None:
    with pytest.raises(DataError, match=r"must have pairs for the base loss, .* kind completion"):
        read(folder, plain, loss={"use": use})
    with pytest.raises(
        DataError, match=r"must have pairs for regularizer 'p', lines with 'chosen'"
    ):
        read(folder, plain, {"use": use, "name": "p", "weight": 0.1})
    write_data(folder / "train.jsonl", [{"chosen": "a b", "rejected": "c d"}] * 4)
    read(folder, plain, loss={"use": use})


def own_loss(data: Any, logprobs: list[Tensor], scale: float = 1.0) -> Tensor:
    return scale * -torch.cat(logprobs).sum()


own_loss.reads_fields = ["margin"]  # type: ignore[attr-defined]  # as users declare it


class OwnTerm:
    name = "own"
    reads_fields = ("margin",)

    def compute(self, data: Any, logprobs: list[Tensor]) -> Tensor:
        return torch.cat(logprobs).sum()


@pytest.mark.parametrize(
    "tables",
    [
        {"loss": {"use": f"{__name__}:own_loss"}},
        {"loss": {"use": f"{__name__}:own_loss", "options": {"scale": 2.0}}},
        {"regularizers": [{"use": f"{__name__}:OwnTerm", "weight": 1.0}]},
        {"regularizers": [{"use": f"{__name__}:own_loss", "weight": 1.0}]},
    ],
    ids=["loss", "loss with options", "class", "function"],
)
def test_the_fields_that_own_terms_declare_are_checked(
    folder: Path, plain: Encoder, tables: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:1: must have the field 'margin'"):
        read(folder, plain, **tables)
    write_data(folder / "train.jsonl", [{**line, "margin": 1.0} for line in lines(6)])
    read(folder, plain, **tables)


def test_a_loss_over_advantages_needs_them(folder: Path, plain: Encoder) -> None:
    with pytest.raises(DataError, match=r"must have the field 'logprobs', .* for the base loss"):
        read(folder, plain, loss={"use": "ppo"})
