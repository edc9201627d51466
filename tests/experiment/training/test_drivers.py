"""Records of driving examples: line, text and shares; long texts, split characters, secrets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from steelyard import CustomLossOutput, compute
from steelyard.experiment.config.train_table import TrainConfig
from steelyard.experiment.data.batches import Dataset, FixedData
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.data.files import read_records
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.training.drivers import driver_records, redact_pieces
from steelyard.experiment.training.terms import Terms
from steelyard.output.redaction import remember
from tests.experiment.small_runs import write_data


def dataset_of(folder: Path, *rows: dict[str, Any], encoder: Encoder) -> Dataset:
    path = write_data(folder / "d.jsonl", rows)
    file = read_records(path, encoder.encode, skip_bad=False)
    return Dataset(file.groups, [], file.kind, encoder, path.name, file.lines)


def answer(text: str, prompt: str = "") -> dict[str, Any]:
    return {"prompt": prompt, "completion": text}


def output_of(gradients: list[list[float]], **options: Any) -> CustomLossOutput:
    """Output of a linear base loss, whose gradient is known."""
    rows = [torch.tensor(row) for row in gradients]

    def base(_: Any, logprobs: list[Tensor]) -> Tensor:
        return (torch.cat(logprobs) * torch.cat(rows)).sum()

    logprobs = [torch.zeros_like(row) for row in rows]
    return compute([], logprobs, base, track_grad_norms=True, **options)


def records_of(
    output: CustomLossOutput, step: int, dataset: Dataset, lines: Sequence[int]
) -> list[dict[str, Any]]:
    batch = FixedData(dataset, TrainConfig(), Terms(None, ()), cast("Backend", None)).batch(lines)
    return driver_records(output, step, batch, dataset.encoder.tokenizer)


def tokens_of(record: dict[str, Any], index: int = 0) -> list[tuple[str, float | None]]:
    return [(text, share) for text, share in record["data"][index]["tokens"]]


def text_of(record: dict[str, Any]) -> str:
    return "".join(text for text, _ in tokens_of(record))


def test_a_record_has_the_lines_and_the_text_with_shares(tmp_path: Path, plain: Encoder) -> None:
    # Each is one byte a token, and an end token; the first token has no log-prob.
    dataset = dataset_of(tmp_path, *map(answer, ("ab", "cd", "ef")), encoder=plain)
    output = output_of([[1.0, -3.0], [0.0, 4.0], [0.0, 0.0]])
    (record,) = records_of(output, 7, dataset, [2, 0, 1])
    assert (record["step"], record["term"], record["file"]) == (7, "base", "d.jsonl")
    assert record["grad_norm"] == pytest.approx(26**0.5)
    assert record["data"] == [
        {"line": 3, "share": 0.5, "tokens": [("e", 0.0), ("f", 0.125), ("<|end|>", 0.375)]},
        {"line": 1, "share": 0.5, "tokens": [("a", 0.0), ("b", 0.0), ("<|end|>", 0.5)]},
    ]


def test_the_norm_is_that_of_the_shares(tmp_path: Path, plain: Encoder) -> None:
    dataset = dataset_of(tmp_path, answer("ab"), encoder=plain)
    output = output_of([[3.0, 4.0]])
    elsewhere = replace(
        output, base_loss=replace(output.base_loss, grad_norm=100.0), grad_space="parameters"
    )
    (record,) = records_of(elsewhere, 0, dataset, [0])
    assert record["grad_norm"] == pytest.approx(5.0)


def test_at_most_three_data_of_a_term_are_recorded(tmp_path: Path, plain: Encoder) -> None:
    dataset = dataset_of(tmp_path, *[answer("ab")] * 5, encoder=plain)
    (record,) = records_of(output_of([[1.0, 1.0]] * 5), 0, dataset, range(5))
    assert [(datum["line"], datum["share"]) for datum in record["data"]] == [
        (1, 0.2), (2, 0.2), (3, 0.2),
    ]  # fmt: skip


def test_a_pair_names_the_answer(tmp_path: Path, plain: Encoder) -> None:
    rows = [{"chosen": "ab", "rejected": "cd"}, {"chosen": "ef", "rejected": "gh"}]
    dataset = dataset_of(tmp_path, *rows, encoder=plain)
    output = output_of([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    (record,) = records_of(output, 0, dataset, [0, 1])
    found = [(datum["line"], datum["field"], datum["tokens"][0][0]) for datum in record["data"]]
    assert found == [(2, "chosen", "e"), (1, "rejected", "c")]


def test_terms_without_a_gradient_by_log_probs_have_no_record(
    tmp_path: Path, plain: Encoder
) -> None:
    dataset = dataset_of(tmp_path, answer("ab"), encoder=plain)
    terms = [
        {"fn": lambda *_: 1.0, "weight": 1.0, "name": "judge", "gradient": "none"},
        {"fn": lambda _, rows: rows[0].sum() * 0, "weight": 1.0, "name": "zero"},
        {"fn": lambda _, rows: rows[0].sum(), "weight": 1.0, "name": "sum"},
    ]
    output = output_of([[1.0, 1.0]], regularizers=terms)
    assert [r["term"] for r in records_of(output, 0, dataset, [0])] == ["base", "sum"]
    untracked = compute([], [torch.zeros(2)], lambda _, rows: rows[0].sum())
    assert records_of(untracked, 0, dataset, [0]) == []


def test_bytes_of_one_character_are_one_piece(tmp_path: Path, plain: Encoder) -> None:
    dataset = dataset_of(tmp_path, answer("aé😀b"), encoder=plain)
    output = output_of([[1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 2.0]])
    (record,) = records_of(output, 0, dataset, [0])
    assert tokens_of(record) == [
        ("a", 0.0), ("é", 0.2), ("😀", 0.5), ("b", 0.1), ("<|end|>", 0.2),
    ]  # fmt: skip


def test_words_keep_their_spaces(tmp_path: Path) -> None:
    # As the tokenizers of Llama 2 and T5: their decoder drops the space before the first word.
    raw = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "</s>": 2}, unk_token="</s>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        eos_token="</s>",
    )
    dataset = dataset_of(tmp_path, answer("a b b"), encoder=Encoder(tokenizer, 8))
    (record,) = records_of(output_of([[1.0, 1.0, 2.0]]), 0, dataset, [0])
    assert [text for text, _ in tokens_of(record)] == ["a", " b", " b", "</s>"]


def test_a_long_text_is_shortened_around_its_strongest_tokens(tmp_path: Path) -> None:
    from steelyard.engine.tiny import tokenizer  # noqa: PLC0415

    encoder = Encoder(tokenizer(), 500)
    text = "".join(chr(ord("a") + at % 26) for at in range(400))
    dataset = dataset_of(tmp_path, answer(text), encoder=encoder)
    gradient = [0.0] * 400
    gradient[99] = gradient[299] = 1.0  # those of the characters 100 and 300
    (record,) = records_of(output_of([gradient]), 0, dataset, [0])
    assert text_of(record) == f"…{text[95:106]}…{text[295:306]}…"
    assert [share for _, share in tokens_of(record) if share is None] == [None] * 3
    assert [text for text, share in tokens_of(record) if share] == [text[100], text[300]]
    # All are alike: the record stays small.
    (record,) = records_of(output_of([[1.0] * 400]), 0, dataset, [0])
    assert 60 <= len(tokens_of(record)) <= 82
    assert text_of(record).startswith(text[:60])


def test_a_secret_is_redacted_although_it_spans_tokens(tmp_path: Path, plain: Encoder) -> None:
    secret = "hunter2-hunter2"
    remember(secret)
    dataset = dataset_of(tmp_path, answer(f"key {secret}!"), encoder=plain)
    (record,) = records_of(output_of([[1.0] * 20]), 0, dataset, [0])
    assert tokens_of(record) == [("key ***!<|end|>", 1.0)]
    pieces = [("hunter2", 0.25), ("…", None), ("-", 0.25)]
    assert redact_pieces(pieces) == pieces
    spanning = [("a hunter2", 0.25), ("-hunter2", 0.5), ("…", None)]
    assert redact_pieces(spanning) == [("a ***…", 0.75)]
    ((short, share),) = redact_pieces([(f"{secret} {'b' * 900}", 0.5)])
    assert (len(short), share) == (301, 0.5)
